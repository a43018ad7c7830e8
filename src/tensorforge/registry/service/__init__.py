"""The registry over HTTP.

wire          what goes over the wire, and its translation to and from the registry's values
operations    what an operation is, how its request is read and its errors are answered
models_api, versions_api, admin_api    the REST operations, by what they are about
openapi       the description, made from the same table as the routes
mlflow_api    the operations that MLflow clients use
application   the ASGI application: who may come in, how much, and where to
server        the process that serves it
"""

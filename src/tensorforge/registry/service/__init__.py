"""The registry over HTTP.

wire; models_wire, versions_wire, validations_wire, admin_wire, mlflow_wire
              what goes over the wire, and its translation to and from the registry's values
operations    what an operation is, and how its request is read
failures      what a caller gets when something went wrong
endpoints     from an HTTP request to an operation and back
state         what all requests share; metrics: what is counted, over all workers
writer        the one thread that makes the changes of all requests
models_api, versions_api, admin_api    the REST operations, by what they are about
openapi       the description, made from the same table as the routes
mlflow_api    the operations that MLflow clients use; mlflow_documents: what the database writes for them
application   the ASGI application: who may come in, how much, and where to
server        the process that serves it
"""

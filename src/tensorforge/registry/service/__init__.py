"""The registry over HTTP.

`application` checks who may send a request and finds its endpoint. `endpoints` decodes the request, runs an
operation of `rest` or `mlflow`, and encodes the reply; `operations` says what an operation is, `shared_wire`
what all requests and answers share, `error_responses` what a failed request gets. `context` has what all
requests share, `write_queue` the thread that makes all changes to an SQLite database. `openapi` describes the
operations, `http_server` is the process.
"""

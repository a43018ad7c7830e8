"""The REST API under `/api/v1`: `*_api` has the operations, `*_wire` their requests and answers."""

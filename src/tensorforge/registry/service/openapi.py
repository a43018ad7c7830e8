"""The OpenAPI description of the service, made from the table of operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

import tensorforge
from tensorforge.registry.service.operations import Operation, phrase
from tensorforge.registry.service.shared_wire import ErrorAnswer, WireRequest

_REFERENCE = "#/components/schemas/{name}"
_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "model_id": {"type": "string", "minLength": 1, "maxLength": 200},
    "version": {"type": "string", "pattern": r"^\d{1,10}\.\d{1,10}\.\d{1,10}$"},
    "alias": {"type": "string", "minLength": 1, "maxLength": 100},
    "webhook_id": {"type": "integer", "minimum": 1, "maximum": 2**53},
}


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 description of these operations."""
    table = list(operations)
    kinds = {operation.answer for operation in table} | {operation.body for operation in table}
    ordered = sorted(
        (kind for kind in kinds | {ErrorAnswer} if kind is not None), key=lambda k: k.__name__
    )
    _, components = msgspec.json.schema_components(ordered, ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for operation in table:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "TensorForge model registry",
            "version": tensorforge.__version__,
            "description": "Models, their versions and states, their evidence, and which version serves.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": f"Needs the scope `{operation.scope.value}`.",
        "parameters": [
            *(_path_parameter(name) for name in operation.path_parameters),
            *_query_parameters(operation.query),
            *_headers(operation),
        ],
        "responses": {str(status): _response(operation, status) for status in operation.statuses()},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json(operation.body.__name__)}
    return described


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}


def _query_parameters(kind: type[WireRequest]) -> list[dict[str, Any]]:
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _flat(each)}
        for name, each in schema["properties"].items()
    ]


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without null and default: an optional query parameter is left out, never null."""
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    return options[0] if options else {k: v for k, v in schema.items() if k != "default"}


def _headers(operation: Operation) -> list[dict[str, Any]]:
    headers = []
    if operation.if_match:
        schema = {"type": "string", "pattern": r'^("\d{1,18}"|\*)$'}
        headers.append({"name": "If-Match", "in": "header", "required": True, "schema": schema})
    if operation.idempotent:
        schema = {"type": "string", "pattern": r"^[\x21-\x7e]{1,200}$"}
        headers.append({"name": "Idempotency-Key", "in": "header", "schema": schema})
    return headers


def _response(operation: Operation, status: int) -> dict[str, Any]:
    response: dict[str, Any] = {"description": phrase(status)}
    if status == 414:
        # The HTTP server itself answers, without a body, if it does not read the URL to its end.
        return response
    if status != operation.status:
        response["content"] = _json(ErrorAnswer.__name__)
    elif operation.answer is not None:
        response["content"] = _json(operation.answer.__name__)
        if operation.etag:
            response["headers"] = {"ETag": {"schema": {"type": "string"}}}
    return response


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=name)}}}

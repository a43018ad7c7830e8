"""How errors travel over gRPC: each kind of error has one status code."""

from __future__ import annotations

from typing import Any

import grpc

from tensorforge.errors import (
    AuthenticationError,
    ConflictError,
    DeadlineExceededError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    TensorForgeError,
    UnavailableError,
)

_CODES: dict[type[TensorForgeError], Any] = {
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    ConflictError: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: TensorForgeError) -> Any:
    """The status code with which the server answers; errors without one of their own count as conflicts."""
    codes = (code for kind, code in _CODES.items() if isinstance(error, kind))
    return next(codes, grpc.StatusCode.FAILED_PRECONDITION)


def translate(error: grpc.RpcError, address: str) -> TensorForgeError:
    """The error that a client raises for the server's answer, or because there is none."""
    details = error.details() or ""
    for kind, code in _CODES.items():
        if code is error.code():
            return kind(details)
    return UnavailableError(f"no coordinator answers at {address}: {details}")

"""A model registry store for MLflow's own server, so that MLflow's pages show this registry's models.

    mlflow server --registry-store-uri tensorforge://127.0.0.1:8600

MLflow finds the store by its entry point. `tensorforges://` calls the registry over TLS. The token is in
`MLFLOW_TRACKING_TOKEN`.
"""

from __future__ import annotations

import functools
from urllib.parse import urlsplit

from mlflow.store.model_registry.rest_store import RestStore
from mlflow.utils.credentials import get_default_host_creds

from tensorforge.errors import InvalidInputError

_SCHEMES = {"tensorforge": "http", "tensorforges": "https"}


class TensorForgeStore(RestStore):
    """Passes every call of MLflow's server on to a registry service."""

    def __init__(self, store_uri: str, tracking_uri: str | None = None) -> None:  # noqa: ARG002  MLflow passes it
        credentials = functools.partial(get_default_host_creds, service_url(store_uri))
        super().__init__(credentials)  # type: ignore[no-untyped-call]  # mlflow has few types


def service_url(store_uri: str) -> str:
    """The URL of the service that a store URI names; `InvalidInputError` if it names none."""
    parts = urlsplit(store_uri)
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise InvalidInputError(f"{store_uri[:200]!r} must be tensorforge://HOST:PORT")
    return f"{_SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}"

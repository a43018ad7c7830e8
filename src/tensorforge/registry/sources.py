"""Where the files of an MLflow source lie: `models:/m-...` and `runs:/...` resolved by a tracking server.

Only the tracking server that the operator named is asked, and only for an id: a client cannot make the registry
call another address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tensorforge.errors import UnavailableError

_LOGGED_MODEL = re.compile(r"models:/(m-[0-9A-Za-z-]{1,100})(?:/(.*))?")
_RUN = re.compile(r"runs:/([0-9A-Za-z_-]{1,100})(?:/(.*))?")
_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSource:
    """The location of the files, and the run, logged model and experiment that they came from."""

    uri: str = ""
    run_id: str = ""
    logged_model_id: str = ""
    experiment_id: str = ""


class SourceResolver:
    """Asks a tracking server where the files of a logged model or a run lie."""

    def __init__(
        self,
        tracking_uri: str,
        *,
        token: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(
            base_url=tracking_uri.rstrip("/"),
            headers=headers,
            timeout=_TIMEOUT,
            trust_env=False,
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def resolve(self, source: str, logged_model_id: str = "") -> ResolvedSource:
        """What the tracking server knows about a source; an empty answer if it knows nothing.

        `UnavailableError` if the tracking server does not answer.
        """
        logged, run = _LOGGED_MODEL.fullmatch(source), _RUN.fullmatch(source)
        model_id = logged[1] if logged else logged_model_id
        if model_id and re.fullmatch(r"m-[0-9A-Za-z-]{1,100}", model_id):
            return self._logged_model(model_id, (logged[2] or "") if logged else "")
        return self._run(run[1], run[2] or "") if run else ResolvedSource()

    def _logged_model(self, model_id: str, path: str) -> ResolvedSource:
        answer = self._get(f"/api/2.0/mlflow/logged-models/{quote(model_id, safe='')}")
        info = answer.get("model", {}).get("info", {})
        return ResolvedSource(
            uri=_join(info.get("artifact_uri", ""), path),
            run_id=info.get("source_run_id", ""),
            logged_model_id=model_id,
            experiment_id=info.get("experiment_id", ""),
        )

    def _run(self, run_id: str, path: str) -> ResolvedSource:
        answer = self._get("/api/2.0/mlflow/runs/get", run_id=run_id)
        info = answer.get("run", {}).get("info", {})
        return ResolvedSource(
            uri=_join(info.get("artifact_uri", ""), path),
            run_id=run_id,
            experiment_id=info.get("experiment_id", ""),
        )

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        try:
            answer = self._client.get(path, params=parameters)
            if answer.status_code == 404:
                return {}
            answer.raise_for_status()
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise UnavailableError(f"the tracking server did not answer: {error}") from error
        return found if isinstance(found, dict) else {}


def _join(uri: str, path: str) -> str:
    return f"{uri.rstrip('/')}/{path}" if uri and path else uri

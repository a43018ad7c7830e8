"""The models of a registry: list, versions, evidence, audit, comparison, and the changes a person may make."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tensorforge.dashboard.charts import bar_chart
from tensorforge.dashboard.page_context import (
    REGISTRY_READ,
    PageContext,
    go,
    read_form,
    require_confirmation,
    visitor_of,
    whole,
)
from tensorforge.dashboard.sessions import Visitor
from tensorforge.errors import IntegrityError, InvalidInputError, LostRaceError, NotFoundError
from tensorforge.registry.domain.deployment_lifecycle import (
    DEPLOYMENT_LIFECYCLE,
    DeploymentState,
    needs_evidence,
)
from tensorforge.registry.domain.evidence import evidence_problem
from tensorforge.registry.domain.models import Actor, ModelMetadata
from tensorforge.registry.domain.versions import ModelVersion, parse_version
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.tokens import Scope

_PAGE = 100
_AUDIT_ROWS = 200
_BARS = 12


class ModelPages:
    """The handlers of the pages about models."""

    def __init__(self, context: PageContext) -> None:
        self._context = context

    def routes(self) -> list[Route]:
        """The routes of these pages."""
        version = "/models/{model}/versions/{version}"
        return [
            Route("/models", self.index),
            Route("/models/{model}", self.model),
            Route("/models/{model}/compare", self.compare),
            Route("/models/{model}/rollback", self.rollback, methods=["POST"]),
            Route("/models/{model}/alias", self.alias, methods=["POST"]),
            Route(version, self.version),
            Route(f"{version}/transition", self.transition, methods=["POST"]),
        ]

    @property
    def _registry(self) -> ModelRegistry:
        if self._context.registry is None:
            raise NotFoundError("this dashboard has no registry; start it with --registry")
        return self._context.registry

    async def index(self, request: Request) -> Response:
        """The models whose name contains a text."""
        visitor_of(request, REGISTRY_READ)
        text, token = request.query_params.get("q", ""), request.query_params.get("token")
        found = await self._context.run(self._search, text, token)
        return self._context.page(request, "models.html", q=text, found=found)

    def _search(self, text: str, token: str | None) -> Any:
        if "'" in text or '"' in text:
            raise InvalidInputError("a search has no quotation marks")
        query = f"name ILIKE '%{text}%'" if text else ""
        return self._registry.search_models(query, limit=_PAGE, token=token)

    async def model(self, request: Request) -> Response:
        """One model: versions, aliases, what serves now and what served at a moment."""
        visitor = visitor_of(request, REGISTRY_READ)
        name, at = request.path_params["model"], request.query_params.get("at", "")
        facts = await self._context.run(self._model_facts, name, at)
        return self._context.page(request, "model.html", at=at, may=_may(visitor), **facts)

    def _model_facts(self, name: str, at: str) -> dict[str, Any]:
        registry = self._registry
        model = registry.get_model(name)
        serving = None if model.production is None else registry.get(name, model.production)
        return {
            "model": model,
            "versions": registry.search_versions(model_id=name, limit=_PAGE).items,
            "serving": serving,
            "served": registry.production_at(name, _moment(at)) if at else None,
            "audit": [*reversed(registry.history(name, limit=_AUDIT_ROWS))],
            "chain": self._chain_state(),
        }

    async def version(self, request: Request) -> Response:
        """One version: where it stands, its evidence beside the SLA, its lineage and its audit."""
        visitor = visitor_of(request, REGISTRY_READ)
        facts = await self._context.run(self._version_facts, *_names(request))
        return self._context.page(request, "version.html", may=_may(visitor), **facts)

    def _version_facts(self, name: str, version: ModelVersion) -> dict[str, Any]:
        registry = self._registry
        metadata, model = registry.require(name, version), registry.get_model(name)
        validations = registry.validations(name, version)
        newest = validations[0] if validations else None
        problem = evidence_problem(newest, metadata.state, metadata.revision, model.sla)
        limit = None if model.sla is None else model.sla.max_latency_ms
        return {
            "model": model,
            "metadata": metadata,
            "states": list(DeploymentState),
            "next_states": [
                (state, problem if needs_evidence(metadata.state, state) else None)
                for state in DEPLOYMENT_LIFECYCLE.allowed(metadata.state)
            ],
            "lifecycle": lifecycle_drawing(metadata.state),
            "validations": validations,
            "latency": _latency(validations, limit),
            "audit": [*reversed(registry.history(name, version=version, limit=_AUDIT_ROWS))],
            "chain": self._chain_state(),
            "run_is_known": self._knows_run(metadata),
        }

    def _knows_run(self, metadata: ModelMetadata) -> bool:
        return any(s.run_id == metadata.lineage.run_id for s in self._context.runs.all())

    def _chain_state(self) -> tuple[bool, str]:
        try:
            head = self._registry.verify_audit()
        except IntegrityError as error:
            return False, str(error)
        return True, f"{head.sequence} rows, newest hash {head.hash[:12]}"

    async def compare(self, request: Request) -> Response:
        """Two versions beside each other."""
        visitor_of(request, REGISTRY_READ)
        name, query = request.path_params["model"], request.query_params
        before, after = (_version(query.get(end, "")) for end in ("before", "after"))
        diff = await self._context.run(self._registry.diff, name, before, after)
        return self._context.page(request, "compare.html", model=name, diff=diff)

    async def transition(self, request: Request) -> Response:
        """Take a version into another state, if it is still at the revision that the page showed."""
        visitor, fields = await self._change(request, Scope.TRANSITION)
        name, version = _names(request)
        state = _state(fields.get("state", ""))
        force = fields.get("force") == "yes"
        if force:
            visitor.require(Scope.FORCE.value)
        expected = whole(fields, "revision")
        await self._context.run(
            lambda: self._registry.transition_state(
                name,
                version,
                state,
                actor=_actor(visitor),
                reason=fields["reason"],
                force=force,
                expected_revision=expected,
            )
        )
        path = f"/models/{quote(name, safe='')}/versions/{version}"
        return go(request, path, f"{version} is in {state.value} now")

    async def rollback(self, request: Request) -> Response:
        """Deprecate the version that serves, if it is the one that the page showed, and let another serve."""
        visitor, fields = await self._change(request, Scope.TRANSITION)
        name, expected = request.path_params["model"], whole(fields, "revision")
        done = await self._context.run(
            lambda: self._registry.rollback(
                name,
                to=_version(fields["to"]) if fields.get("to") else None,
                reason=fields["reason"],
                actor=_actor(visitor),
                expected_revision=expected,
            )
        )
        path = f"/models/{quote(name, safe='')}"
        return go(request, path, f"{done.current} serves instead of {done.previous}")

    async def alias(self, request: Request) -> Response:
        """Point an alias at a version, if it still points where the page showed."""
        visitor, fields = await self._change(request, Scope.WRITE)
        name, alias = request.path_params["model"], fields.get("alias", "").strip()

        def work() -> None:
            pointed = self._registry.get_model(name).aliases.get(alias)
            known = fields.get(f"was-{alias}", "")
            if pointed is not None and str(pointed) != known:
                raise LostRaceError(f"the alias {alias!r} points at {pointed} now; look again")
            self._registry.set_alias(
                name, alias, _version(fields.get("version", "")), actor=_actor(visitor)
            )

        await self._context.run(work)
        return go(request, f"/models/{quote(name, safe='')}", f"the alias {alias} was set")

    async def _change(self, request: Request, scope: Scope) -> tuple[Visitor, dict[str, str]]:
        visitor = visitor_of(request, scope.value)
        fields = await read_form(request)
        require_confirmation(fields)
        if not fields.get("reason", "").strip() and scope is Scope.TRANSITION:
            raise InvalidInputError("say why; the audit keeps the reason")
        return visitor, fields


def lifecycle_drawing(current: DeploymentState) -> Markup:
    """The states in a row, with the state where the version stands marked."""
    parts = []
    for state in DeploymentState:
        here = Markup(' class="here" aria-current="step"') if state is current else Markup("")
        parts.append(Markup("<li{}>{}</li>").format(here, state.value))
    return Markup('<ol class="lifecycle">{}</ol>').format(Markup("").join(parts))


def _latency(validations: Any, limit: float | None) -> Markup:
    bars = []
    for record in validations[:_BARS]:
        when = f"{record.recorded_at:%m-%d %H:%M}"
        bars.append((f"{when} p50", record.result.latency_p50_ms))
        bars.append((f"{when} p99", record.result.latency_p99_ms))
    return bar_chart("Latency of each validation", bars, unit="ms", limit=limit)


def _may(visitor: Visitor) -> dict[str, bool]:
    return {
        "transition": visitor.may(Scope.TRANSITION.value),
        "write": visitor.may(Scope.WRITE.value),
        "force": visitor.may(Scope.FORCE.value),
    }


def _actor(visitor: Visitor) -> Actor:
    return Actor(name=visitor.name, scopes=visitor.scopes)


def _names(request: Request) -> tuple[str, ModelVersion]:
    return request.path_params["model"], _version(request.path_params["version"])


def _version(text: str) -> ModelVersion:
    found = parse_version(text)
    if found is None:
        raise InvalidInputError(f"{text[:60]!r} is no version such as 1.2.0")
    return found


def _state(text: str) -> DeploymentState:
    try:
        return DeploymentState(text)
    except ValueError:
        raise InvalidInputError(f"{text[:60]!r} is no state of a version") from None


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(f"{text[:60]!r} is no date such as 2026-05-01 12:00") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

"""The pages without a browser: sessions, scopes, forms, headers, escaping."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest
from starlette.testclient import TestClient

from tensorforge.catalog import CheckpointManager, CheckpointType, CreateCheckpointRequest
from tensorforge.catalog.checkpoint_location import CheckpointLocation
from tensorforge.dashboard.dashboard_app import build
from tensorforge.dashboard.dashboard_server import OPERATE_SCOPES, READ_SCOPES
from tensorforge.dashboard.page_context import PageContext
from tensorforge.dashboard.run_sources import RunSources
from tensorforge.dashboard.sessions import COOKIE, Sessions
from tensorforge.registry import ModelRegistry
from tensorforge.registry.domain.models import Lineage, ModelMetadata, Sla, ValidationResult
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.registry.tokens import DatabaseTokens
from tensorforge.security import TokenStore

HOSTILE = "<script>document.title='taken'</script>"
FIRST, SECOND = ModelVersion(1, 0, 0), ModelVersion(1, 1, 0)


class Site:
    """The application over a folder with one run, a registry with two versions, and two tokens."""

    def __init__(self, folder):
        self.runs = folder / "runs"
        run = self.runs / "first"
        (run / "logs").mkdir(parents=True)
        (run / "logs" / "worker-0.log").write_text(f"hello {HOSTILE}\n")
        lines = [
            json.dumps(
                {"step": s, "time": 1e9 + s, "world_size": 2, "metrics": {"loss": 2.5, HOSTILE: 1}}
            )
            for s in range(3)
        ]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        with CheckpointManager(database=str(run / "catalog.db")) as manager:
            self.checkpoints = []
            for step, kind in ((1, CheckpointType.FULL), (2, CheckpointType.INCREMENTAL)):
                request = CreateCheckpointRequest(
                    training_run_id="default",
                    epoch=0,
                    step=step,
                    checkpoint_type=kind,
                    metrics={HOSTILE: 1.0},
                )
                record = manager.create(request, note="")
                manager.complete(record.checkpoint_id, size_bytes=1000, storage_path=f"step-{step}")
                self.checkpoints.append(record.checkpoint_id)
        CheckpointLocation.of(run, None, "default").write(run)
        self.registry = ModelRegistry(folder / "registry.db")
        for version in (FIRST, SECOND):
            self.registry.register(
                ModelMetadata(
                    model_id="model",
                    name=HOSTILE,
                    version=version,
                    framework=HOSTILE,
                    input_shape=(1,),
                    output_shape=(1,),
                    size_bytes=10,
                    checksum="0" * 64,
                    registered_at=datetime.now(UTC),
                    tags={"owner": HOSTILE},
                    description=HOSTILE,
                    lineage=Lineage(run_id="first", step=2, checkpoint_id=HOSTILE),
                )
            )
        self.registry.set_sla("model", Sla(max_latency_ms=10, min_accuracy=0.9))
        tokens = TokenStore()
        self.read = tokens.issue("reader", READ_SCOPES)
        self.operate = tokens.issue(HOSTILE, OPERATE_SCOPES)
        self.tokens = tokens
        stores = [tokens, DatabaseTokens(self.registry.database)]
        self.context = PageContext(
            sessions=Sessions(b"key", stores), runs=RunSources((self.runs,)), registry=self.registry
        )
        self.app = build(self.context)

    def client(self, token=None):
        client = TestClient(self.app, base_url="http://localhost", follow_redirects=False)
        if token is not None:
            assert client.post("/sign-in", data={"token": token}).status_code == 303
        return client

    def validate(self, version, latency=5.0):
        result = ValidationResult(
            model_id="model",
            version=version,
            passed=True,
            latency_p50_ms=1.0,
            latency_p99_ms=latency,
            accuracy_score=0.95,
            errors=(HOSTILE,),
        )
        self.registry.record_validation(result)


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    made.context.runs.close()
    made.registry.close()


PAGES = [
    "/runs",
    "/runs/first",
    "/runs/first/checkpoints",
    "/runs/first/logs/worker-0",
    "/models",
    "/models?q=mod",
    "/models/model",
    "/models/model/versions/1.0.0",
    "/models/model/compare?before=1.0.0&after=1.1.0",
    "/models/model?at=2020-01-01",
    "/memory",
    "/memory/bert?megabytes=1",
]


def csrf(client, path):
    return re.search(r'name="csrf" value="(\w+)"', client.get(path).text)[1]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_shown_to_a_reader_escaped_and_without_inline_script(site, path):
    site.validate(FIRST)
    answer = site.client(site.operate).get(path)
    assert answer.status_code == 200, answer.text
    assert HOSTILE not in answer.text
    assert not re.search(r"<script(?! src=)| style=| on\w+=", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", [*PAGES, "/"])
def test_nothing_is_shown_without_a_session(site, path):
    answer = site.client().get(path)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/sign-in"
    assert site.client().get(path, headers={"accept": "text/event-stream"}).status_code == 401


def test_the_cookie_is_strict_and_contains_no_token(site):
    answer = site.client().post("/sign-in", data={"token": site.read})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert site.read.split("_")[2] not in cookie


def test_a_wrong_token_is_refused(site):
    answer = site.client().post("/sign-in", data={"token": "tf_0_0"})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_a_forged_an_expired_and_a_revoked_session_are_none(site):
    client = site.client(site.read)
    cookie = client.cookies[COOKIE]
    assert site.context.sessions.visitor(cookie).name == "reader"
    assert site.context.sessions.visitor(cookie[:-1] + ("0" if cookie[-1] != "0" else "1")) is None
    late = Sessions(b"key", [site.tokens], clock=lambda: 4e9)
    assert late.visitor(cookie) is None
    assert Sessions(b"another", [site.tokens]).visitor(cookie) is None
    site.tokens.revoke(site.read.split("_")[1])
    assert client.get("/runs").status_code == 303


def test_a_server_with_the_same_key_accepts_the_session(site):
    cookie = site.client(site.read).cookies[COOKIE]
    assert Sessions(b"key", [TokenStore(site.tokens.records())]).visitor(cookie) is not None


def test_scopes_decide_what_is_shown(site):
    token = DatabaseTokens(site.registry.database).issue("registry only", ["registry:read"])
    client = site.client(token)
    assert client.get("/").headers["location"] == "/models"
    assert client.get("/models").status_code == 200
    assert "Runs" not in client.get("/models").text
    for path in (
        "/runs",
        "/runs/first",
        "/runs/first/logs/worker-0",
        "/memory",
        "/runs/first/checkpoints",
    ):
        assert client.get(path).status_code == 403
    reader = site.client(site.read)
    for path in ("/runs/first", "/models/model", "/models/model/versions/1.0.0"):
        assert re.findall(r'method="post" action="([^"]+)"', reader.get(path).text) == ["/sign-out"]


CHANGES = [
    ("/runs/first/scale", {"workers": "2"}),
    ("/runs/first/leave", {"worker": "a"}),
    ("/runs/first/stop", {"reason": "r"}),
    ("/runs/first/stacks", {"worker": "worker-0"}),
    (
        "/models/model/versions/1.0.0/transition",
        {"state": "validating", "revision": "0", "reason": "r"},
    ),
    ("/models/model/rollback", {"revision": "0", "reason": "r"}),
    ("/models/model/alias", {"alias": "a", "version": "1.0.0"}),
]


@pytest.mark.parametrize(("path", "fields"), CHANGES)
def test_a_change_needs_the_scope_the_form_of_this_session_and_this_site(site, path, fields):
    fields = {**fields, "confirmed": "yes"}
    reader = site.client(site.read)
    assert reader.post(path, data={**fields, "csrf": csrf(reader, "/runs")}).status_code == 403
    operator = site.client(site.operate)
    secret = csrf(operator, "/runs")
    assert operator.post(path, data=fields).status_code == 403
    assert operator.post(path, data={**fields, "csrf": csrf(reader, "/runs")}).status_code == 403
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert (
            operator.post(path, data={**fields, "csrf": secret}, headers=headers).status_code == 403
        )
    assert site.registry.require("model", FIRST).revision == 0
    assert site.registry.get_model("model").aliases == {}


def test_a_change_without_its_confirmation_is_refused(site):
    client = site.client(site.operate)
    data = {"state": "validating", "revision": "0", "reason": "r", "csrf": csrf(client, "/runs")}
    assert client.post("/models/model/versions/1.0.0/transition", data=data).status_code == 400
    assert site.registry.require("model", FIRST).state.value == "registered"


def change(client, path, **fields):
    return client.post(path, data={**fields, "confirmed": "yes", "csrf": csrf(client, "/runs")})


def test_a_transition_is_made_refused_without_evidence_and_refused_on_an_old_revision(site):
    client, path = site.client(site.operate), "/models/model/versions/1.0.0/transition"
    assert change(client, path, state="validating", revision="0", reason="try").status_code == 303
    stale = change(client, path, state="staging", revision="0", reason="try")
    assert stale.status_code == 409
    missing = change(client, path, state="staging", revision="1", reason="try")
    assert missing.status_code == 409
    assert "no validation was recorded" in missing.text
    assert site.registry.require("model", FIRST).state.value == "validating"
    site.validate(FIRST)
    assert (
        change(client, path, state="staging", revision="1", reason="it passed").status_code == 303
    )
    entry = site.registry.history("model", version=FIRST)[-1]
    assert (entry.reason, entry.actor) == ("it passed", HOSTILE)


def test_an_alias_that_another_person_moved_is_not_overwritten(site):
    client = site.client(site.operate)
    assert (
        change(client, "/models/model/alias", alias="champion", version="1.0.0").status_code == 303
    )
    moved = change(
        client,
        "/models/model/alias",
        alias="champion",
        version="1.1.0",
        **{"was-champion": "1.0.0"},
    )
    assert moved.status_code == 303
    late = change(
        client,
        "/models/model/alias",
        alias="champion",
        version="1.0.0",
        **{"was-champion": "1.0.0"},
    )
    assert late.status_code == 409
    assert site.registry.get_model("model").aliases["champion"] == SECOND


def test_the_page_of_checkpoints_says_what_is_kept_and_what_a_restore_reads(site):
    text = site.client(site.read).get("/runs/first/checkpoints").text
    for checkpoint in site.checkpoints:
        assert checkpoint in text
    assert "incremental" in text
    assert "in 2 checkpoint(s)" in text
    assert "keep" in text
    assert text.count('class="chain"') == 2


@pytest.mark.parametrize(
    "path",
    [
        "/runs/none",
        "/runs/first/logs/..%2f..%2fregistry",
        "/models/none",
        "/memory/none",
        "/static/x",
        "/x",
    ],
)
def test_what_does_not_exist_is_not_found(site, path):
    assert site.client(site.read).get(path).status_code == 404


def test_files_of_the_pages_need_no_session(site):
    for name, kind in (("dashboard.js", "text/javascript"), ("dashboard.css", "text/css")):
        answer = site.client().get(f"/static/{name}")
        assert answer.headers["content-type"].startswith(kind)

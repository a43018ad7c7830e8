"""MLflow's operations, called in this process."""

from __future__ import annotations

import json

import httpx
import pytest
from starlette.testclient import TestClient
from tests.unit.registry.sample_values import v

from tensorforge.registry.artifacts import ArtifactStore
from tensorforge.registry.domain.mlflow_stages import StageMoves
from tensorforge.registry.service.application import build
from tensorforge.registry.service.service_options import ServiceOptions
from tensorforge.registry.sources import SourceResolver
from tensorforge.registry.tokens import DatabaseTokens
from tensorforge.storage.memory_store import MemoryStore

API = "/api/2.0/mlflow"


def made(client, name="ranker", count=1, **version):
    client.post(f"{API}/registered-models/create", json={"name": name})
    for _ in range(count):
        answer = client.post(
            f"{API}/model-versions/create", json={"name": name, "source": "s3://b", **version}
        )
    return answer.json()["model_version"]


def caller(served, *scopes, options=None):
    token = DatabaseTokens(served.database).issue("limited", scopes)
    app = build(served, deliver_webhooks=False, options=options)
    return TestClient(app, headers={"Authorization": f"Bearer {token}"})


def move(client, stage, version="1", **options):
    body = {"name": "ranker", "version": version, "stage": stage, **options}
    return client.post(f"{API}/model-versions/transition-stage", json=body)


def test_lenient_moves_go_where_mlflow_goes_and_are_audited_as_what_they_are(client, served):
    made(client)
    for stage in ("Archived", "None", "Production", "Staging", "Archived", "Production"):
        answer = move(client, stage)
        assert answer.json()["model_version"]["current_stage"] == stage, answer.text
    actions = [(e.action, e.to_state) for e in served.history("ranker")]
    assert ("stage_move", "archived") in actions
    assert ("stage_move", "staging") in actions
    assert ("transition", "production") in actions
    served.verify_audit()


def test_strict_moves_follow_the_lifecycle(served):
    scopes = ("registry:read", "registry:write", "registry:promote", "registry:force")
    options = ServiceOptions(stage_moves=StageMoves.STRICT)
    with caller(served, *scopes, options=options) as client:
        made(client)
        assert move(client, "Archived").status_code == 409
        assert move(client, "Production").status_code == 200
        assert move(client, "Staging").status_code == 409


def test_archiving_the_others_leaves_one_version_in_the_stage(client, served):
    made(client, count=3)
    for version in ("1", "2", "3"):
        move(client, "Production", version, archive_existing_versions=True)
    stages = [
        client.get(f"{API}/model-versions/get", params={"name": "ranker", "version": n}).json()
        for n in (1, 2, 3)
    ]
    found = [each["model_version"]["current_stage"] for each in stages]
    assert found == ["Archived", "Archived", "Production"]
    assert move(client, "None", "3", archive_existing_versions=True).status_code == 400


def test_a_protected_alias_needs_the_scope_to_make_transitions(client, served):
    made(client)
    body = {"name": "ranker", "alias": "Champion", "version": "1"}
    with caller(served, "registry:read", "registry:write") as writer:
        answer = writer.post(f"{API}/registered-models/alias", json=body)
        assert answer.json()["error_code"] == "PERMISSION_DENIED"
        other = writer.post(f"{API}/registered-models/alias", json={**body, "alias": "staging"})
        assert other.status_code == 200
    with caller(served, "registry:write", "registry:promote") as promoter:
        answer = promoter.post(f"{API}/registered-models/alias", json=body)
        assert answer.json()["error_code"] == "RESOURCE_CONFLICT"
    assert client.post(f"{API}/registered-models/alias", json=body).status_code == 200
    assert served.history("ranker")[-1].forced


def test_a_scope_with_a_pattern_is_for_the_models_that_match(served):
    with caller(served, "registry:write:rank*", "registry:read:rank*") as client:
        assert made(client)["version"] == "1"
        refused = client.post(f"{API}/registered-models/create", json={"name": "other"})
        assert refused.json()["error_code"] == "PERMISSION_DENIED"
        assert client.get("/api/v1/models/ranker").status_code == 200
        assert client.get("/api/v1/models/other").status_code == 403
        assert client.get("/api/v1/models").status_code == 403


def test_bad_tokens_are_answered_later_and_later(served, client):
    app = build(served, deliver_webhooks=False)
    with TestClient(app, headers={"Authorization": "Bearer tf_x_y"}) as stranger:
        found = [stranger.get("/api/v1/models").status_code for _ in range(30)]
    assert found[0] == 401
    assert found[-1] == 429
    assert client.get("/api/v1/models").status_code == 200


def test_a_search_says_what_mlflow_says_about_prompts_tags_and_order(client):
    prompt = [{"key": "mlflow.prompt.is_prompt", "value": "true"}]
    for name, tags in (("b", [{"key": "k", "value": "1"}]), ("a", []), ("p", prompt)):
        client.post(f"{API}/registered-models/create", json={"name": name, "tags": tags})

    def names(**query):
        found = client.get(f"{API}/registered-models/search", params=query).json()
        return [model["name"] for model in found["registered_models"]]

    assert names() == ["a", "b"]
    assert names(filter="tags.`mlflow.prompt.is_prompt` = 'true'") == ["p"]
    assert names(filter="tags.k != '2'") == ["b"]
    assert names(filter="tags.k != '1'") == []
    many = [("order_by", "name")] * 2_000
    assert client.get(f"{API}/registered-models/search", params=many).status_code in (400, 414)


def test_missing_things_are_named_as_mlflow_names_them(client):
    def message(method, path, **body):
        answer = client.request(method, f"{API}/{path}", json=body)
        return answer.json()["message"]

    text = "Registered Model with name=x not found"
    assert message("POST", "registered-models/set-tag", name="x", key="k", value="v") == text
    made(client)
    text = "Model Version (name=ranker, version=9) not found"
    assert message("PATCH", "model-versions/update", name="ranker", version="9") == text
    gone = client.request(
        "DELETE", f"{API}/registered-models/alias", json={"name": "ranker", "alias": "none"}
    )
    assert gone.status_code == 200


def test_a_version_can_be_copied_twice_and_keeps_its_source(client):
    first = made(client, run_id="r1")
    copy = {
        "name": "copy",
        "source": "models:/ranker/1",
        "tags": first["tags"],
    }
    client.post(f"{API}/registered-models/create", json={"name": "copy"})
    for number in ("1", "2"):
        answer = client.post(f"{API}/model-versions/create", json=copy).json()["model_version"]
        assert (answer["version"], answer["run_id"]) == (number, "r1")
        uri = client.get(
            f"{API}/model-versions/get-download-uri", params={"name": "copy", "version": number}
        )
        assert uri.json()["artifact_uri"] == "s3://b"


def test_a_tracking_server_tells_where_a_logged_model_lies(served):
    def tracking(request):
        assert request.url.path == "/api/2.0/mlflow/logged-models/m-1"
        info = {"artifact_uri": "s3://real/m-1", "source_run_id": "r7", "experiment_id": "3"}
        return httpx.Response(200, json={"model": {"info": info}})

    sources = SourceResolver("http://tracking", transport=httpx.MockTransport(tracking))
    options = ServiceOptions(sources=sources)
    with caller(served, "registry:read", "registry:write", options=options) as client:
        stored = made(client, source="models:/m-1", model_id="m-1")
        assert (stored["run_id"], stored["model_id"]) == ("r7", "m-1")
        uri = client.get(
            f"{API}/model-versions/get-download-uri", params={"name": "ranker", "version": "1"}
        )
        assert uri.json()["artifact_uri"] == "s3://real/m-1"
    assert served.require("ranker", v("1.0.0")).lineage.experiment_id == "3"
    sources.close()


@pytest.fixture
def with_files(served):
    artifacts = ArtifactStore(served.database, MemoryStore("files"), max_bytes=1_000_000)
    scopes = ("registry:read", "registry:write", "registry:admin")
    with caller(served, *scopes, options=ServiceOptions(artifacts=artifacts)) as client:
        yield client


def test_the_files_of_a_version_are_sent_resumed_and_loaded(with_files):
    client = with_files
    made(client)
    url = "/api/v1/models/ranker/versions/1.0.0/files/model/weights.bin"
    part = client.put(url, content=b"hello", headers={"Content-Range": "bytes 0-4/10"})
    assert (part.status_code, part.json()["received"]) == (202, 5)
    assert client.get(url, params={"upload_total": "10"}).json()["received"] == 5
    part = client.put(url, content=b"world", headers={"Content-Range": "bytes 5-9/10"})
    assert part.status_code == 200
    assert client.get(url).content == b"helloworld"
    rest = client.get(url, headers={"Range": "bytes=7-"})
    assert (rest.status_code, rest.content) == (206, b"rld")
    uri = client.get(
        f"{API}/model-versions/get-download-uri", params={"name": "ranker", "version": "1"}
    ).json()["artifact_uri"]
    proxy = "/api/2.0/mlflow-artifacts/artifacts"
    folder = uri.removeprefix("mlflow-artifacts:/")
    assert client.get(f"{proxy}/{folder}/model/weights.bin").content == b"helloworld"
    assert client.put(f"{proxy}/{folder}/model/weights.bin", content=b"x").status_code == 400
    assert client.put(url, content=b"other").status_code == 409


def test_the_routes_of_mlflows_artifact_proxy(with_files):
    client, proxy = with_files, "/api/2.0/mlflow-artifacts/artifacts"
    assert client.put(f"{proxy}/1/run/artifacts/a.txt", content=b"a").status_code == 200
    listed = client.get(proxy, params={"path": "1/run/artifacts"}).json()["files"]
    assert listed == [{"path": "a.txt", "is_dir": False, "file_size": 1}]
    wrong = {"X-Checksum-SHA256": "0" * 64}
    assert client.put(f"{proxy}/b.txt", content=b"b", headers=wrong).status_code >= 400
    assert client.delete(f"{proxy}/1").status_code == 200
    assert client.get(f"{proxy}/1/run/artifacts/a.txt").status_code == 404


def test_mlflows_webhook_operations(client, served):
    event = {"entity": "MODEL_VERSION", "action": "CREATED"}
    fields = {"name": "hook", "url": "https://hooks.example.com/x", "events": [event]}
    hook = client.post(f"{API}/webhooks", json={**fields, "secret": "s"}).json()["webhook"]
    assert (hook["name"], hook["status"], hook["events"]) == ("hook", "ACTIVE", [event])
    assert "secret" not in hook
    one = f"{API}/webhooks/{hook['webhook_id']}"
    assert client.get(one).json()["webhook"] == hook
    assert [w["name"] for w in client.get(f"{API}/webhooks").json()["webhooks"]] == ["hook"]
    made(client)
    with served.database.read() as connection:
        (body,) = connection.exec_driver_sql("SELECT body FROM registry_outbox").scalars()
    message = json.loads(body)
    assert (message["entity"], message["action"]) == ("model_version", "created")
    assert message["data"]["name"] == "ranker"
    changed = client.patch(one, json={"status": "DISABLED"}).json()["webhook"]
    assert changed["status"] == "DISABLED"
    assert client.delete(one).status_code == 200
    assert client.get(one).json()["error_code"] == "RESOURCE_DOES_NOT_EXIST"
    bad = client.post(f"{API}/webhooks", json={**fields, "events": []})
    assert bad.json()["error_code"] == "INVALID_PARAMETER_VALUE"

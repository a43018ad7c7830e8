import os

import pytest
from tests.unit.registry.sample_values import S, bring, metadata, v

from tensorforge.registry.tokens import DatabaseTokens

BASE = "/api/v1/models"


def create(client, version=None, model="ranker", headers=None, **fields):
    body = {"input_shape": [4], "output_shape": [2], **fields}
    if version is not None:
        body["version"] = version
    return client.post(f"{BASE}/{model}/versions", json=body, headers=headers)


def transition(client, to, version="1.0.0", etag="*", **fields):
    return client.post(
        f"{BASE}/ranker/versions/{version}/transitions",
        json={"to": to, **fields},
        headers={"If-Match": etag},
    )


def validate(client, version="1.0.0", **fields):
    figures = {
        "passed": True,
        "latency_p50_ms": 5.0,
        "latency_p99_ms": 9.0,
        "accuracy_score": 0.9,
    }
    return client.post(f"{BASE}/ranker/versions/{version}/validations", json={**figures, **fields})


def test_a_version_goes_from_registration_to_production_over_http(client):
    sla = {"max_latency_ms": 20, "min_accuracy": 0.8}
    made = client.post(BASE, json={"model_id": "ranker", "sla": sla, "tags": {"team": "x"}})
    assert made.status_code == 201
    assert made.json()["sla"] == {**sla, "signed_by": []}
    created = create(client, "1.0.0", checksum="sha256:1", tags={"a": "b"})
    assert created.status_code == 201
    assert created.headers["etag"] == '"0"'
    entered = transition(client, "validating", etag='"0"')
    assert (entered.status_code, entered.headers["etag"]) == (200, '"1"')
    refused = transition(client, "staging", etag='"1"')
    assert refused.status_code == 409
    assert "no validation was recorded" in refused.json()["message"]
    assert validate(client).status_code == 201
    assert transition(client, "staging", etag='"1"').status_code == 200
    assert transition(client, "canary", etag='"2"').status_code == 200
    validate(client, samples=10_000)
    assert client.get(f"{BASE}/ranker/versions/1.0.0/canary").json()["verdict"] == "pass"
    assert transition(client, "production", etag='"3"', reason="all green").status_code == 200
    assert client.get(f"{BASE}/ranker/production").json()["version"] == "1.0.0"
    history = client.get(f"{BASE}/ranker/history").json()["items"]
    assert history[-1]["to_state"] == "production"
    assert history[-1]["reason"] == "all green"
    assert history[-1]["actor"] == "root"
    assert history[-1]["evidence"]["sla"] == sla
    assert client.get("/api/v1/audit").json()["intact"] is True


def test_a_transition_must_send_the_etag_of_the_version_it_read(client):
    create(client, "1.0.0")
    path = f"{BASE}/ranker/versions/1.0.0/transitions"
    missing = client.post(path, json={"to": "validating"})
    assert missing.status_code == 428
    assert "If-Match is required" in missing.json()["message"]
    assert transition(client, "validating", etag="zero").status_code == 400
    assert transition(client, "validating", etag='"7"').status_code == 412
    assert transition(client, "validating", etag='"0"').status_code == 200
    late = transition(client, "registered", etag='"0"')
    assert late.status_code == 412
    assert "expected revision 0, found 1 in state validating" in late.json()["message"]


def test_a_repeated_create_with_the_same_key_has_one_effect(client, served):
    key = {"Idempotency-Key": "build-17"}
    first = create(client, "1.0.0", headers=key)
    again = create(client, "1.0.0", headers=key)
    assert again.status_code == 201
    assert again.json() == first.json()
    assert served.version_count() == 1
    assert create(client, "1.1.0", headers=key).status_code == 409
    assert create(client, "1.0.0").status_code == 409
    due = create(client, headers={"Idempotency-Key": "k2"})
    assert (
        create(client, headers={"Idempotency-Key": "k2"}).json()["version"] == due.json()["version"]
    )
    made = client.post(BASE, json={"model_id": "m"}, headers={"Idempotency-Key": "k3"})
    assert (
        client.post(BASE, json={"model_id": "m"}, headers={"Idempotency-Key": "k3"}).json()
        == made.json()
    )
    assert client.post(BASE, json={"model_id": "m"}).status_code == 409


def test_the_registry_says_which_version_is_due(client):
    assert create(client).json()["version"]["version"] == "1.0.0"
    patch = create(client).json()
    assert patch["version"]["version"] == "1.0.1"
    assert patch["due"] == {"bump": "patch", "reasons": ["all shapes are the same"]}
    major = create(client, input_shape=[5]).json()
    assert major["version"]["version"] == "2.0.0"
    assert major["due"]["bump"] == "major"
    hidden = create(client, "2.0.1", input_shape=[6])
    assert hidden.status_code == 409
    assert "needs a new major version" in hidden.json()["message"]


def test_versions_are_found_by_range_alias_tag_and_page(client):
    for minor in range(5):
        create(client, f"1.{minor}.0", tags={"parity": str(minor % 2)})
    listed = client.get(f"{BASE}/ranker/versions", params={"range": ">=1.2 <1.4"}).json()["items"]
    assert [each["version"] for each in listed] == ["1.3.0", "1.2.0"]
    found = client.get("/api/v1/versions", params={"filter": "tags.parity = '1'"}).json()["items"]
    assert [each["version"] for each in found] == ["1.3.0", "1.1.0"]
    page = client.get("/api/v1/versions", params={"page_size": 2}).json()
    token = page["next_page_token"]
    rest = client.get("/api/v1/versions", params={"page_size": 10, "page_token": token}).json()
    assert [e["version"] for e in page["items"] + rest["items"]] == [
        *("1.4.0", "1.3.0", "1.2.0", "1.1.0", "1.0.0")
    ]
    assert (
        client.put(f"{BASE}/ranker/aliases/champion", json={"version": "1.1.0"}).status_code == 200
    )
    for wanted, version in (("champion", "1.1.0"), ("^1.2", "1.4.0"), ("latest", "1.4.0")):
        got = client.get(f"{BASE}/ranker/resolve", params={"version": wanted})
        assert got.json()["version"] == version
    assert client.delete(f"{BASE}/ranker/aliases/champion").status_code == 204
    assert client.delete(f"{BASE}/ranker/aliases/champion").status_code == 404


def test_models_are_described_tagged_renamed_and_deleted(client):
    client.post(BASE, json={"model_id": "ranker"})
    changed = client.patch(f"{BASE}/ranker", json={"description": "d", "sla": None}).json()
    assert (changed["description"], changed["sla"]) == ("d", None)
    tagged = client.patch(f"{BASE}/ranker/tags", json={"put": {"a": "1", "b": "2"}}).json()
    assert tagged["tags"] == {"a": "1", "b": "2"}
    assert client.patch(f"{BASE}/ranker/tags", json={"drop": ["a"]}).json()["tags"] == {"b": "2"}
    assert (
        client.post(f"{BASE}/ranker/rename", json={"model_id": "new"}).json()["model_id"] == "new"
    )
    assert client.get(f"{BASE}/ranker").status_code == 404
    assert [m["model_id"] for m in client.get(BASE).json()["items"]] == ["new"]
    assert client.delete(f"{BASE}/new").status_code == 204
    assert client.get(f"{BASE}/new/history").json()["items"][-1]["action"] == "delete_model"


def test_versions_are_described_tagged_compared_and_deleted(client):
    create(client, "1.0.0")
    create(client, "2.0.0", input_shape=[9])
    path = f"{BASE}/ranker/versions/1.0.0"
    assert client.patch(path, json={"description": "d"}).json()["description"] == "d"
    assert client.patch(f"{path}/tags", json={"put": {"k": "v"}}).json()["tags"] == {"k": "v"}
    diff = client.get(f"{BASE}/ranker/diff", params={"before": "1.0.0", "after": "2.0.0"}).json()
    assert diff["due"]["bump"] == "major"
    assert diff["fields"]["input_shape"] == ["[4]", "[9]"]
    assert client.delete(path).status_code == 204
    assert client.get(path).status_code == 404


def test_a_rollback_and_the_past_over_http(client, served):
    for version in ("1.0.0", "1.1.0"):
        served.register(metadata(version))
        bring(served, version, S.PRODUCTION)
    between = served.history("ranker")[-1].at
    done = client.post(f"{BASE}/ranker/rollback", json={"reason": "slow"})
    assert done.json()["previous"] == "1.1.0"
    assert done.json()["current"] == "1.0.0"
    assert client.get(f"{BASE}/ranker/production").json()["version"] == "1.0.0"
    past = {"at": between.isoformat()}
    assert client.get(f"{BASE}/ranker/production", params=past).json()["version"] == "1.1.0"
    assert client.post(f"{BASE}/ranker/rollback", json={}).status_code == 409
    naive = client.get(f"{BASE}/ranker/production", params={"at": "2026-01-01T00:00:00"})
    assert naive.status_code == 400


def test_the_source_is_kept_as_text_and_never_opened(client, tmp_path):
    trap = tmp_path / "trap"
    os.mkfifo(trap)  # opening it would wait for ever
    for number, source in enumerate(
        [str(trap), f"file://{trap}", "/etc/passwd", "http://[::1]:1/"]
    ):
        created = create(client, f"1.{number}.0", source=source)
        assert created.json()["version"]["source"] == source


BAD = [
    ("POST", BASE, {"model_id": "x" * 257}),
    ("POST", BASE, {"model_id": "x" * 90_000}),
    ("POST", BASE, {"model_id": "../../etc"}),
    ("POST", BASE, {"model_id": "a/b"}),
    ("POST", BASE, {"model_id": ""}),
    ("POST", BASE, {"model_id": 5}),
    ("POST", BASE, {"model_id": None}),
    ("POST", BASE, {"model_id": "m", "surprise": 1}),
    ("POST", BASE, {"model_id": "m", "tags": {"../x": "v"}}),
    ("POST", BASE, {"model_id": "m", "tags": ["k"]}),
    ("POST", BASE, {"model_id": "m", "sla": {"max_latency_ms": -1, "min_accuracy": 0}}),
    ("POST", BASE, []),
    ("POST", BASE, "text"),
    ("POST", f"{BASE}/m/versions", {"version": "1.2"}),
    ("POST", f"{BASE}/m/versions", {"version": "1.2.99999999999"}),
    ("POST", f"{BASE}/m/versions", {"version": "1.0.0", "input_shape": [-1]}),
    ("POST", f"{BASE}/m/versions", {"version": "1.0.0", "input_shape": "4"}),
    ("POST", f"{BASE}/m/versions", {"version": "1.0.0", "size_bytes": 2**63}),
    ("POST", f"{BASE}/m/versions", {"version": "1.0.0", "size_bytes": 1.5}),
    ("POST", f"{BASE}/m/versions", {"version": "1.0.0", "source": "a\x00b"}),
    ("POST", f"{BASE}/..%5c..%5cm/versions", {"version": "1.0.0"}),
    ("POST", f"{BASE}/a%00b/versions", {"version": "1.0.0"}),
    ("POST", f"{BASE}/a%3ab/versions", {"version": "1.0.0"}),
]


@pytest.mark.parametrize(("method", "path", "body"), BAD)
def test_bad_input_is_a_4xx_that_names_the_problem_and_stores_nothing(
    client, served, method, path, body
):
    answer = client.request(method, path, json=body)
    assert answer.status_code == 400
    assert answer.json()["message"]
    assert len(answer.text) < 1_000
    assert (served.model_count(), served.version_count()) == (0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b'{"passed": true, "latency_p50_ms": NaN, "latency_p99_ms": 1, "accuracy_score": 1}',
        b'{"passed": true, "latency_p50_ms": 1, "latency_p99_ms": 1, "accuracy_score": Infinity}',
        b'{"passed": true, "latency_p50_ms": 1e999, "latency_p99_ms": 1, "accuracy_score": 1}',
        b'{"passed": true, "latency_p50_ms": "nan", "latency_p99_ms": 1, "accuracy_score": 1}',
        b'{"passed": true, "latency_p50_ms": null, "latency_p99_ms": 1, "accuracy_score": 1}',
        b'{"passed": 1, "latency_p50_ms": 1, "latency_p99_ms": 1, "accuracy_score": 1}',
        b'{"passed": true, "latency_p50_ms": -1, "latency_p99_ms": 1, "accuracy_score": 1}',
        b"{",
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"passed": true, "errors": ["\\ud800"]}',
        b"",
    ],
)
def test_metrics_that_are_no_numbers_are_refused(client, served, body):
    create(client, "1.0.0")
    answer = client.post(
        f"{BASE}/ranker/versions/1.0.0/validations",
        content=body,
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert served.get_validation("ranker", v("1.0.0")) is None


@pytest.mark.parametrize(
    "query",
    [
        {"filter": "name = 'a' OR 1=1"},
        {"filter": "name = 'a'; DROP TABLE registry_models"},
        {"filter": "secret_hash LIKE '%'"},
        {"filter": "x" * 5001},
        {"order_by": "name; DROP TABLE x"},
        {"order_by": "(SELECT 1)"},
        {"page_size": "0"},
        {"page_size": "10001"},
        {"page_size": "ten"},
        {"page_token": "nonsense"},
        {"unknown": "1"},
    ],
)
def test_searches_that_cannot_work_are_refused(client, served, query):
    create(client, "1.0.0")
    answer = client.get("/api/v1/versions", params=query)
    assert answer.status_code == 400
    assert served.version_count() == 1


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        ("registry:read", {"read"}),
        ("registry:write", {"write"}),
        ("registry:promote", {"transition"}),
        ("registry:admin", {"admin"}),
        ("registry:force", set()),
    ],
)
def test_a_token_does_only_what_its_scopes_say(client, served, scope, allowed):
    create(client, "1.0.0")
    token = DatabaseTokens(served.database).issue("limited", [scope])
    client.headers["Authorization"] = f"Bearer {token}"
    attempts = {
        "read": client.get(f"{BASE}/ranker"),
        "write": client.patch(f"{BASE}/ranker/tags", json={}),
        "transition": transition(client, "validating"),
        "admin": client.get("/api/v1/webhooks"),
    }
    assert {name for name, answer in attempts.items() if answer.status_code == 200} == allowed
    assert {a.status_code for n, a in attempts.items() if n not in allowed} <= {403}


def test_forcing_needs_its_own_scope_and_a_reason(client, served):
    create(client, "1.0.0")
    transition(client, "validating")
    tokens = DatabaseTokens(served.database)
    plain = tokens.issue("operator", ["registry:promote"])
    client.headers["Authorization"] = f"Bearer {plain}"
    denied = transition(client, "staging", force=True, reason="now")
    assert denied.status_code == 403
    assert "registry:force" in denied.json()["message"]
    strong = tokens.issue("chief", ["registry:promote", "registry:force"])
    client.headers["Authorization"] = f"Bearer {strong}"
    assert transition(client, "staging", force=True).status_code == 400
    assert transition(client, "staging", force=True, reason="outage").status_code == 200
    assert served.history("ranker")[-1].forced


@pytest.mark.parametrize("at", ["0", "1e9", "2026-01-01", "2026-01-01T00:00:00", "yesterday"])
def test_a_moment_is_written_as_iso_8601_with_a_time_zone(client, at):
    create(client, "1.0.0")
    answer = client.get(f"{BASE}/ranker/production", params={"at": at})
    assert answer.status_code == 400
    assert "at = " in answer.json()["message"]

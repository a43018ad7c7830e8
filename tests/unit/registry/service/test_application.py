"""Who gets in, how much a caller may send, and what every answer has in common."""

from datetime import timedelta

import pytest
from tests.unit.registry.sample_values import metadata

from tensorforge.registry.tokens import DatabaseTokens

BASE = "/api/v1/models"


def test_a_body_of_ten_megabytes_is_not_read(client, served):
    huge = client.post(BASE, json={"model_id": "m", "description": "x" * 10_000_000})
    assert huge.status_code == 413
    assert "at most 100000" in huge.json()["message"]

    pieces = iter([b" " * 60_000] * 2)
    streamed = client.post(BASE, content=pieces, headers={"Content-Type": "application/json"})
    assert streamed.status_code == 413
    assert served.model_count() == 0


def test_a_body_in_another_format_is_refused(client):
    answer = client.post(BASE, content=b"<x/>", headers={"Content-Type": "application/xml"})
    assert answer.status_code == 415


def test_a_huge_url_or_header_is_refused(client):
    answer = client.get("/api/v1/versions", params={"filter": "x" * 9000})
    assert answer.status_code == 414
    assert "at most 8000" in answer.json()["message"]
    assert client.get(BASE, headers={"X-Big": "x" * 20_000}).status_code == 400


@pytest.mark.parametrize(
    "path", ["/nothing", "/api/v1", "/api/v1/models/", "/api/v1/models/a/b/c/d"]
)
def test_what_does_not_exist_is_not_found(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["message"]


def test_a_method_that_does_not_exist_is_not_allowed(client):
    answer = client.put(BASE, json={})
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


PATHS = ["/api/v1/models", "/api/2.0/mlflow/registered-models/search", "/metrics", "/nothing", "/"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic cm9vdDpyb290", "Bearer tf_x_y", "Bearer " + "x" * 9000],
)
def test_nothing_answers_without_a_token(client, path, header):
    client.headers.pop("Authorization")
    headers = {} if header is None else {"Authorization": header}
    answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_only_health_and_the_description_are_open(client):
    client.headers.pop("Authorization")
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/openapi.json").json()["openapi"].startswith("3.1")


def test_expired_and_revoked_tokens_are_refused(client, served):
    tokens = DatabaseTokens(served.database)
    expired = tokens.issue(
        "old",
        ["registry:read"],
        lifetime=timedelta(seconds=1),
        now=metadata().registered_at,
    )
    answer = client.get(BASE, headers={"Authorization": f"Bearer {expired}"})
    assert answer.status_code == 401
    assert "has expired" in answer.json()["message"]
    revoked = tokens.issue("gone", ["registry:read"])
    tokens.revoke(revoked.split("_")[1])
    answer = client.get(BASE, headers={"Authorization": f"Bearer {revoked}"})
    assert answer.status_code == 401
    assert "was revoked" in answer.json()["message"]


def test_requests_are_counted(client):
    client.post(BASE, json={"model_id": "ranker"})
    client.get(f"{BASE}/nobody")
    text = client.get("/metrics").text
    assert 'tensorforge_registry_requests_total{operation="create_model",status="201"} 1.0' in text
    assert 'operation="get_model",status="404"' in text
    assert "tensorforge_registry_webhooks_waiting 0\n" in text


def test_a_failure_that_nobody_expected_tells_nothing_inside(client, monkeypatch, served):
    def explode(*_: object) -> None:
        raise RuntimeError("secret path /home/x")

    monkeypatch.setattr(served, "get_model", explode)
    answer = client.get(f"{BASE}/ranker")
    assert answer.status_code == 500
    assert "secret" not in answer.text

"""An unmodified MLflow client talks to a running server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException, RestException
from mlflow.store.artifact.utils.models import get_model_name_and_version
from tests.integration.registry_server import RunningServer, running_server
from tests.unit.registry.sample_values import S, bring, result, v

from tensorforge.registry import ModelRegistry
from tensorforge.testing.postgres import fresh_database


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request, tmp_path_factory) -> Iterator[RunningServer]:
    if request.param == "sqlite":
        with running_server(str(tmp_path_factory.mktemp("registry") / "registry.db")) as running:
            yield running
        return
    with (
        fresh_database(request.getfixturevalue("postgres_server")) as url,
        running_server(url) as running,
    ):
        yield running


@pytest.fixture
def client(server, monkeypatch) -> Iterator[MlflowClient]:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", server.token)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    mlflow.set_tracking_uri(server.url)
    mlflow.set_registry_uri(server.url)
    yield MlflowClient(server.url, server.url)
    with ModelRegistry(server.database) as registry:
        registry.verify_audit()
        for metadata in registry.find_by_state(S.PRODUCTION):
            registry.transition_state(metadata.model_id, metadata.version, S.DEPRECATED)
        for metadata in registry.find_by_state(S.CANARY):
            registry.transition_state(metadata.model_id, metadata.version, S.STAGING)
        for model in registry.search_models("", limit=1000).items:
            registry.delete_model(model.model_id)


pytestmark = pytest.mark.may_leak("descriptors", "the client keeps its connections in a pool")


def test_models_are_created_described_tagged_renamed_and_deleted(client):
    made = client.create_registered_model("ranker", tags={"team": "x"}, description="old")
    assert (made.name, made.description, made.tags) == ("ranker", "old", {"team": "x"})
    with pytest.raises(RestException) as caught:
        client.create_registered_model("ranker")
    assert caught.value.error_code == "RESOURCE_ALREADY_EXISTS"
    assert client.update_registered_model("ranker", "new").description == "new"
    client.set_registered_model_tag("ranker", "tier", "1")
    client.delete_registered_model_tag("ranker", "team")
    assert client.get_registered_model("ranker").tags == {"tier": "1"}
    client.rename_registered_model("ranker", "sorter")
    assert client.get_registered_model("sorter").name == "sorter"
    client.delete_registered_model("sorter")
    with pytest.raises(RestException) as caught:
        client.get_registered_model("sorter")
    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_versions_are_created_read_tagged_and_deleted(client):
    client.create_registered_model("ranker")
    made = client.create_model_version(
        "ranker", "s3://bucket/model", run_id="r1", tags={"k": "v"}, description="first"
    )
    assert (made.version, made.current_stage, made.status) == ("1", "None", "READY")
    got = client.get_model_version("ranker", "1")
    assert (got.source, got.run_id, got.description) == ("s3://bucket/model", "r1", "first")
    assert got.tags == {"k": "v", "tensorforge.version": "1.0.0", "tensorforge.state": "registered"}
    assert client.update_model_version("ranker", "1", "second").description == "second"
    client.set_model_version_tag("ranker", "1", "more", "tags")
    client.delete_model_version_tag("ranker", "1", "k")
    assert "k" not in client.get_model_version("ranker", "1").tags
    assert client.get_model_version_download_uri("ranker", "1") == "s3://bucket/model"
    with pytest.raises(RestException, match="is set by the registry"):
        client.set_model_version_tag("ranker", "1", "tensorforge.state", "production")
    client.delete_model_version("ranker", "1")
    with pytest.raises(RestException) as caught:
        client.get_model_version("ranker", "1")
    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"
    assert client.create_model_version("ranker", "s3://b/2").version == "2"


def test_aliases(client):
    client.create_registered_model("ranker")
    for number in ("1", "2"):
        client.create_model_version("ranker", f"s3://b/{number}")
        client.set_registered_model_alias("ranker", "champion", number)
    assert client.get_model_version_by_alias("ranker", "champion").version == "2"
    assert client.get_registered_model("ranker").aliases == {"champion": "2"}
    assert client.get_model_version("ranker", "2").aliases == ["champion"]
    assert get_model_name_and_version(client, "models:/ranker@champion") == ("ranker", "2")
    client.delete_registered_model_alias("ranker", "champion")
    with pytest.raises(RestException):
        client.get_model_version_by_alias("ranker", "champion")


def test_searches_with_filters_order_and_pages(client):
    for name in ("alpha", "beta", "Gamma"):
        client.create_registered_model(name, tags={"first": name[0]})
        for number in range(3):
            client.create_model_version(name, f"s3://{name}/{number}", tags={"n": str(number)})
    assert [m.name for m in client.search_registered_models("name = 'beta'")] == ["beta"]
    assert [m.name for m in client.search_registered_models("name ILIKE 'g%'")] == ["Gamma"]
    assert [m.name for m in client.search_registered_models("tags.first = 'a'")] == ["alpha"]
    ordered = client.search_registered_models(order_by=["name DESC"], max_results=2)
    rest = client.search_registered_models(
        order_by=["name DESC"], max_results=2, page_token=ordered.token
    )
    assert sorted(m.name for m in [*ordered, *rest]) == ["Gamma", "alpha", "beta"]
    found = client.search_model_versions("name = 'beta' AND tags.n = '1'")
    assert [(m.name, m.version) for m in found] == [("beta", "2")]
    all_versions = client.search_model_versions(order_by=["version_number ASC"], max_results=5)
    assert len(all_versions) == 5
    more = client.search_model_versions(
        order_by=["version_number ASC"], max_results=5, page_token=all_versions.token
    )
    assert len({(m.name, m.version) for m in [*all_versions, *more]}) == 9
    with pytest.raises(RestException) as caught:
        client.search_model_versions("name = 'x' OR 1 = 1")
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"


def test_register_model_twice_makes_two_versions(client, capsys):
    first = mlflow.register_model("s3://bucket/a", "ranker")
    second = mlflow.register_model("s3://bucket/b", "ranker", tags={"a": "b"})
    assert (first.version, second.version) == ("1", "2")
    assert second.tags["tensorforge.version"] == "1.1.0"
    assert "already exists" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*deprecated since 2.9.0:FutureWarning")
def test_semantic_versions_and_ranges_reach_an_unmodified_client(client):
    client.create_registered_model("ranker")
    for version in ("1.2.0", "1.2.5", "1.3.1", "2.0.0"):
        client.create_model_version(
            "ranker", f"s3://b/{version}", tags={"tensorforge.version": version}
        )
    for wanted, number in (("^1.2", "3"), ("~1.2.0", "2"), ("2.x", "4"), ("1.2.0", "1")):
        assert get_model_name_and_version(client, f"models:/ranker/{wanted}") == ("ranker", number)
    assert get_model_name_and_version(client, "models:/ranker/latest") == ("ranker", "4")
    (found,) = client.get_latest_versions("ranker", ["^1.2"])
    assert found.source == "s3://b/1.3.1"
    with pytest.raises(MlflowException):
        get_model_name_and_version(client, "models:/ranker/^7")
    with pytest.raises(RestException, match="Invalid Model Version stage"):
        client.get_latest_versions("ranker", ["Nonsense"])


@pytest.mark.filterwarnings("ignore:.*deprecated since 2.9.0:FutureWarning")
def test_stages_follow_the_lifecycle(client, server, monkeypatch):
    client.create_registered_model("ranker")
    for number in range(2):
        client.create_model_version("ranker", f"s3://b/{number}")
    plain = server.issue("registry:read", "registry:promote", "registry:write")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", plain)
    with pytest.raises(RestException, match="no validation was recorded") as caught:
        client.transition_model_version_stage("ranker", "1", "Production")
    assert caught.value.error_code == "RESOURCE_CONFLICT"
    assert client.get_model_version("ranker", "1").current_stage == "None"
    with ModelRegistry(server.database) as registry:
        bring(registry, "1.0.0", S.CANARY)
        registry.record_validation(result("1.0.0"))
    assert client.get_model_version("ranker", "1").current_stage == "Staging"
    entered = client.transition_model_version_stage("ranker", "1", "production")
    assert entered.current_stage == "Production"
    assert [m.version for m in client.get_latest_versions("ranker", ["Production"])] == ["1"]
    assert get_model_name_and_version(client, "models:/ranker/Production") == ("ranker", "1")
    with pytest.raises(RestException, match="is in production"):
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", server.token)
        client.delete_model_version("ranker", "1")
    forced = client.transition_model_version_stage(
        "ranker", "2", "Production", archive_existing_versions=True
    )
    assert forced.current_stage == "Production"
    assert client.get_model_version("ranker", "1").current_stage == "Archived"
    with ModelRegistry(server.database) as registry:
        moves = [e for e in registry.history("ranker", version=v("1.1.0")) if e.to_state]
        forced = [e for e in moves if e.forced]
        assert [(e.to_state, e.actor) for e in forced] == [
            ("staging", "root"),
            ("production", "root"),
        ]
    with pytest.raises(RestException, match="Invalid Model Version stage"):
        client.transition_model_version_stage("ranker", "2", "Moon")


def test_a_client_without_or_with_the_wrong_token_is_told_so(client, server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", server.issue("registry:read"))
    with pytest.raises(RestException) as caught:
        client.create_registered_model("ranker")
    assert caught.value.error_code == "PERMISSION_DENIED"
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "tf_nobody_nothing")
    with pytest.raises(RestException) as caught:
        client.search_registered_models()
    assert caught.value.error_code == "UNAUTHENTICATED"


@pytest.mark.parametrize("name", ["../x", "a/b", "a:b", "x" * 300, "a\x00b"])
def test_names_that_mean_something_else_are_refused(client, name):
    with pytest.raises(MlflowException):
        client.create_registered_model(name)
    assert client.search_registered_models() == []

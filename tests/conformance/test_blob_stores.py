"""Every store keeps the same promises: a folder, memory, S3 and Azure on real servers, GCS by translation."""

import pytest
import torch

from tensorforge.checkpoint import DistributedCheckpoint, SaveOptions, SingleProcess
from tensorforge.errors import (
    AuthenticationError,
    CheckpointError,
    ClosedError,
    InvalidInputError,
    PermissionDeniedError,
    UnavailableError,
)
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore
from tensorforge.storage.object_store import ObjectStore
from tensorforge.storage.opening import open_store
from tensorforge.testing.azure import ACCOUNT, azurite_program, running_azure
from tensorforge.testing.blob_conformance import BlobStoreConformance
from tensorforge.testing.gcs import running_gcs
from tensorforge.testing.s3 import running_s3


class TestLocalStore(BlobStoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        made = LocalStore(tmp_path / "blobs")
        yield made
        made.close()


class TestLocalStoreThroughThePageCache(BlobStoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        made = LocalStore(tmp_path / "blobs", direct=False)
        yield made
        made.close()


class TestMemoryStore(BlobStoreConformance):
    @pytest.fixture
    def store(self):
        made = MemoryStore("conformance")
        yield made
        made.close()


class ServedStoreConformance(BlobStoreConformance):
    """What holds of every store behind a server, too. A subclass says which `server` it is."""

    @pytest.fixture
    def store(self, server):
        made = server.store()
        yield made
        made.close()

    def test_is_opened_by_its_url_and_the_usual_environment(self, store, server, monkeypatch):
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store.write("a", b"x")
        again = open_store(store.url)
        assert again.read("a") == b"x"
        again.close()

    def test_a_checkpoint_is_saved_there_once_and_loaded(self, store):
        model = torch.nn.Linear(64, 64)
        checkpoint = DistributedCheckpoint(SingleProcess(), store)
        checkpoint.save(model, options=SaveOptions(checkpoint_prefix="c"))
        with pytest.raises(CheckpointError, match="'c' exists already"):
            checkpoint.save(model, options=SaveOptions(checkpoint_prefix="c"))
        other = torch.nn.Linear(64, 64)
        checkpoint.load(other)
        assert torch.equal(model.weight, other.weight)
        assert [info.prefix for info in checkpoint.list_checkpoints()] == ["c"]


def check_that_it_refuses(store):
    for put in (store.write, store.create):
        with pytest.raises((PermissionDeniedError, AuthenticationError), match=store.url):
            put("a", b"x")


class TestS3Store(ServedStoreConformance):
    @pytest.fixture
    def server(self, s3_server):
        return s3_server

    def test_a_closed_store_is_closed(self, store):
        store.write("a", b"x")
        store.close()
        store.close()
        for use in (store.read, store.stat, store.delete, store.open_writer):
            with pytest.raises(ClosedError, match="was closed"):
                use("a")

    def test_does_not_show_its_secrets(self, s3_server):
        made = ObjectStore("s3://user:secret@bucket/x?token=secret")
        assert made.url == "s3://bucket/x"

    def test_stores_below_different_prefixes_do_not_meet(self, s3_server):
        with s3_server.store("one") as one, s3_server.store("one-more") as other:
            one.write("a", b"1")
            assert list(other.list()) == []
            one.delete("a")

    def test_a_wrong_secret_is_a_clear_error(self, s3_server):
        config = {
            "endpoint": s3_server.endpoint,
            "access_key_id": "key",
            "secret_access_key": "wrong",
            "region": "us-east-1",
        }
        with ObjectStore("s3://tests/x", config=config, retry_seconds=0) as store:
            for put in (store.write, store.create):
                with pytest.raises(PermissionDeniedError, match="s3://tests/x refused"):
                    put("a", b"x")

    def test_a_large_hint_makes_larger_parts(self, store):
        with store.open_writer("a", size_hint=1 << 40) as writer:
            writer.append(b"x")
            assert writer.commit().size == 1


@pytest.fixture(scope="module")
def azure_server():
    try:
        azurite_program()
    except UnavailableError as error:
        pytest.skip(f"NOT TESTED, the Azure store: {error}")
    with running_azure() as server:
        yield server


@pytest.mark.soak
class TestAzureStore(ServedStoreConformance):
    @pytest.fixture
    def server(self, azure_server):
        return azure_server

    def test_a_wrong_key_is_a_clear_error(self, azure_server):
        config = {
            "endpoint": azure_server.endpoint,
            "account_name": ACCOUNT,
            "account_key": "d3Jvbmc=",
        }
        with azure_server.store("x", config=config, retry_seconds=0) as store:
            check_that_it_refuses(store)


@pytest.fixture(scope="module")
def gcs_server():
    with running_gcs() as server:
        yield server


class TestGcsStore(ServedStoreConformance):
    @pytest.fixture
    def server(self, gcs_server):
        return gcs_server

    def test_a_wrong_token_is_a_clear_error(self, gcs_server):
        with gcs_server.store("x", token="wrong") as store:
            check_that_it_refuses(store)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://", {}),
        ("s3://bucket", {"config": {"no_such_option": "x"}}),
        ("s3://bucket", {"retry_seconds": -1.0}),
        ("nothing://bucket", {}),
    ],
)
def test_an_object_store_that_cannot_be_opened_says_why(url, options):
    with pytest.raises(InvalidInputError, match=r"bucket|s3|retry_seconds"):
        ObjectStore(url, **options)


class TestAServerThatDies:
    @pytest.fixture
    def server(self):
        with running_s3() as started:
            yield started

    def test_in_the_middle_of_a_write_leaves_the_old_blob_and_no_litter(self, server):
        block = bytes(range(256)) * 16_384
        with server.store("data", retry_seconds=0.5) as store:
            store.write("model", b"old")
            with (
                pytest.raises(UnavailableError, match="model"),
                store.open_writer("model") as writer,
            ):
                for number in range(16):
                    if number == 4:
                        server.kill()
                    writer.append(block)
                writer.commit()
            with pytest.raises(UnavailableError, match="commit"):
                store.create("commit", b"x")
            with pytest.raises(UnavailableError):
                store.read("model")
            server.restart()
            assert store.read("model") == b"old"
            assert [info.key for info in store.list()] == ["model"]
            store.create("commit", b"x")

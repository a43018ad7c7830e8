import msgspec
import pytest
from tests.unit.checkpoint.models import build, build_normalized

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    DistributedCheckpoint,
    SaveOptions,
    SingleProcess,
)
from tensorforge.checkpoint.format.manifest import encode_manifest
from tensorforge.checkpoint.store_index import list_with_damaged, read_manifest
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


def test_a_checkpoint_is_never_overwritten(checkpoint):
    options = SaveOptions(checkpoint_prefix="same")
    checkpoint.save(build(), options=options)
    with pytest.raises(CheckpointError, match="'same' exists already") as caught:
        checkpoint.save(build(1), options=options)
    assert caught.value.type is CheckpointErrorType.SAVE_FAILED
    checkpoint.load(build())


def test_checkpoints_are_listed_and_deleted(checkpoint):
    for index in range(3):
        checkpoint.save(build(index), options=SaveOptions(checkpoint_prefix=f"run/step-{index}"))
    listed = checkpoint.list_checkpoints()
    assert [info.prefix for info in listed] == ["run/step-0", "run/step-1", "run/step-2"]
    assert listed[0].world_size == 1
    assert listed[0].format == "multi_shard"
    assert listed[0].size_bytes > 1000
    checkpoint.delete_checkpoint("run/step-1")
    assert [info.prefix for info in checkpoint.list_checkpoints()] == ["run/step-0", "run/step-2"]
    keys = [blob.key for blob in checkpoint.storage.list()]
    assert not [key for key in keys if "step-1" in key]
    with pytest.raises(CheckpointError, match="there is no checkpoint 'run/step-1'"):
        checkpoint.delete_checkpoint("run/step-1")


def test_a_list_tells_intact_manifests_from_others():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    for seed, prefix in enumerate(("b", "a", "damaged", "moved", "newer")):
        checkpoint.save(build_normalized(seed)[0], options=SaveOptions(checkpoint_prefix=prefix))
    store.write("damaged.metadata.json", store.read("damaged.metadata.json")[:-1])
    store.write("moved.metadata.json", store.read("a.metadata.json"))
    newer = msgspec.structs.replace(read_manifest(store, "newer"), version=2)
    store.write("newer.metadata.json", encode_manifest(newer))
    intact, others = list_with_damaged(store)
    assert [info.prefix for info in intact] == ["b", "a"]
    assert others == ["damaged", "moved", "newer"]
    manifest = read_manifest(store, "b")
    assert intact[0].size_bytes == manifest.size_bytes
    assert intact[0].timestamp == manifest.created_at

import pytest
from tests.unit.checkpoint.tied_weights import Tied, save

from tensorforge.checkpoint import CheckpointFormat, SaveOptions
from tensorforge.checkpoint.foreign_formats import export_foreign, import_foreign
from tensorforge.checkpoint.full_state import read_full_state, write_full_state
from tensorforge.checkpoint.store_index import read_manifest
from tensorforge.storage.local_store import LocalStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


@pytest.mark.parametrize("kind", ["torch", "safetensors", "huggingface"])
def test_tied_weights_go_to_other_formats_and_come_back_tied(tmp_path, kind):
    store = LocalStore(tmp_path / "store")
    save(store, Tied(0))
    path = tmp_path / {"torch": "model.pt", "safetensors": "m.safetensors"}.get(kind, "folder")
    export_foreign(read_full_state(store, "c"), path, kind)
    write_full_state(store, import_foreign(path), SaveOptions(checkpoint_prefix="back"))
    before, after = (read_manifest(store, prefix) for prefix in ("c", "back"))
    names = ("model/embed.weight", "model/head.weight")
    assert after.tensors[names[0]] == after.tensors[names[1]]
    contents = [
        [chunk.data.content for name in names for chunk in manifest.tensors[name].chunks]
        for manifest in (before, after)
    ]
    assert contents[0] == contents[1]
    store.close()


@pytest.mark.parametrize("layout", [CheckpointFormat.SINGLE_FILE, CheckpointFormat.CONSOLIDATED])
def test_a_file_that_holds_a_tied_weight_once_is_imported_under_both_names(tmp_path, layout):
    store = LocalStore(tmp_path)
    save(store, Tied(0), format=layout)
    single = layout is CheckpointFormat.SINGLE_FILE
    found = import_foreign(tmp_path / "c.safetensors" if single else tmp_path / "c").model
    assert found["head.weight"] is found["embed.weight"]
    assert set(found) >= {"embed.weight", "head.weight", "body.weight", "body.bias"}
    store.close()

import pytest
import torch
from tests.unit.catalog.run_states import State, make_state

pytestmark = pytest.mark.filterwarnings("ignore::tensorforge.checkpoint.StaleSaveWarning")


def test_a_state_that_did_not_change_writes_a_manifest_and_nothing_else(runs, store):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    files = {blob.key for blob in store.list()}
    again = runs.save(state, epoch=0, step=1)
    assert {blob.key for blob in store.list()} - files == {f"{again.storage_path}.metadata.json"}
    assert runs.restore(state.blank()).record == again


def test_content_that_moved_to_another_tensor_is_found(runs):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    renamed = State(**{f"new.{name}": tensor for name, tensor in state.tensors.items()})
    runs.save(renamed, epoch=0, step=1)
    assert runs.last_increment.tally.complete == 0
    found = renamed.blank()
    runs.restore(found)
    assert found == renamed


def test_tensors_may_come_go_and_change_shape_and_type(runs):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    state.tensors["head"] = state.tensors["head"].double()
    state.tensors["backbone"] = state.tensors["backbone"][:200].contiguous() + 1
    state.tensors["extra"] = torch.arange(10)
    del state.tensors["half"]
    runs.save(state, epoch=0, step=1)
    found = state.blank()
    runs.restore(found)
    assert found == state

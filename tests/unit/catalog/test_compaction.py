import pytest
from tests.store_files import orphans
from tests.unit.catalog.run_states import make_state, occupied, step_on

from tensorforge.catalog import CheckpointType
from tensorforge.errors import ConflictError

pytestmark = pytest.mark.filterwarnings("ignore::tensorforge.checkpoint.StaleSaveWarning")


def test_a_full_chain_is_followed_by_compaction_and_what_is_below_may_go(runs, manager, store):
    state, records = make_state(), []
    for step in range(4):
        step_on(state, step)
        records.append(runs.save(state, epoch=0, step=step))
    runs.wait()
    last = manager.get(records[-1].checkpoint_id)
    assert (last.checkpoint_type, last.parent_id) == (CheckpointType.FULL, None)
    assert runs.restore(found := state.blank()).record == last
    assert found == state
    step_on(state, 9)
    child = runs.save(state, epoch=0, step=9)
    assert child.parent_id == last.checkpoint_id
    gone = manager.gc()
    assert set(gone) == {record.checkpoint_id for record in records[:3]}
    assert orphans(store) == []
    assert occupied(store) == manager.total_size()
    runs.restore(found := state.blank())
    assert found == state


def test_only_the_last_of_a_chain_is_compacted(runs):
    state = make_state()
    runs.save(state, epoch=0, step=0)
    step_on(state, 1)
    middle = runs.save(state, epoch=0, step=1)
    step_on(state, 2)
    runs.save(state, epoch=0, step=2)
    with pytest.raises(ConflictError, match="not the last of its chain"):
        runs.compact(middle.checkpoint_id)
    assert runs.restore(found := state.blank()).record.step == 2
    assert found == state

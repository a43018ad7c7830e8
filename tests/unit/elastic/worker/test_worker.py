"""The worker's contract where no coordinator is needed."""

import threading
from types import SimpleNamespace

import pytest

from tensorforge.elastic import (
    ClusterTopology,
    ElasticTrainingConfig,
    ElasticWorker,
    GlobalTrainingState,
    RescalingEvent,
    StateHooks,
    WorkerId,
    WorkerStatus,
)
from tensorforge.elastic.protocol import messages
from tensorforge.errors import (
    ClosedError,
    ConfigurationError,
    ConflictError,
    DeadlineExceededError,
    InvalidInputError,
    StaleGenerationError,
)

A, B, C = (WorkerId(name, "h", 1) for name in "abc")
FAST = ElasticTrainingConfig(rescale_timeout_ms=50, worker_heartbeat_timeout_ms=50)
STATE = GlobalTrainingState(
    current_epoch=2,
    current_step=30,
    learning_rate=0.5,
    global_batch_size=8,
    active_worker_count=2,
    optimizer_state=b"moments",
)


def topology(*workers, epoch=1):
    return ClusterTopology(workers=workers, epoch=epoch)


def event(old, new):
    return RescalingEvent.between(old, new, "test")


class Hooks(StateHooks):
    def __init__(self):
        self.seen = []

    def load_optimizer_state(self, encoded):
        self.seen.append(("optimizer", encoded))

    def set_learning_rate(self, learning_rate):
        self.seen.append(("rate", learning_rate))

    def set_counters(self, epoch, step):
        self.seen.append(("counters", epoch, step))


def test_a_new_worker_is_joining_and_has_no_rank():
    worker = ElasticWorker(A, FAST)
    assert worker.worker_id == A
    assert worker.metadata().status is WorkerStatus.JOINING
    assert worker.metadata().rank == -1
    assert worker.current_topology is None
    assert worker.current_state is None
    assert not worker.is_rescaling


def test_a_wrong_configuration_is_refused():
    with pytest.raises(ConfigurationError):
        ElasticWorker(A, ElasticTrainingConfig(min_workers=0))


def test_metadata_is_a_copy():
    worker = ElasticWorker(A, FAST, attributes={"gpu": "none"})
    before = worker.metadata()
    worker.update_topology(topology(B, A))
    assert before.rank == -1
    assert worker.metadata().rank == 1
    assert worker.metadata().custom_attributes["gpu"] == "none"


def test_a_topology_gives_the_rank_and_an_older_one_is_refused():
    worker = ElasticWorker(B, FAST)
    worker.update_topology(topology(A, B, epoch=3))
    assert worker.metadata().rank == 1
    with pytest.raises(StaleGenerationError):
        worker.update_topology(topology(B, epoch=2))
    worker.update_topology(topology(A, epoch=4))
    assert worker.metadata().rank == -1


def test_synchronizing_applies_optimizer_state_learning_rate_and_counters():
    hooks, told = Hooks(), []
    worker = ElasticWorker(A, FAST, hooks=hooks)
    worker.state_synchronized.append(told.append)
    worker.synchronize_state(STATE)
    assert hooks.seen == [("optimizer", b"moments"), ("rate", 0.5), ("counters", 2, 30)]
    assert told == [STATE]
    assert worker.current_state == STATE


def test_an_optimizer_state_that_nothing_can_load_is_an_error_and_changes_nothing():
    worker = ElasticWorker(A, FAST)
    with pytest.raises(ConflictError, match="7 bytes of optimizer state"):
        worker.synchronize_state(STATE)
    assert worker.current_state is None


def test_updating_the_training_state_moves_the_counters():
    worker = ElasticWorker(A, FAST)
    worker.update_topology(topology(A, B))
    worker.update_training_state(1, 7, 0.25)
    state = worker.current_state
    assert (state.current_epoch, state.current_step, state.learning_rate) == (1, 7, 0.25)
    assert state.active_worker_count == 2


def test_synchronous_rescaling_waits_for_the_training_code_to_resume():
    worker = ElasticWorker(A, ElasticTrainingConfig())
    told = threading.Event()
    worker.rescaling_requested.append(lambda _event: told.set())
    change = event(topology(A), topology(A, B, epoch=2))
    handler = threading.Thread(target=worker.on_rescaling_event, args=(change,))
    handler.start()
    assert told.wait(10)
    assert worker.is_rescaling
    assert worker.metadata().status is WorkerStatus.RESCALING
    worker.resume_training()
    handler.join(10)
    assert not handler.is_alive()
    assert not worker.is_rescaling
    assert worker.metadata().status is WorkerStatus.ACTIVE


def test_synchronous_rescaling_is_bounded_by_the_rescale_timeout():
    worker = ElasticWorker(A, FAST)
    with pytest.raises(DeadlineExceededError, match="generation 2 within 50 ms"):
        worker.on_rescaling_event(event(topology(A), topology(A, B, epoch=2)))
    assert not worker.is_rescaling


def test_asynchronous_rescaling_adopts_the_topology_and_goes_on():
    config = ElasticTrainingConfig(use_synchronous_rescaling=False)
    worker = ElasticWorker(A, config)
    worker.on_rescaling_event(event(topology(A), topology(B, A, epoch=2)))
    assert worker.current_topology.epoch == 2
    assert worker.metadata().rank == 1


def test_a_callback_that_raises_does_not_keep_the_others_from_being_told(caplog):
    config = ElasticTrainingConfig(use_synchronous_rescaling=False)
    worker, told = ElasticWorker(A, config), []
    worker.rescaling_requested.append(lambda _event: 1 / 0)
    worker.rescaling_requested.append(told.append)
    worker.on_rescaling_event(event(topology(A), topology(A, B, epoch=2)))
    assert len(told) == 1
    assert "a callback raised" in caplog.text


def test_resuming_without_a_rescale_does_nothing():
    worker = ElasticWorker(A, FAST)
    worker.resume_training()
    assert worker.metadata().status is WorkerStatus.JOINING


def test_shards_are_dealt_by_rank_each_to_one_worker():
    workers = [ElasticWorker(worker, FAST) for worker in (A, B, C)]
    assert not workers[0].should_handle_shard(0, 12)
    for worker in workers:
        worker.update_topology(topology(A, B, C))
    for shard in range(12):
        assert sum(worker.should_handle_shard(shard, 12) for worker in workers) == 1
    with pytest.raises(InvalidInputError, match="shard_index = 12"):
        workers[0].should_handle_shard(12, 12)


def plan(**assignments):
    workers = {"a": A, "b": B, "c": C}
    shards = {
        workers[name]: [SimpleNamespace(shard_id=number) for number in numbers]
        for name, numbers in assignments.items()
    }
    return SimpleNamespace(worker_assignments=shards, total_shards=4)


def test_redistributing_runs_the_executor_and_then_goes_by_the_plan():
    done = []
    worker = ElasticWorker(A, FAST, data_executor=done.append)
    worker.update_topology(topology(A, B))
    change = plan(a=[0, 1, 3], b=[2])
    worker.redistribute_data(change)
    assert done == [change]
    assert [worker.should_handle_shard(shard, 4) for shard in range(4)] == [True, True, False, True]
    assert worker.should_handle_shard(2, 8)


def test_a_plan_for_others_or_without_an_executor_is_an_error():
    with pytest.raises(ConflictError, match="no data_executor"):
        ElasticWorker(A, FAST).redistribute_data(plan(a=[0]))
    worker = ElasticWorker(A, FAST, data_executor=print)
    with pytest.raises(InvalidInputError, match="does not mention a@h:1"):
        worker.redistribute_data(plan(b=[0]))


def test_disconnecting_twice_is_fine_and_nothing_waits_afterwards():
    worker = ElasticWorker(A, FAST)
    worker.disconnect()
    worker.disconnect()
    assert worker.wait_for_formation(0.01) is None
    assert not worker.wait_for_release(0.01)
    assert not worker.flush(0.01)


class Stream:
    """A connection that keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def wake(self):
        pass


def test_nothing_is_said_on_a_new_stream_before_its_welcome():
    worker = ElasticWorker(A, FAST)
    worker._connection = stream = Stream()
    welcome = messages.Welcome(generation=0, workers=None, config=FAST)
    worker._hello()
    worker._inbox.receive(welcome)
    worker._hello()  # the first stream broke
    worker.finish("complete")
    assert worker._beat() == []
    assert stream.sent == []
    worker._inbox.receive(welcome)
    assert [type(message) for message in stream.sent] == [messages.Finish]
    assert [type(message) for message in worker._beat()] == [messages.Heartbeat]


def test_a_disconnected_worker_cannot_be_used_again():
    worker = ElasticWorker(A, FAST)
    with pytest.raises(Exception, match="no coordinator accepted"):
        worker.connect_to_cluster("127.0.0.1:9", timeout=0.05)
    with pytest.raises(ClosedError, match="make a new worker"):
        worker.connect_to_cluster("127.0.0.1:9", timeout=0.05)
    with pytest.raises(ClosedError):
        worker.wait_for_formation(1)

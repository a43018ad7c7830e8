"""DTensor and torch.distributed, in real processes. Run as a script, this file is those processes."""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

NAMES = ["rows", "columns", "empty", "grid", "hybrid", "nested", "interleaved", "plain"]
SHAPES = {"rows": (10, 3), "columns": (4, 9), "empty": (2, 5), "interleaved": (8, 4)}


def whole(name):
    import torch

    generator = torch.Generator().manual_seed(NAMES.index(name))
    return torch.randn(SHAPES.get(name, (7, 6)), generator=generator)


def placed(world_size, *, zero):
    """Every tensor in the way that its name says, on a mesh of so many ranks."""
    import torch
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    line = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, world_size // 2))
    meshes = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "empty": (line, [Shard(0)]),
        "grid": (grid, [Shard(0), Shard(1)]),
        "hybrid": (grid, [Replicate(), Shard(0)]),
        "nested": (grid, [Shard(0), Shard(0)]),
        "interleaved": (grid, [_StridedShard(0, split_factor=world_size // 2), Shard(0)]),
    }
    tensors = {}
    for name in NAMES:
        content = torch.zeros_like(whole(name)) if zero else whole(name)
        if name in meshes:
            content = distribute_tensor(content, *meshes[name])
        tensors[name] = content
    return tensors


class State:
    def __init__(self, tensors):
        self.tensors = tensors

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


def sharded_model():
    """A model under FSDP2, trained a little."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer


def train(model, optimizer):
    import torch

    torch.manual_seed(1)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(value):
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def checkpoint_in(folder):
    from tensorforge.checkpoint import DistributedCheckpoint, TorchDistributed
    from tensorforge.storage.local_store import LocalStore

    return DistributedCheckpoint(TorchDistributed(), LocalStore(folder), timeout=60)


def scenario_save(rank, world_size, folder):
    from tensorforge.checkpoint import CheckpointFormat, SaveOptions

    with checkpoint_in(folder) as checkpoint:
        for layout in CheckpointFormat:
            options = SaveOptions(
                checkpoint_prefix=layout.value, format=layout, include_rng_state=False
            )
            handle = checkpoint.async_save(State(placed(world_size, zero=False)), options=options)
            handle.result()
        model, optimizer = sharded_model()
        train(model, optimizer)
        checkpoint.save(model, optimizer, SaveOptions(checkpoint_prefix="fsdp"))


def scenario_load(rank, world_size, folder):
    import torch

    from tensorforge.checkpoint import LoadOptions

    with checkpoint_in(folder) as checkpoint:
        for prefix in ("single_file", "multi_shard", "consolidated"):
            state = State(placed(world_size, zero=True))
            checkpoint.load(state, options=LoadOptions(checkpoint_prefix=prefix))
            for name in NAMES:
                assert torch.equal(full(state.tensors[name]), whole(name)), (prefix, name)
        model, optimizer = sharded_model()
        expected, expected_optimizer = sharded_model()
        train(expected, expected_optimizer)
        checkpoint.load(model, optimizer, LoadOptions(checkpoint_prefix="fsdp"))
        for name, value in expected.state_dict().items():
            # Trained on another number of ranks the sums differ in their last bits.
            assert torch.allclose(full(model.state_dict()[name]), full(value), atol=1e-5), name
        train(model, optimizer)
        train(expected, expected_optimizer)
        for name, value in expected.state_dict().items():
            assert torch.allclose(full(model.state_dict()[name]), full(value), atol=1e-4), name


def scenario_kill(rank, world_size, folder, victim):
    import torch

    from tensorforge.checkpoint import CheckpointError, SaveOptions

    checkpoint = checkpoint_in(folder)
    state = State({"x": torch.ones(400_000)})
    checkpoint.save(state, options=SaveOptions(checkpoint_prefix="good"))
    state.tensors["x"].add_(1)

    def progress(done, total):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    started = time.monotonic()
    try:
        checkpoint.save(
            state, options=SaveOptions(checkpoint_prefix="bad", timeout=3), progress=progress
        )
    except CheckpointError as error:
        print(json.dumps({"type": error.type.value, "seconds": time.monotonic() - started}))
    # No tidy end: the store's host may be gone.
    sys.stdout.flush()
    os._exit(0)


def run_rank(rank, world_size, port, scenario, arguments):
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    globals()[f"scenario_{scenario}"](rank, world_size, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def main(scenario, world_size, folder, *rest):
    """Import torch once, then fork the ranks; exits with the number of ranks that failed."""
    import socket

    import torch

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(int(world_size)):
        pid = os.fork()
        if not pid:
            try:
                run_rank(rank, int(world_size), port, scenario, [folder, *map(int, rest)])
            except BaseException:  # noqa: BLE001  the parent sees the exit code
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1] not in (0, signal.SIGKILL)]
    sys.exit(len(failed))


def launch(scenario, world_size, folder, *rest):
    command = [sys.executable, __file__, scenario, str(world_size), str(folder), *map(str, rest)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


pytestmark = [
    pytest.mark.may_leak("files", "importing torch.distributed makes a cache folder"),
    pytest.mark.timeout(600),  # real processes, which a busy machine starts slowly
]


def test_tensors_on_one_and_two_dimensional_meshes_survive_another_number_of_ranks(tmp_path):
    import torch

    from tensorforge.checkpoint import DistributedCheckpoint, LoadOptions, SingleProcess
    from tensorforge.storage.local_store import LocalStore

    launch("save", 4, tmp_path)
    launch("load", 4, tmp_path)
    launch("load", 2, tmp_path)
    with DistributedCheckpoint(SingleProcess(), LocalStore(tmp_path)) as checkpoint:
        for prefix in ("single_file", "multi_shard", "consolidated"):
            state = State({name: torch.zeros_like(whole(name)) for name in NAMES})
            checkpoint.load(state, options=LoadOptions(checkpoint_prefix=prefix))
            assert all(torch.equal(state.tensors[name], whole(name)) for name in NAMES)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_fails_the_save_on_the_others_and_the_old_checkpoint_stays(tmp_path, victim):
    import torch

    from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
    from tensorforge.storage.local_store import LocalStore

    reports = launch("kill", 2, tmp_path, victim)
    assert len(reports) == 1
    assert reports[0]["type"] in ("timeout", "storage_error")
    assert reports[0]["seconds"] < 30
    with DistributedCheckpoint(SingleProcess(), LocalStore(tmp_path)) as checkpoint:
        assert [info.prefix for info in checkpoint.list_checkpoints()] == ["good"]
        state = State({"x": torch.zeros(400_000)})
        checkpoint.load(state)
        assert torch.equal(state.tensors["x"], torch.ones(400_000))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])

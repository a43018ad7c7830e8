"""States that a run saves."""

import torch


class State:
    """A state that a test can set tensor by tensor."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def state_dict(self):
        return dict(self.tensors)

    def load_state_dict(self, state):
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)

    def copy(self):
        return State(**{name: tensor.clone() for name, tensor in self.tensors.items()})

    def blank(self):
        return State(**{name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()})

    def __eq__(self, other):
        return all(torch.equal(self.tensors[name], other.tensors[name]) for name in self.tensors)

    __hash__ = None


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return State(
        backbone=torch.randn(300, 1000, generator=generator),
        head=torch.randn(100, 100, generator=generator),
        half=torch.randn(64, 64, generator=generator).to(torch.bfloat16),
        count=torch.tensor(seed),
        empty=torch.empty(0, 3),
    )


def step_on(state, seed, names=("head", "count")):
    torch.manual_seed(seed)
    for name in names:
        tensor = state.tensors[name]
        tensor.add_(torch.ones_like(tensor) if tensor.dtype == torch.int64 else 1e-3)


def occupied(store):
    return sum(blob.size for blob in store.list())


def flip_a_byte(store, record):
    path = next((store.root / record.storage_path).glob("rank-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

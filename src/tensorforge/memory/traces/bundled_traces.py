"""The traces that are part of the package: training runs of small models, recorded on a CPU."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from tensorforge.errors import NotFoundError
from tensorforge.memory.traces.torch_snapshot import load_trace
from tensorforge.memory.traces.trace import AllocationTrace

_SUFFIX = ".json.gz"


def bundled_traces() -> tuple[str, ...]:
    """The names of the bundled traces."""
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in _folder().glob(f"*{_SUFFIX}")))


def bundled_trace(name: str) -> AllocationTrace:
    """The bundled trace of this name; an unknown name is a `NotFoundError` that lists the known ones."""
    if name not in bundled_traces():
        raise NotFoundError(f"no trace is named {name!r}; known are {', '.join(bundled_traces())}")
    return AllocationTrace.load(_folder() / f"{name}{_SUFFIX}")


def open_trace(path_or_name: str, *, device: int = 0) -> AllocationTrace:
    """Open a trace file, a PyTorch snapshot file, or a bundled trace by its name."""
    if not Path(path_or_name).exists() and path_or_name in bundled_traces():
        return bundled_trace(path_or_name)
    if not Path(path_or_name).exists():
        raise NotFoundError(
            f"{path_or_name} is neither a file nor one of the bundled traces: "
            f"{', '.join(bundled_traces())}"
        )
    return load_trace(path_or_name, device=device)


def _folder() -> Path:
    return Path(str(files("tensorforge.memory"))) / "traces"

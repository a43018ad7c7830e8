"""PyTorch's memory snapshots: reads what `torch.cuda.memory._dump_snapshot` writes, and writes the same format.

A snapshot is a pickle of plain containers. The reader refuses a file that names any class or function, before
anything can be called. Exported snapshots open in `torch.cuda._memory_viz` and on
https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorforge.errors import EncodingError, NotFoundError
from tensorforge.memory.traces.replay import Replay
from tensorforge.memory.traces.trace import AllocationTrace, Event, read_json

Json = Any

_MAGIC = b"\x80"  # every pickle of protocol 2 or later starts with it
_BASE_ADDRESS = 1 << 40


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise EncodingError(
            f"the snapshot names {module_name}.{global_name}; a memory snapshot may contain only plain data"
        )


def load_trace(path: str | Path, *, device: int = 0) -> AllocationTrace:
    """Read a trace from a file: a TensorForge trace, or a PyTorch snapshot as pickle or JSON."""
    path = Path(path)
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}")
    with path.open("rb") as file:
        is_pickle = file.read(1) == _MAGIC
    data = load_pickle(path) if is_pickle else read_json(path)
    if isinstance(data, dict) and "device_traces" in data:
        return trace_of_snapshot(data, device=device, name=path.name.split(".")[0])
    return AllocationTrace.from_json(data)


def load_pickle(path: Path) -> Json:
    """Read the plain data in a pickle; anything else is an `EncodingError`."""
    try:
        return _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except EncodingError:
        raise
    except Exception as error:
        raise EncodingError(f"{path} is not a memory snapshot: {error}") from error


def trace_of_snapshot(
    snapshot: Json, *, device: int = 0, name: str = "snapshot"
) -> AllocationTrace:
    """The trace of one device's history in a snapshot.

    Blocks that were in use before the history begins count as allocated at its start. These are the blocks
    whose first event is a release, and those in use at the end without an allocation in the history.
    """
    try:
        history = snapshot["device_traces"][device]
        rows = [
            (int(e.get("time_us", 0)), int(e["addr"]), int(e["size"]), e["action"], _label(e))
            for e in history
            if e["action"] in ("alloc", "free_completed")
        ]
        held = [
            (int(block["address"]), int(block["size"]), _label(block))
            for segment in snapshot["segments"]
            if segment.get("device", 0) == device
            for block in _addressed(segment)
            if block["state"] != "inactive"
        ]
    except IndexError:
        raise NotFoundError(f"the snapshot has no history of device {device}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EncodingError(f"not a memory snapshot: {error!r}") from error
    return AllocationTrace(_events(rows, held), name=name)


def snapshot_of_replay(trace: AllocationTrace, result: Replay) -> Json:
    """A snapshot of a trace as a policy placed it, in one segment of the size that the policy needed."""
    size = result.peak_reserved
    addresses = {block: _BASE_ADDRESS + result.position(block) for block in result.offsets}
    events: list[Json] = [_action("segment_alloc", _BASE_ADDRESS, size, 0, "")]
    live: dict[int, Event] = {}
    for event in trace.events:
        now = round(event.time * 1e6)
        address = addresses[event.block]
        if event.size > 0:
            live[event.block] = event
            events.append(_action("alloc", address, event.size, now, event.label))
        else:
            del live[event.block]
            events.append(_action("free_requested", address, -event.size, now, ""))
            events.append(_action("free_completed", address, -event.size, now, ""))
    held = sorted((addresses[b], e.size, e.label) for b, e in live.items())
    return {
        "segments": [_segment(size, held)],
        "device_traces": [events],
        "allocator_settings": {"policy": result.policy},
        "external_annotations": [],
    }


def save_snapshot(snapshot: Json, path: str | Path) -> None:
    """Write a snapshot: as JSON if the name ends in `.json`, otherwise as a pickle for PyTorch."""
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(snapshot))
    else:
        path.write_bytes(pickle.dumps(snapshot, protocol=4))


def _events(
    rows: list[tuple[int, int, int, str, str]], held: list[tuple[int, int, str]]
) -> Iterator[Event]:
    origin = rows[0][0] if rows else 0
    earlier = _held_before(rows, held)
    live: dict[int, tuple[int, int]] = {}
    for number, (address, size, label) in enumerate(earlier):
        live[address] = (number, size)
        yield Event(0.0, number, size, label)
    count, now = len(earlier), 0.0
    for microseconds, address, size, action, label in rows:
        now = max(now, (microseconds - origin) / 1e6)  # the clocks of several streams may differ
        if address in live:
            number, old = live.pop(address)
            yield Event(now, number, -old)
        if action == "alloc":
            live[address] = (count, size)
            yield Event(now, count, size, label)
            count += 1


def _held_before(
    rows: list[tuple[int, int, int, str, str]], held: list[tuple[int, int, str]]
) -> list[tuple[int, int, str]]:
    """Address, size and label of the blocks that were in use before the first event."""
    first: dict[int, tuple[int, str]] = {}
    for _, address, size, action, _ in rows:
        first.setdefault(address, (size, action))
    freed_unseen = [
        (address, size, "") for address, (size, action) in first.items() if action != "alloc"
    ]
    kept_unseen = [row for row in held if row[0] not in first]
    return [row for row in freed_unseen + kept_unseen if row[1] > 0]


def _addressed(segment: Json) -> Iterator[Json]:
    """The blocks of a segment with their addresses, which older snapshots leave out."""
    address = int(segment["address"])
    for block in segment["blocks"]:
        yield {**block, "address": block.get("address", address)}
        address += int(block["size"])


def _label(entry: Json) -> str:
    """The innermost frame that was recorded, as `function (file:line)`."""
    for frame in entry.get("frames") or ():
        place = f"{frame.get('filename', '')}:{frame.get('line', 0)}"
        return f"{frame.get('name', '')} ({place})" if place != ":0" else str(frame.get("name", ""))
    return ""


def _action(action: str, address: int, size: int, now: int, label: str) -> Json:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": now,
        "frames": _frames(label),
    }


def _frames(label: str) -> Json:
    return [{"name": label, "filename": "", "line": 0}] if label else []


def _segment(size: int, held: list[tuple[int, int, str]]) -> Json:
    blocks, cursor = [], _BASE_ADDRESS
    for address, nbytes, label in held:
        if address > cursor:
            blocks.append(_block(cursor, address - cursor, "inactive", ""))
        blocks.append(_block(address, nbytes, "active_allocated", label))
        cursor = address + nbytes
    if cursor < _BASE_ADDRESS + size:
        blocks.append(_block(cursor, _BASE_ADDRESS + size - cursor, "inactive", ""))
    used = sum(nbytes for _, nbytes, _ in held)
    return {
        "device": 0,
        "address": _BASE_ADDRESS,
        "total_size": size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, state: str, label: str) -> Json:
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": _frames(label),
    }

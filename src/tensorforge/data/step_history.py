"""The committed steps of a run in a file, and the proof that every sample was consumed once.

The file has JSON lines, appended by whichever member commits; one line is one step:

    {"format": "tensorforge-ledger", "version": 1, "size": 1000, "shards": 12}
    {"epoch": 0, "step": 0, "generation": 1, "taken": [[0, 32], [84, 116]]}
    {"resume": 0, "generation": 2}

`resume` records that the run restarted from the state after that step: earlier lines with a later step are
void. Two members may both write the same step; equal content counts once. An incomplete last line means that
its writer died while writing it; it is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tensorforge.data.plan.intervals import Range
from tensorforge.data.plan.ledger import Ledger, LedgerProof, as_range
from tensorforge.data.plan.shards import DataShard
from tensorforge.errors import ConflictError, EncodingError, IntegrityError, NotFoundError

_FORMAT, _VERSION = "tensorforge-ledger", 1


class HistoryWriter:
    """Appends committed steps to a file, which is created if missing.

    A file with another run's header is a `ConflictError`. Each line is one write to a file opened for
    appending, so lines of several writers never mix.
    """

    def __init__(self, path: str | Path, size: int, shards: int) -> None:
        self.path = Path(path)
        header = {"format": _FORMAT, "version": _VERSION, "size": size, "shards": shards}
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            self._begin(header)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _begin(self, header: dict[str, Any]) -> None:
        end = os.fstat(self._descriptor).st_size
        if not end:
            self._write(header)
            return
        with self.path.open("rb") as file:
            found = _parse(file.readline(), 1)
        if found != header:
            raise ConflictError(f"{self.path} is another run's history: {found}")
        if os.pread(self._descriptor, 1, end - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # ends an incomplete line of a writer that died

    def append(
        self, epoch: int, step: int, taken: Iterable[DataShard | Range], generation: int = 0
    ) -> None:
        """Record that `step` was committed and consumed these positions."""
        ranges = [as_range(item) for item in taken]
        self._write({"epoch": epoch, "step": step, "generation": generation, "taken": ranges})

    def resume(self, step: int, generation: int = 0) -> None:
        """Record that the run continues from the state after `step`; later steps are void."""
        self._write({"resume": step, "generation": generation})

    def _write(self, record: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Close the file; closing again changes nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class HistoryProof:
    """The proof for each epoch that no position was consumed twice, and the ledger after the last step."""

    epochs: tuple[LedgerProof, ...]
    ledger: Ledger
    generations: int
    voided_steps: int

    @property
    def is_complete(self) -> bool:
        """Whether every epoch is complete."""
        return all(proof.is_complete for proof in self.epochs)


def prove_history(path: str | Path) -> HistoryProof:
    """Replay a history and prove that no sample was consumed twice; `IntegrityError` names the wrong step."""
    records = _records(Path(path))
    header = next(records)
    commits, voided, generations = _valid_commits(records)
    ledger, proofs = Ledger(header["size"], header["shards"]), []
    for commit in commits:
        try:
            if commit["epoch"] == ledger.epoch + 1:
                following = ledger.next_epoch()
                proofs.append(ledger.prove())
                ledger = following
            if commit["epoch"] != ledger.epoch:
                raise ConflictError(f"epoch {commit['epoch']} does not follow {ledger.epoch}")
            ledger = ledger.commit(commit["step"], [(a, b) for a, b in commit["taken"]])
        except ConflictError as error:
            raise IntegrityError(f"{path}: {error}") from error
    proofs.append(ledger.prove())
    return HistoryProof(tuple(proofs), ledger, generations, voided)


def _valid_commits(records: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], int, int]:
    """The commits that are not void, the number of void ones, and the number of generations."""
    commits: list[dict[str, Any]] = []
    known: dict[int, dict[str, Any]] = {}
    voided, generations = 0, set()
    for record in records:
        generations.add(record["generation"])
        if "resume" in record:
            later = [commit for commit in commits if commit["step"] > record["resume"]]
            voided += len(later)
            commits = commits[: len(commits) - len(later)]
            for commit in later:
                known.pop(commit["step"], None)
            continue
        earlier = known.get(record["step"])
        if earlier is None:
            known[record["step"]] = record
            commits.append(record)
        elif (earlier["epoch"], earlier["taken"]) != (record["epoch"], record["taken"]):
            raise IntegrityError(
                f"step {record['step']} was committed twice, with different samples"
            )
    return commits, voided, len(generations)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise NotFoundError(f"there is no ledger history at {path}") from None
    lines.pop()  # empty, or an incomplete last line
    if not lines:
        raise EncodingError(f"{path} is empty: it has no header")
    header = _parse(lines[0], 1)
    if header.get("format") != _FORMAT or header.get("version") != _VERSION:
        raise EncodingError(f"{path} is not a ledger history of version {_VERSION}")
    if not all(type(header.get(name)) is int for name in ("size", "shards")):
        raise EncodingError(f"{path}: the header lacks size or shards")
    yield header
    for number, line in enumerate(lines[1:], start=2):
        record = _parse(line, number, torn_allowed=True)
        if record:
            yield record


def _parse(line: bytes, number: int, *, torn_allowed: bool = False) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and (number == 1 or _is_record(record)):
            return record
    except ValueError:
        if torn_allowed and not line.endswith(b"}"):
            return {}  # its writer died, and the next writer ended the line
    raise EncodingError(f"line {number} is not a record of a ledger history: {line[:60]!r}")


def _is_record(record: dict[str, Any]) -> bool:
    def whole(*names: str) -> bool:
        return all(type(record.get(name)) is int for name in names)

    if set(record) == {"resume", "generation"}:
        return whole("resume", "generation")
    taken = record.get("taken")
    return (
        set(record) == {"epoch", "step", "generation", "taken"}
        and whole("epoch", "step", "generation")
        and isinstance(taken, list)
        and all(isinstance(r, list) and [type(x) for x in r] == [int, int] for r in taken)
    )

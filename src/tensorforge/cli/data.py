"""`tensorforge data`: plan redistributions, prove ledgers, pack and verify data sets."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tensorforge.cluster.elastic_config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data import (
    DataRedistributionPlan,
    DataRedistributor,
    DatasetInfo,
    HistoryProof,
    IntervalSet,
    PackedDataset,
    ShardStore,
    pack_array,
    pack_records,
    partition,
    prove_history,
    token_windows,
)
from tensorforge.errors import InvalidInputError, NotFoundError, TensorForgeError
from tensorforge.storage.opening import open_store

app = typer.Typer(
    no_args_is_help=True, help="Plan redistributions, prove ledgers, pack and verify data sets."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_SHOWN = 12


class Kind(Enum):
    """What the samples of a file are."""

    ARRAY = "array"
    TOKENS = "tokens"
    LINES = "lines"


@app.command()
def plan(
    samples: Annotated[int, typer.Option(help="Samples in the data set.")],
    before: Annotated[int, typer.Option("--from", help="Workers before the change.")],
    after: Annotated[int, typer.Option("--to", help="Workers after it.")],
    lost: Annotated[
        int,
        typer.Option(help="How many of the old workers are lost; new workers join in their place."),
    ] = 0,
    strategy: Annotated[
        RedistributionType, typer.Option(help="How data is assigned to workers.")
    ] = RedistributionType.INCREMENTAL,
    shards: Annotated[
        int | None, typer.Option(help="Plan in whole shards, this many; default: in samples.")
    ] = None,
    consumed: Annotated[int, typer.Option(help="Samples already consumed, from the first on.")] = 0,
    json_output: AsJson = False,
) -> None:
    """Show what a change of workers would move, and the minimum that any plan must move. Moves no data."""
    old, new = _topologies(before, after, lost)
    redistributor = DataRedistributor(ElasticTrainingConfig(redistribution_type=strategy))
    if shards is None:
        if not 0 <= consumed <= samples:
            raise InvalidInputError(f"--consumed {consumed}: must lie between 0 and {samples}")
        found = redistributor.calculate_plan(old, new, samples, consumed=IntervalSet.span(consumed))
    elif consumed:
        raise InvalidInputError(
            "--consumed cannot be combined with --shards: a shard moves as a whole"
        )
    else:
        found = redistributor.calculate_shard_plan(old, new, partition(samples, shards))
    redistributor.validate_redistribution(new, found).require()
    if json_output:
        typer.echo(json.dumps(_plan_facts(found), indent=2))
    else:
        _show_plan(found)


def _topologies(before: int, after: int, lost: int) -> tuple[ClusterTopology, ClusterTopology]:
    if before < 0 or after < 0 or not 0 <= lost <= before:
        raise InvalidInputError(
            f"--from {before} --to {after} --lost {lost}: must not be negative, and at most "
            f"--from workers can be lost"
        )
    names = (WorkerId(f"worker-{number}", "planned", 0) for number in range(before + after))
    workers = tuple(names)
    old = ClusterTopology(workers=workers[:before])
    survivors = workers[lost:before][:after]
    joining = workers[before : before + after - len(survivors)]
    return old, old.succeed((*survivors, *joining))


def _plan_facts(found: DataRedistributionPlan) -> dict[str, Any]:
    units = found.total_shards if found.whole_shards else found.dataset_size - found.consumed.size
    return {
        "strategy": found.strategy.value,
        "workers": len(found.worker_assignments),
        "unit": "shard" if found.whole_shards else "sample",
        "units": units,
        "moved_units": found.moved_units,
        "minimum_moves": found.minimum_moves,
        "moved_samples": found.moved_samples,
        "moved_share": found.moved_units / units if units else 0.0,
        "from_origin": sum(t.shard.size for t in found.transfers if t.source_worker is None),
        "transfers": [
            {
                "source": None if move.source_worker is None else move.source_worker.id,
                "destination": move.destination_worker.id,
                "shard": move.shard.shard_id,
                "start": move.shard.start_index,
                "stop": move.shard.end_index,
                "priority": move.priority,
            }
            for move in found.transfers
        ],
    }


def _show_plan(found: DataRedistributionPlan) -> None:
    facts = _plan_facts(found)
    console = Console()
    console.print(
        f"{facts['workers']} workers, {facts['units']} {facts['unit']}s: "
        f"{facts['moved_units']} move ({facts['moved_share']:.2%}), "
        f"the minimum is {facts['minimum_moves']}; "
        f"{facts['from_origin']} samples come from the origin",
        highlight=False,
    )
    table = Table("most urgent first", "from", "to", "samples", "count", box=None)
    for move in found.transfers[:_SHOWN]:
        shard, source = move.shard, move.source_worker
        table.add_row(
            f"shard {shard.shard_id}",
            "the origin" if source is None else source.id,
            move.destination_worker.id,
            f"{shard.start_index}-{shard.end_index}",
            str(shard.size),
        )
    if found.transfers:
        console.print(table)
    if len(found.transfers) > _SHOWN:
        console.print(f"and {len(found.transfers) - _SHOWN} more transfers; --json lists them all")


@app.command()
def ledger(
    file: Annotated[Path, typer.Argument(help="The step history that a run wrote.")],
    complete: Annotated[
        bool, typer.Option("--complete", help="Fail unless the last epoch is complete.")
    ] = False,
    json_output: AsJson = False,
) -> None:
    """Replay a run's committed steps and prove that no sample was in two steps of an epoch."""
    proof = prove_history(file)
    if json_output:
        typer.echo(json.dumps(_proof_facts(proof), indent=2))
    else:
        for epoch in proof.epochs:
            typer.echo(str(epoch))
        typer.echo(
            f"proven from {proof.ledger.committed_step + 1} committed steps of {proof.generations} "
            f"generations; {proof.voided_steps} steps are void because of a resume"
        )
    if complete and not proof.is_complete:
        raise TensorForgeError(f"{proof.ledger.remaining.size} samples of the last epoch remain")


def _proof_facts(proof: HistoryProof) -> dict[str, Any]:
    return {
        "proven": True,
        "complete": proof.is_complete,
        "committed_steps": proof.ledger.committed_step + 1,
        "generations": proof.generations,
        "voided_steps": proof.voided_steps,
        "epochs": [
            {
                "epoch": epoch.epoch,
                "last_step": epoch.committed_step,
                "samples": epoch.size,
                "consumed": epoch.consumed.size,
                "remaining": epoch.remaining.size,
                "remaining_ranges": epoch.remaining.ranges,
            }
            for epoch in proof.epochs
        ],
    }


@app.command()
def pack(
    source: Annotated[Path, typer.Argument(help="A .npy file, or a file of lines.")],
    target: Annotated[str, typer.Argument(help="Folder or URL to pack into.")],
    kind: Annotated[Kind, typer.Option(help="What the samples are.")] = Kind.ARRAY,
    sample_length: Annotated[
        int | None, typer.Option(help="Tokens per sample; consecutive samples share one.")
    ] = None,
    segments: Annotated[
        int, typer.Option(min=1, help="Files to write; one per shard is best.")
    ] = 64,
    shuffle: Annotated[
        int | None, typer.Option(help="Shuffle with this seed, so that a shard is a random sample.")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Pack samples into checksummed segments that workers can serve, fetch and load."""
    samples = _read_samples(source, kind, sample_length)
    with contextlib.closing(open_store(target)) as blobs, _progress(json_output) as progress:
        options: dict[str, Any] = {
            "segments": segments,
            "shuffle_seed": shuffle,
            "progress": progress,
        }
        if kind is Kind.LINES:
            info = pack_records(blobs, samples, **options)
        else:
            info = pack_array(blobs, samples, **options)
    _show_info(info, f"packed into {target}", json_output)


def _read_samples(source: Path, kind: Kind, sample_length: int | None) -> Any:
    if not source.is_file():
        raise NotFoundError(f"there is no file {source}")
    if (kind is Kind.TOKENS) != (sample_length is not None):
        raise InvalidInputError(
            "--sample-length is required with --kind tokens and not allowed without"
        )
    if kind is Kind.LINES:
        return [line for line in source.read_bytes().splitlines() if line.strip()]
    import numpy as np

    try:
        array = np.load(source, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidInputError(f"{source} is not a .npy file: {error}") from error
    return array if sample_length is None else token_windows(array, sample_length)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal and not `quiet`."""
    console = Console(file=sys.stderr)
    with Progress(console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("packing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command()
def verify(
    place: Annotated[str, typer.Argument(help="A packed data set, or a worker's shard store.")],
    json_output: AsJson = False,
) -> None:
    """Compare every byte with its checksum."""
    if (Path(place) / "incoming").is_dir():
        with ShardStore(place) as store:
            store.verify()
            info, held = store.info, store.held.size
    else:
        with contextlib.closing(open_store(place)) as blobs:
            packed = PackedDataset(blobs)
            packed.verify()
            info, held = packed.info, packed.info.size
    _show_info(info, f"{held} samples verified in {place}", json_output, held=held)


def _show_info(info: DatasetInfo, done: str, as_json: bool, **facts: object) -> None:
    dtype, shape = info.schema.dtype, list(info.schema.shape)
    if as_json:
        typer.echo(json.dumps({"size": info.size, "dtype": dtype, "shape": shape, **facts}))
    else:
        what = "records" if dtype is None else f"arrays of {dtype} {tuple(shape)}"
        typer.echo(f"{done}: a data set of {info.size} {what}")

"""`tensorforge checkpoint ls | show | verify | diff | convert`: the commands that read the files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from tensorforge.checkpoint import (
    CheckpointFormat,
    CheckpointValidator,
    CompressionLevel,
    EveryByteIsIntact,
    SaveOptions,
    store_index,
)
from tensorforge.checkpoint.checkpoint_diff import compare_tensors
from tensorforge.checkpoint.options import Progress
from tensorforge.cli._catalog_commands import (
    DEFAULT_STORE,
    AsJson,
    Store,
    opened_store,
    readable_size,
)
from tensorforge.errors import InvalidInputError, NotFoundError

Prefix = Annotated[str, typer.Argument(help="The checkpoint's prefix.")]


class Foreign(Enum):
    """The formats that `convert` writes."""

    TORCH = "torch"
    SAFETENSORS = "safetensors"
    HUGGINGFACE = "huggingface"
    DCP = "dcp"


@contextlib.contextmanager
def _bar(what: str, *, hidden: bool) -> Iterator[Progress]:
    """Shows a progress bar on the terminal; yields the callback that updates it."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(what, *columns, console=Console(stderr=True), disable=hidden) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def ls(store: Store = DEFAULT_STORE, json_output: AsJson = False) -> None:
    """List the checkpoints in a store, oldest first, and the manifests that cannot be read."""
    with opened_store(store) as opened:
        infos, damaged = store_index.list_with_damaged(opened)
    if json_output:
        rows = [
            {
                "prefix": info.prefix,
                "version": info.version,
                "timestamp": info.timestamp.isoformat(),
                "world_size": info.world_size,
                "size_bytes": info.size_bytes,
                "format": info.format,
            }
            for info in infos
        ]
        typer.echo(json.dumps({"checkpoints": rows, "damaged": damaged}))
        return
    table = Table("prefix", "saved at", "ranks", "size", "format")
    for info in infos:
        moment = f"{info.timestamp:%Y-%m-%d %H:%M:%S}"
        table.add_row(
            info.prefix, moment, str(info.world_size), readable_size(info.size_bytes), info.format
        )
    for prefix in damaged:
        table.add_row(prefix, "[red]its manifest is damaged[/red]", "", "", "")
    Console().print(table)


def show(prefix: Prefix, store: Store = DEFAULT_STORE, json_output: AsJson = False) -> None:
    """Show the tensors, files and metadata of a checkpoint."""
    with opened_store(store) as opened:
        manifest = store_index.read_manifest(opened, prefix)
    facts: dict[str, Any] = {
        "prefix": manifest.prefix,
        "version": manifest.version,
        "created_at": manifest.created_at.isoformat(),
        "world_size": manifest.world_size,
        "format": manifest.format,
        "compression": manifest.compression,
        "parent": manifest.parent,
        "size_bytes": manifest.size_bytes,
        "custom_metadata": manifest.custom_metadata,
    }
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
            "chunks": len(tensor.chunks),
        }
        for name, tensor in manifest.tensors.items()
    }
    if json_output:
        files = [{"key": file.key, "size": file.size} for file in manifest.files]
        typer.echo(json.dumps({**facts, "files": files, "tensors": tensors}))
        return
    for name, value in facts.items():
        typer.echo(f"{name:16} {value}")
    table = Table("tensor", "type", "shape", "size", "chunks")
    for name, tensor in manifest.tensors.items():
        shape = " ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(
            name, tensor.dtype, shape, readable_size(tensor.nbytes), str(len(tensor.chunks))
        )
    console = Console()
    console.print(table)
    for file in manifest.files:
        console.print(f"{file.key}  {readable_size(file.size)}", highlight=False)


def verify(
    prefixes: Annotated[list[str] | None, typer.Argument(help="Prefixes; default: all.")] = None,
    store: Store = DEFAULT_STORE,
    json_output: AsJson = False,
) -> None:
    """Read every byte of checkpoints and compare the checksums; exit 1 if one is damaged."""
    results = []
    with opened_store(store) as opened:
        chosen = prefixes or store_index.prefixes_by_age(opened)
        if not chosen:
            raise NotFoundError(f"there is no checkpoint in {opened.url}")
        for prefix in chosen:
            with _bar(f"verifying {prefix}", hidden=json_output) as progress:
                checker = EveryByteIsIntact(progress)
                results.append(CheckpointValidator(opened, [checker]).validate(prefix))
            if not json_output:
                typer.echo(results[-1].summary())
    if json_output:
        rows = [
            {
                "prefix": report.prefix,
                "valid": report.is_valid,
                "findings": [finding.message for finding in report.findings],
            }
            for report in results
        ]
        typer.echo(json.dumps({"checkpoints": rows}))
    if not all(report.is_valid for report in results):
        raise typer.Exit(1)


def diff(
    first: Prefix,
    second: Annotated[str, typer.Argument(help="The checkpoint to compare it with.")],
    store: Store = DEFAULT_STORE,
    json_output: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit 1 if they differ."""
    with opened_store(store) as opened:
        old, new = (store_index.read_manifest(opened, prefix) for prefix in (first, second))
        with _bar("comparing", hidden=json_output) as progress:
            differences = compare_tensors(opened, old, new, progress)
    same = not any(differences.values())
    if json_output:
        typer.echo(json.dumps({"equal": same, **differences}))
    elif same:
        typer.echo(f"{first} and {second} have equal tensors")
    else:
        for what, names in differences.items():
            for name in names:
                typer.echo(f"{what.replace('_', ' ')}: {name}")
    if not same:
        raise typer.Exit(1)


def convert(
    source: Annotated[str, typer.Argument(help="A prefix in the store, or a path.")],
    target: Annotated[str, typer.Argument(help="A path, or a new prefix in the store.")],
    to: Annotated[
        Foreign | None,
        typer.Option("--to", help="Format to write; default: by the suffix of TARGET."),
    ] = None,
    layout: Annotated[
        CheckpointFormat, typer.Option("--format", help="Layout of the new checkpoint.")
    ] = CheckpointFormat.MULTI_SHARD,
    compression: Annotated[
        CompressionLevel, typer.Option("--compression", help="Level for the new checkpoint.")
    ] = CompressionLevel.NONE,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Read DCP metadata, which can run any code.")
    ] = False,
    store: Store = DEFAULT_STORE,
    json_output: AsJson = False,
) -> None:
    """Convert a checkpoint to torch.save, safetensors, Hugging Face or DCP, or one of these to a checkpoint.

    If SOURCE is a checkpoint in the store, it is written to the path TARGET. Otherwise SOURCE is a path, which
    is read and saved as the new checkpoint TARGET.
    """
    from tensorforge.checkpoint.foreign_formats import export_foreign, import_foreign
    from tensorforge.checkpoint.full_state import read_full_state, write_full_state

    with opened_store(store) as opened:
        if store_index.exists(opened, source):
            kind = to.value if to else _format_by_suffix(target)
            with _bar("reading", hidden=json_output) as progress:
                state = read_full_state(opened, source, progress)
            export_foreign(state, Path(target), kind)
            result = {"source": source, "target": target, "kind": kind}
        else:
            state = import_foreign(Path(source), trust_pickle=trust_pickle)
            options = SaveOptions(
                checkpoint_prefix=target,
                format=layout,
                compression_level=compression,
                include_rng_state=False,
            )
            with _bar("saving", hidden=json_output) as progress:
                write_full_state(opened, state, options, progress)
            result = {"source": source, "target": target, "kind": "tensorforge"}
    typer.echo(json.dumps(result) if json_output else f"{source} → {target} ({result['kind']})")


def _format_by_suffix(target: str) -> str:
    kinds = {".pt": "torch", ".pth": "torch", ".bin": "torch", ".safetensors": "safetensors"}
    kind = kinds.get(Path(target).suffix)
    if kind is None:
        raise InvalidInputError(f"{target!r}: choose the format to write with --to")
    return kind


def register(app: typer.Typer) -> None:
    """Add these commands to `tensorforge checkpoint`."""
    for command in (ls, show, verify, diff, convert):
        app.command()(command)

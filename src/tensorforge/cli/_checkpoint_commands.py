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

from tensorforge.catalog.stored_records import METADATA, OLD_BOOKKEEPING, record_in
from tensorforge.checkpoint import (
    CheckpointFormat,
    CheckpointManifest,
    CheckpointValidator,
    CompressionLevel,
    EveryByteIsIntact,
    SaveOptions,
    store_index,
)
from tensorforge.checkpoint.checkpoint_diff import compare_tensors
from tensorforge.checkpoint.options import Progress
from tensorforge.cli._catalog_commands import readable_size
from tensorforge.cli._checkpoint_places import (
    AsJson,
    Catalog,
    RunDir,
    Store,
    find_place,
    find_prefix,
)
from tensorforge.cli._tables import console, print_table, table_of
from tensorforge.errors import InvalidInputError, NotFoundError

Name = Annotated[str, typer.Argument(help="A prefix, an id, or `latest`.")]


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


def ls(
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    json_output: AsJson = False,
) -> None:
    """List the checkpoints in a store, oldest first, and the manifests that cannot be read."""
    with find_place(store, catalog, run_dir).opened_store() as opened:
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
    table = table_of("prefix", "saved at", "ranks", "size", "format")
    for info in infos:
        moment = f"{info.timestamp:%Y-%m-%d %H:%M:%S}"
        table.add_row(
            info.prefix, moment, str(info.world_size), readable_size(info.size_bytes), info.format
        )
    for prefix in damaged:
        table.add_row(prefix, "[red]its manifest is damaged[/red]", "", "", "")
    print_table(table, "prefix")


def show(
    name: Name,
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    json_output: AsJson = False,
) -> None:
    """Show the position, tensors, files and metadata of a checkpoint."""
    place = find_place(store, catalog, run_dir)
    with place.opened_store() as opened:
        manifest = store_index.read_manifest(opened, find_prefix(place, opened, name))
    if json_output:
        typer.echo(json.dumps(_facts(manifest)))
        return
    for fact, value in _description(manifest):
        typer.echo(f"{fact:12} {value}")
    table = table_of("tensor", "type", "shape", "size", "chunks")
    for tensor_name, tensor in manifest.tensors.items():
        shape = " ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(
            tensor_name, tensor.dtype, shape, readable_size(tensor.nbytes), str(len(tensor.chunks))
        )
    print_table(table, "tensor")
    for file in manifest.files:
        console().print(f"{file.key}  {readable_size(file.size)}", highlight=False)


def _facts(manifest: CheckpointManifest) -> dict[str, Any]:
    """The manifest for programs."""
    return {
        "prefix": manifest.prefix,
        "version": manifest.version,
        "created_at": manifest.created_at.isoformat(),
        "world_size": manifest.world_size,
        "format": manifest.format,
        "compression": manifest.compression,
        "parent": manifest.parent,
        "size_bytes": manifest.size_bytes,
        "custom_metadata": manifest.custom_metadata,
        "extra_state": manifest.state.get("extra", {}),
        "files": [{"key": file.key, "size": file.size} for file in manifest.files],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "nbytes": tensor.nbytes,
                "chunks": len(tensor.chunks),
            }
            for name, tensor in manifest.tensors.items()
        },
    }


def _description(manifest: CheckpointManifest) -> Iterator[tuple[str, str]]:
    """The manifest for people: what a line is about, and the line."""
    yield "prefix", manifest.prefix
    record = record_in(manifest, manifest.size_bytes)
    if record is not None:
        yield "id", record.checkpoint_id
        yield "run", record.training_run_id
        yield "position", f"epoch {record.epoch}, step {record.step}"
        if record.metrics:
            yield "metrics", ", ".join(f"{key} {value:g}" for key, value in record.metrics.items())
    yield "saved at", f"{manifest.created_at:%Y-%m-%d %H:%M:%S} by {manifest.world_size} ranks"
    yield (
        "files",
        f"{readable_size(manifest.size_bytes)}, {manifest.format}, {manifest.compression}",
    )
    if manifest.parent is not None:
        yield "builds on", manifest.parent
    own = manifest.custom_metadata if isinstance(manifest.custom_metadata, dict) else {}
    for key, value in own.items():
        if key not in (METADATA, OLD_BOOKKEEPING):
            yield "metadata", f"{key}: {_readable(value)}"
    for key, value in manifest.state.get("extra", {}).items():
        yield "state", f"{key}: {_readable(value)}"


def _readable(tree: Any) -> str:
    """A tree of a manifest in one line: bytes as their number, tensors as their names."""
    match tree:
        case {"$bytes": str(text)}:
            return f"<{len(text) * 3 // 4} bytes>"
        case {"$tensor": str(name)} | {"$array": str(name)}:
            return f"<{name}>"
        case {"$tuple": list(items)} | list(items):
            return f"[{', '.join(map(_readable, items))}]"
        case {"$dict": list(pairs)} | {"$counter": list(pairs)}:
            return f"{{{', '.join(f'{_readable(k)}: {_readable(v)}' for k, v in pairs)}}}"
        case {"$float": value} | {"$int": value} | {"$dtype": value}:
            return str(value)
        case dict():
            return f"{{{', '.join(f'{key}: {_readable(item)}' for key, item in tree.items())}}}"
    return str(tree)


def verify(
    names: Annotated[
        list[str] | None, typer.Argument(help="Prefixes, ids or `latest`; default: all.")
    ] = None,
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    json_output: AsJson = False,
) -> None:
    """Read every byte of checkpoints and compare the checksums; exit 1 if one is damaged."""
    results = []
    place = find_place(store, catalog, run_dir)
    with place.opened_store() as opened:
        named = [find_prefix(place, opened, name) for name in names or ()]
        chosen = named or store_index.prefixes_by_age(opened)
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
    first: Name,
    second: Annotated[str, typer.Argument(help="The checkpoint to compare it with.")],
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    json_output: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit 1 if they differ."""
    place = find_place(store, catalog, run_dir)
    with place.opened_store() as opened:
        prefixes = [find_prefix(place, opened, name) for name in (first, second)]
        old, new = (store_index.read_manifest(opened, prefix) for prefix in prefixes)
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
    source: Annotated[
        str, typer.Argument(help="A prefix, an id or `latest` in the store, or a path.")
    ],
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
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    json_output: AsJson = False,
) -> None:
    """Convert a checkpoint to torch.save, safetensors, Hugging Face or DCP, or one of these to a checkpoint.

    If SOURCE is a checkpoint in the store, it is written to the path TARGET. Otherwise SOURCE is a path, which
    is read and saved as the new checkpoint TARGET.
    """
    from tensorforge.checkpoint.foreign_formats import export_foreign, import_foreign
    from tensorforge.checkpoint.full_state import read_full_state, write_full_state

    place = find_place(store, catalog, run_dir)
    with place.opened_store() as opened:
        found = source if Path(source).exists() else find_prefix(place, opened, source)
        if store_index.exists(opened, found):
            kind = to.value if to else _format_by_suffix(target)
            with _bar("reading", hidden=json_output) as progress:
                state = read_full_state(opened, found, progress)
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

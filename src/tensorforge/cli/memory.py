"""Record the allocations of a program, replay them through placement policies, and size a pool."""

from __future__ import annotations

import contextlib
import json
import math
import re
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorforge.errors import InvalidInputError, NotFoundError, TensorForgeError

if TYPE_CHECKING:
    from tensorforge.memory.traces.pool_advice import Advice
    from tensorforge.memory.traces.replay import BoundedReplay, Replay
    from tensorforge.memory.traces.trace import AllocationTrace

app = typer.Typer(no_args_is_help=True, help=__doc__)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

Trace = Annotated[
    str,
    typer.Argument(
        help="A recorded trace, a PyTorch memory snapshot, or the name of a bundled trace "
        "(bert, gpt2, resnet, vit)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[
    int, typer.Option(help="The device whose history is read from a PyTorch snapshot.")
]
Plot = Annotated[
    Path | None, typer.Option(help="Draw memory over time and the block map: .png, .svg or .html.")
]


def parse_size(text: str) -> int:
    """The number of bytes that `123`, `512k` or `1.5GiB` means; units are powers of 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if found is None:
        raise InvalidInputError(f"{text!r} is not a size; write for example 512M or 1.5GiB")
    return math.ceil(float(found[1]) * _UNITS[found[2]])


def show_size(nbytes: float) -> str:
    """A number of bytes with a unit, for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def record(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The Python program to run and record.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write the trace to.")
    ] = Path("trace.json.gz"),
    device: Annotated[str, typer.Option(help="The device to record: cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Run a program and record every allocation of torch. Options after SCRIPT go to the program."""
    if not script.is_file():
        raise NotFoundError(f"there is no program {script}")
    if not output.parent.is_dir():
        raise NotFoundError(f"there is no folder {output.parent} for the trace")
    from tensorforge.memory.traces.recording import record_allocations

    # With --json, standard output has nothing but the JSON.
    quiet = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with record_allocations(device=device, name=script.stem) as recording, quiet:
        status = _run_script(script, context.args)
    trace = recording.trace
    trace.save(output)
    facts = _trace_facts(trace) | {"output": str(output), "exit_status": status}
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        typer.echo(
            f"{output}: {len(trace)} events, {trace.allocations} allocations, "
            f"at most {show_size(trace.peak_live)} in use, {trace.duration:.1f} s"
        )
    if status:
        raise typer.Exit(status)


@app.command()
def replay(
    trace: Trace,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy to replay; may be repeated. Default: all."),
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Also replay through a pool of this size, e.g. 512M.")
    ] = None,
    compact: Annotated[
        bool, typer.Option(help="With --capacity: defragment when a request finds no room.")
    ] = False,
    plot: Plot = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Write the first policy's placement as a PyTorch memory snapshot."),
    ] = None,
    device: Device = 0,
    as_json: AsJson = False,
) -> None:
    """Replay a trace through placement policies and compare the memory that each needs."""
    from tensorforge.memory.pool.placement_policies import POLICY_NAMES
    from tensorforge.memory.traces.bundled_traces import open_trace
    from tensorforge.memory.traces.replay import replay_bounded, replay_trace

    if compact and capacity is None:
        raise InvalidInputError("--compact needs --capacity: an unbounded pool never compacts")
    found = open_trace(trace, device=device)
    names = policy or list(POLICY_NAMES)
    with _progress(names, quiet=as_json) as steps:
        results = [replay_trace(found, name) for name in steps]
    bounded = None
    if capacity is not None:
        bounded = replay_bounded(found, parse_size(capacity), compact=compact)
    _write_pictures(found, results[0], plot, snapshot)
    if as_json:
        typer.echo(json.dumps(_replay_json(found, results, bounded)))
    else:
        _print_replays(found, results, bounded)
    if bounded is not None and not bounded.fits:
        raise typer.Exit(1)


@app.command()
def advise(
    trace: Trace,
    capacity: Annotated[
        str | None, typer.Option(help="Judge a pool of this size, e.g. 8GiB.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(help="Factor by which the recommended pool exceeds the smallest.")
    ] = 1.1,
    plot: Plot = None,
    device: Device = 0,
    as_json: AsJson = False,
) -> None:
    """Show how large a pool must be, whether CAPACITY is enough, and what fragments the pool."""
    from tensorforge.memory.traces.bundled_traces import open_trace
    from tensorforge.memory.traces.pool_advice import advise_pool
    from tensorforge.memory.traces.replay import replay_trace

    found = open_trace(trace, device=device)
    advice = advise_pool(
        found, capacity=parse_size(capacity) if capacity is not None else None, headroom=headroom
    )
    if plot is not None:
        _write_pictures(found, replay_trace(found, "best-fit"), plot, None)
    if as_json:
        facts = asdict(advice)
        facts["oom_seconds"] = advice.oom_seconds if math.isfinite(advice.oom_seconds) else None
        typer.echo(json.dumps(facts))
    else:
        _print_advice(advice)
    if not advice.fits:
        raise typer.Exit(1)


def _run_script(script: Path, arguments: list[str]) -> int | None:
    """Run a program as `python script arguments` would and return its exit status."""
    saved_argv, saved_path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stopped:
        if stopped.code is None or isinstance(stopped.code, int):
            return stopped.code
        typer.echo(stopped.code, err=True)
        return 1
    except TensorForgeError:
        raise
    except Exception as error:  # noqa: BLE001  the program failed; its recording is kept
        typer.secho(f"{script} failed: {type(error).__name__}: {error}", err=True, fg="red")
        return 1
    finally:
        sys.argv, sys.path[:] = saved_argv, saved_path
    return 0


def _progress(names: list[str], *, quiet: bool) -> Any:
    hidden = quiet or not sys.stderr.isatty()
    return typer.progressbar(names, label="replaying", file=sys.stderr, hidden=hidden)


def _write_pictures(
    trace: AllocationTrace, result: Replay, plot: Path | None, snapshot: Path | None
) -> None:
    for path in (plot, snapshot):
        if path is not None and not path.parent.is_dir():
            raise NotFoundError(f"there is no folder {path.parent} for {path.name}")
    if plot is not None:
        from tensorforge.memory.traces.plots import save_plot

        save_plot(trace, result, plot)
    if snapshot is not None:
        from tensorforge.memory.traces.torch_snapshot import save_snapshot, snapshot_of_replay

        save_snapshot(snapshot_of_replay(trace, result), snapshot)


def _trace_facts(trace: AllocationTrace) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "events": len(trace),
        "allocations": trace.allocations,
        "peak_live": trace.peak_live,
        "seconds": trace.duration,
    }


def _replay_json(
    trace: AllocationTrace, results: list[Replay], bounded: BoundedReplay | None
) -> dict[str, Any]:
    facts = _trace_facts(trace)
    facts["policies"] = {
        result.policy: {"peak_reserved": result.peak_reserved, "overhead": result.overhead}
        for result in results
    }
    if bounded is not None:
        facts["bounded"] = asdict(bounded) | {"fits": bounded.fits}
    return facts


def _print_replays(
    trace: AllocationTrace, results: list[Replay], bounded: BoundedReplay | None
) -> None:
    typer.echo(
        f"{trace.name}: {trace.allocations} allocations, at most {show_size(trace.peak_live)} in use"
    )
    for result in results:
        needed = show_size(result.peak_reserved)
        typer.echo(
            f"  {result.policy:14} {needed:>12}  {result.overhead:6.3f} times the bytes in use"
        )
    if bounded is None:
        return
    moved = f", {show_size(bounded.moved_bytes)} moved" if bounded.compactions else ""
    if bounded.fits:
        typer.echo(
            f"fits into {show_size(bounded.capacity)} ({bounded.compactions} compactions{moved})"
        )
    else:
        typer.secho(f"does not fit: event {bounded.failed_at}: {bounded.reason}", fg="red")


def _print_advice(advice: Advice) -> None:
    median, high, peak = (f"{share:.0%}" for share in advice.pressure)
    rows = [
        ("in use at most", show_size(advice.peak_live)),
        ("smallest pool, best fit", show_size(advice.smallest_pool)),
        ("  with compaction", show_size(advice.smallest_with_compaction)),
        ("  planned ahead", show_size(advice.smallest_planned)),
        ("recommended pool", show_size(advice.recommended_pool)),
        ("pool judged", f"{show_size(advice.capacity)}: {'fits' if advice.fits else 'too small'}"),
        ("pressure", f"median {median}, 95 % {high}, peak {peak}"),
        ("growth", f"{show_size(advice.growth_per_second)}/s"),
        ("out of memory in", _show_seconds(advice.oom_seconds)),
        (
            "holes at the worst moment",
            f"{show_size(advice.worst_waste)} at {advice.worst_time:.2f} s",
        ),
    ]
    typer.echo(advice.trace)
    for name, value in rows:
        typer.echo(f"  {name:26} {value}")
    if advice.first_failure is not None:
        typer.secho(f"  first failure: {advice.first_failure}", fg="red")
    if advice.culprits:
        typer.echo("  holes lie above blocks of:")
    for culprit in advice.culprits:
        holes, own = show_size(culprit.hole_bytes), show_size(culprit.block_bytes)
        typer.echo(f"    {holes:>10} above {culprit.blocks} blocks ({own}) of {culprit.label}")


def _show_seconds(seconds: float) -> str:
    return "never, at this rate" if math.isinf(seconds) else f"{seconds:.0f} s"

"""Checks the demo's claims against the logs of the two runs, and shows them as text, picture and page."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorforge.cluster.ended_runs import EXIT_COMPLETE, EXIT_UNFINISHED
from tensorforge.dashboard.charts import Mark, line_chart, steps_of
from tensorforge.dashboard.page_renderer import PageRenderer, stylesheet
from tensorforge.elastic.protocol.rescale_record import RescalePhase
from tensorforge.launch.chaos import invariants

Line = dict[str, Any]
_COLOURS = {"red": 31, "green": 32, "blue": 34}
CAPTION = (
    "Milliseconds by the coordinator's clock, from the first evidence on. "
    "A frozen worker gives none until it has been silent for 1.5 s (--heartbeat-timeout)."
)
TEXT = (
    "A small transformer was trained twice: on three workers while they and their coordinator were killed, "
    "frozen, sent away and replaced, and undisturbed in one process."
)
_PHASES = tuple(phase.label for phase in RescalePhase)


def paint(text: str, colour: str) -> str:
    """Coloured on a terminal, plain elsewhere."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if sys.stdout.isatty() else text


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known about the two trainings: the workers' logs, and the disturbances."""

    steps: int
    codes: tuple[int, int]
    storm: list[Line]
    alone: list[Line]
    disturbances: list[tuple[int, str]]
    rescales: list[Line]
    exits: dict[str, int]
    facts: dict[str, Any]

    def finals(self) -> dict[str, Line]:
        """The last log line of each worker that ended by itself."""
        return {line["worker"]: line for line in self.storm if line["kind"] == "final"}

    def end_alone(self) -> Line:
        """The last log line of the undisturbed run."""
        return next((line for line in self.alone if line["kind"] == "final"), {})


@dataclass(frozen=True)
class Claim:
    text: str
    holds: bool
    detail: str = ""


def losses(lines: list[Line]) -> dict[int, float]:
    """Step → loss."""
    return {e["step"]: e["metrics"]["loss"] for e in lines if e["kind"] == "commit"}


def check(evidence: Evidence) -> list[Claim]:
    """Every claim, each from the evidence alone."""
    finals, alone = evidence.finals(), evidence.end_alone()
    complete = {name: f for name, f in finals.items() if f["outcome"] == "complete"}
    names = ", ".join(sorted(complete)) or "nobody"
    stormy, calm = losses(evidence.storm), losses(evidence.alone)
    once = invariants.steps_are_committed_once(evidence.storm)
    proofs = sorted({f["proof"] for f in complete.values()})
    return [
        Claim("both trainings ended with success", evidence.codes == (0, 0)),
        *_happened(evidence, finals),
        Claim(
            "the weights are the undisturbed run's, bit for bit",
            bool(complete) and {f["digest"] for f in complete.values()} == {alone.get("digest")},
            f"{names} and the undisturbed run: digest {alone.get('digest', 'missing')}",
        ),
        Claim(
            f"all {evidence.steps} losses are equal, bit for bit",
            sorted(calm) == list(range(evidence.steps)) and stormy == calm,
            f"{calm[0]:.4f} at the first step, {calm[max(calm)]:.4f} at the last" if calm else "",
        ),
        Claim(
            "no step was lost, none was committed twice",
            once.holds and sorted(stormy) == list(range(evidence.steps)),
            once.detail,
        ),
        Claim(
            "each sample came exactly once",
            bool(proofs) and proofs == [alone.get("proof")],
            "; ".join(proofs),
        ),
    ]


def _happened(evidence: Evidence, finals: dict[str, Line]) -> list[Claim]:
    """Claims that each disturbance happened and ended no other process."""
    exits, facts = evidence.exits, evidence.facts
    killed = sorted(
        name for name, code in exits.items() if code not in (EXIT_COMPLETE, EXIT_UNFINISHED)
    )
    left = sorted(name for name, final in finals.items() if final["outcome"] == "left")
    first, last = facts.get("coordinator killed at"), facts.get("coordinator back at")
    without = (
        [e["step"] for e in evidence.storm if e["kind"] == "commit" and first < e["time"] < last]
        if first and last
        else []
    )
    span = f"steps {min(without)} to {max(without)}" if without else "no step"
    return [
        Claim(
            "one worker was killed, and nobody else's process ended by it",
            killed == ["worker-1"] and exits["worker-1"] == -9,
            f"exit codes: {', '.join(f'{n} {c}' for n, c in sorted(exits.items()))}",
        ),
        Claim(
            "the worker that was asked to leave did so with exit code 75, which says that training goes on",
            left == ["worker-0"] and exits.get("worker-0") == EXIT_UNFINISHED,
        ),
        Claim(
            "the frozen worker came back and was brought up to date",
            facts.get("came back") == "worker-2"
            and finals.get("worker-2", {}).get("outcome") == "complete",
        ),
        Claim("training went on without the coordinator", bool(without), span),
    ]


def print_report(evidence: Evidence, claims: list[Claim]) -> None:
    """Print the rescales and the claims."""
    print(f"3. The rescales\n   {CAPTION}\n")
    rows = timeline(evidence)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print(
            "   " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        )
    print("\n4. The proof\n")
    for claim in claims:
        mark = paint("ok    ", "green") if claim.holds else paint("FAILED", "red")
        print(f"   {mark} {claim.text}{': ' + claim.detail if claim.detail else ''}")


def timeline(evidence: Evidence) -> list[list[str]]:
    """One row per rescale."""
    rows = [["generation", "workers", *_PHASES, "total", "why"]]
    for event in evidence.rescales:
        phases = event["phases"]
        cells = [f"{phases[name]:.0f}" if name in phases else "-" for name in _PHASES]
        total = f"{sum(phases.values()):.0f}"
        size = str(event["size"] or len(event["members"]))
        rows.append([str(event["generation"]), size, *cells, total, event["reason"]])
    return rows


def draw(evidence: Evidence) -> bytes:
    """A picture of the loss and the number of workers over the steps, with the disturbances marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    stormy, calm = losses(evidence.storm), losses(evidence.alone)
    workers = {e["step"]: e["workers"] for e in evidence.storm if e["kind"] == "commit"}
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(11, 6.5), sharex=True, height_ratios=[4, 1], layout="constrained"
    )
    above.plot(*_points(calm), color="#f0b64c", linewidth=5, label="undisturbed, one process")
    above.plot(*_points(stormy), color="#1f5fa8", linewidth=1.3, label="in the storm")
    above.set_ylabel("loss")
    above.set_title("Two trainings, one curve: the cluster changed, the numbers did not")
    above.legend(loc="lower left")
    top = max([*stormy.values(), 1.0])
    for step, text in evidence.disturbances:
        for axis in (above, below):
            axis.axvline(step, color="#c0392b", linewidth=0.9, alpha=0.6)
        place = {"rotation": 90, "fontsize": 8, "ha": "right", "va": "top", "color": "#c0392b"}
        above.annotate(text, (step, top), **place)
    below.step(*_points(workers), where="post", color="#2e7d32")
    below.fill_between(*_points(workers), step="post", color="#2e7d32", alpha=0.2)
    below.set_ylabel("workers")
    below.set_xlabel("step")
    below.set_ylim(0, max([*workers.values(), 1]) + 0.5)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    plt.close(figure)
    return picture.getvalue()


def _points(series: dict[int, Any]) -> tuple[list[int], list[Any]]:
    steps = sorted(series)
    return steps, [series[step] for step in steps]


def save(folder: Path, evidence: Evidence, claims: list[Claim]) -> None:
    """Write the picture, and a page that needs no other file, made by the dashboard's templates."""
    folder.mkdir(exist_ok=True)
    (folder / "loss.png").write_bytes(draw(evidence))
    page = PageRenderer().render(
        "static_report.html",
        title="TensorForge demo",
        heading="The same model, whatever happened",
        text=TEXT,
        style=stylesheet(),
        holds=all(claim.holds for claim in claims),
        charts=_charts(evidence),
        claims=claims,
        caption=CAPTION,
        rows=timeline(evidence),
    )
    (folder / "demo.html").write_text(page, encoding="utf-8")


def _charts(evidence: Evidence) -> list[str]:
    """The two losses in one plot, and the workers with the disturbances as marks."""
    stormy, calm = (sorted(losses(lines).items()) for lines in (evidence.storm, evidence.alone))
    workers = {e["step"]: e["workers"] for e in evidence.storm if e["kind"] == "commit"}
    marks = [
        Mark(step, f"Step {step}: {text}", f"disturbance-{number}")
        for number, (step, text) in enumerate(evidence.disturbances)
    ]
    return [
        line_chart("Loss in the storm (line) and undisturbed (dashed)", stormy, second=calm),
        line_chart(
            "Workers, with the disturbances marked",
            steps_of(sorted(workers.items())),
            marks=marks,
            is_area=True,
        ),
    ]

"""The main job: a transformer trained while its cluster is torn apart, and the proof that nothing was lost.

Three workers train a character-level transformer. One is killed, one leaves, others join, one is frozen,
and the coordinator is killed. Then the same training runs undisturbed in one process, and every bit is
compared. Pictures and tables are saved in `demo-output/`. The exit code is 0 only if every claim holds.
"""

from __future__ import annotations

import base64
import html
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import char_transformer
from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.testing.cluster import LocalCluster
from tensorforge.testing.storms import check_history

STEPS = 200
OUTPUT = Path("demo-output")
CONFIG = ElasticTrainingConfig(
    stability_window_ms=200,
    worker_heartbeat_timeout_ms=1500,
    rescale_timeout_ms=30_000,
    failure_tolerance_percentage=50,
)


class Story:
    """The storm, step by step, told as it happens."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._started = time.monotonic()
        self.blows: list[tuple[int, str]] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)

    def blow(self, after_step: int, text: str, action: Callable[[], None]) -> None:
        """Wait for a step, telling of the progress, then strike."""
        while (step := self._cluster.committed_step()) < after_step and self._cluster.living():
            self._cluster.wait_for_step(min(after_step, step + 20), timeout=90)
            self._progress()
        self.blows.append((self._cluster.committed_step(), text))
        self.say(f"step {self._cluster.committed_step():3}  >>> {text}")
        action()

    def _progress(self) -> None:
        commits = [event for event in self._cluster.events() if event["kind"] == "commit"]
        if commits:
            newest = max(commits, key=lambda event: event["step"])
            loss, workers = newest["metrics"]["loss"], newest["workers"]
            bar = "#" * round(loss * 10)
            self.say(f"step {newest['step']:3}  {workers} workers  loss {loss:6.4f}  {bar}")

    def tell(self) -> None:
        """The whole script."""
        cluster = self._cluster
        self.say("three workers start: anna, ben, cleo")
        for name in ("anna", "ben", "cleo"):
            cluster.start_worker(name)
        self.blow(20, "kill -9 ben", lambda: cluster.kill("ben"))
        self.blow(40, "dora joins", lambda: cluster.start_worker("dora"))
        self.blow(65, "anna leaves gracefully (SIGTERM)", lambda: cluster.ask_to_leave("anna"))
        self.blow(85, "emil joins", lambda: cluster.start_worker("emil"))
        self.blow(110, "cleo is frozen (SIGSTOP)", lambda: cluster.freeze("cleo"))
        self.blow(135, "cleo is thawed (SIGCONT) and comes back", lambda: cluster.thaw("cleo"))
        self.blow(150, "kill -9 the coordinator", cluster.kill_coordinator)
        self.blow(165, "a new coordinator starts", cluster.start_coordinator)
        self.blow(STEPS - 1, "the last step is committed", lambda: None)
        cluster.wait_for_end(timeout=60)


def work(steps: int) -> None:
    char_transformer.train(steps)


class Claims:
    """What the demo claims, each checked."""

    def __init__(self) -> None:
        self.results: list[tuple[str, bool, str]] = []

    def check(self, claim: str, holds: bool, detail: str = "") -> None:
        self.results.append((claim, holds, detail))
        mark = "ok    " if holds else "FAILED"
        print(f"  {mark} {claim}{': ' + detail if detail else ''}", flush=True)

    @property
    def all_hold(self) -> bool:
        return all(holds for _, holds, _ in self.results)


def check_claims(
    events: list[dict[str, Any]], finals: dict[str, Any], blows: list[tuple[int, str]], alone: Any
) -> Claims:
    claims = Claims()
    losses = {e["step"]: e["metrics"]["loss"] for e in events if e["kind"] == "commit"}
    run, alone_losses = alone
    complete = {name: f for name, f in finals.items() if f["outcome"] == "complete"}
    claims.check(
        "every worker that was there at the end has the weights of the undisturbed run",
        bool(complete) and {f["digest"] for f in complete.values()} == {run.digest()},
        f"{', '.join(sorted(complete)) or 'nobody'}; digest {run.digest()}",
    )
    claims.check(
        f"all {STEPS} losses are equal, bit for bit",
        [losses.get(step) for step in range(STEPS)] == alone_losses,
    )
    try:
        check_history(events, STEPS)
        problem = ""
    except Exception as error:  # noqa: BLE001  the claim fails with whatever it was
        problem = str(error)
    claims.check("no step was lost, none was committed twice", not problem, problem)
    proofs = {f["proof"] for f in complete.values()}
    claims.check(
        "each sample came exactly once",
        proofs == {run.state.require_exactly_once()},
        "; ".join(proofs),
    )
    killed = next(step for step, text in blows if "kill -9 the coordinator" in text)
    back = next(step for step, text in blows if "new coordinator" in text)
    claims.check(
        "training went on without the coordinator", back > killed, f"steps {killed} to {back}"
    )
    left = [name for name, f in finals.items() if f["outcome"] == "left"]
    claims.check("the worker that was asked to leave did so in peace", left == ["anna"])
    return claims


def timeline(rescales: list[Any]) -> list[list[str]]:
    rows = [["generation", "workers", "detect", "decide", "stop", "form", "1st commit", "why"]]
    for record in rescales:
        figures = (
            record.detection_ms,
            record.decision_ms,
            record.barrier_ms,
            record.forming_ms,
            record.first_commit_ms,
        )
        cells = ["-" if figure is None else f"{figure:.0f} ms" for figure in figures]
        size = f"{record.old_size}->{record.new_size}"
        rows.append([str(record.generation), size, *cells, record.reason])
    return rows


def draw(events: list[dict[str, Any]], blows: list[tuple[int, str]]) -> bytes:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    commits = sorted((e for e in events if e["kind"] == "commit"), key=lambda e: e["step"])
    steps, losses = [e["step"] for e in commits], [e["metrics"]["loss"] for e in commits]
    workers = [e["workers"] for e in commits]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(11, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    above.plot(steps, losses, color="#1f5fa8", linewidth=1.4)
    above.set_ylabel("loss")
    above.set_title("One model, one curve: the cluster changed, the numbers did not")
    for step, text in blows[:-1]:
        for axis in (above, below):
            axis.axvline(step, color="#c0392b", linewidth=0.8, alpha=0.6)
        above.annotate(
            text,
            (step, max(losses)),
            rotation=90,
            fontsize=7,
            ha="right",
            va="top",
            color="#c0392b",
        )
    below.step(steps, workers, where="post", color="#2e7d32")
    below.set_ylabel("workers")
    below.set_xlabel("step")
    below.set_ylim(0, max(workers) + 1)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    plt.close(figure)
    return picture.getvalue()


def save(picture: bytes, rows: list[list[str]], claims: Claims) -> None:
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / "loss.png").write_bytes(picture)
    image = base64.b64encode(picture).decode()

    def table(lines: list[list[str]]) -> str:
        def cells(line: list[str], tag: str) -> str:
            return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)

        body = "".join(f"<tr>{cells(line, 'td')}</tr>" for line in lines[1:])
        return f"<table><tr>{cells(lines[0], 'th')}</tr>{body}</table>"

    proof = [["claim", "holds", "detail"]]
    proof += [[claim, "yes" if holds else "NO", detail] for claim, holds, detail in claims.results]
    style = "body{font:15px sans-serif;max-width:70em;margin:2em auto}td,th{padding:.2em .7em;text-align:left}"
    page = (
        f"<!doctype html><meta charset=utf-8><title>TensorForge demo</title><style>{style}</style>"
        f"<h1>The same model, whatever happened</h1><img src='data:image/png;base64,{image}' width=100%>"
        f"<h2>Claims</h2>{table(proof)}<h2>Rescales</h2>{table(rows)}"
    )
    (OUTPUT / "demo.html").write_text(page, encoding="utf-8")


def main() -> int:
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="tensorforge-demo-"))
    try:
        print(f"A storm: {STEPS} steps, and what happens on the way\n")
        with LocalCluster(work, (STEPS,), folder, config=CONFIG, desired_workers=3) as cluster:
            story = Story(cluster)
            story.tell()
            with CoordinatorClient(cluster.address) as client:
                rescales = client.status().rescales
            events, finals = cluster.events(), cluster.finals()
        print("\nThe same training, undisturbed, in one process")
        losses: list[float] = []
        with char_transformer.make_run(STEPS) as run:
            for step in run.steps(total=STEPS):
                for x, y in step.batches():
                    logits = run.model(x)
                    step.backward(
                        char_transformer.F.cross_entropy(logits.flatten(0, 1), y.flatten())
                    )
                step.commit()
                losses.append(step.metrics["loss"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"  loss {losses[0]:.4f} -> {losses[-1]:.4f}\n\nThe proof")
    claims = check_claims(events, finals, story.blows, (run, losses))
    rows = timeline(rescales)
    print("\nRescales, by the coordinator's clock")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    save(draw(events, story.blows), rows, claims)
    print(f"\n{OUTPUT / 'loss.png'} and {OUTPUT / 'demo.html'} are saved")
    print(
        f"{'All claims hold' if claims.all_hold else 'A CLAIM FAILED'}; {time.monotonic() - started:.0f} s"
    )
    return 0 if claims.all_hold else 1


if __name__ == "__main__":
    sys.exit(main())

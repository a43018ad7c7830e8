"""Stop a run in the middle of an epoch and go on at another size: the weights come out the same.

python examples/resume_elsewhere.py

Runs the character transformer three ways: straight through in one process; a first part on three workers,
stopped; and the rest on two workers, from the checkpoint. Then compares.
"""

import sys
import tempfile
from pathlib import Path

import char_transformer
from tensorforge.testing.cluster import LocalCluster

FIRST, TOTAL = 25, 50


def work(until: int, checkpoints: Path) -> None:
    """Train up to a step; the schedule is that of the whole."""
    with char_transformer.make_run(TOTAL, checkpoints) as run:
        for step in run.steps(total=until):
            for x, y in step.batches():
                logits = run.model(x)
                step.backward(char_transformer.F.cross_entropy(logits.flatten(0, 1), y.flatten()))
            step.commit()


def part(folder: Path, until: int, workers: int) -> set[str]:
    """Train on so many workers; the digests that they end with."""
    arguments = (until, folder / "checkpoints")
    name = folder / f"{workers}-workers"
    with LocalCluster(work, arguments, name, desired_workers=workers) as cluster:
        for number in range(workers):
            cluster.start_worker(f"worker{number}")
        cluster.wait_for_end(timeout=120)
        steps = sorted({e["step"] for e in cluster.events() if e["kind"] == "commit"})
        print(f"{workers} workers: steps {steps[0]} to {steps[-1]}", flush=True)
        return {final["digest"] for final in cluster.finals().values()}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        part(Path(folder), FIRST, 3)
        resumed = part(Path(folder), TOTAL, 2)
    straight = char_transformer.train(TOTAL).digest()
    print(f"straight through: {straight}\nstopped and resumed: {', '.join(resumed)}")
    return 0 if resumed == {straight} else 1


if __name__ == "__main__":
    sys.exit(main())

"""Makes the screenshots in docs/ from a real run: trains, kills a worker, and photographs the dashboard.

python tools/dashboard_screenshots.py [--runs FOLDER]

With --runs, the runs in that folder are photographed and nothing is trained. Needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tensorforge.launch.run_directory import read_record

ROOT = Path(__file__).parents[1]
TENSORFORGE = [sys.executable, "-m", "tensorforge"]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
STEPS = 240
KILL_AT = 80


def train(folder: Path) -> None:
    """Train the example on three workers and kill one of them on the way."""
    run = folder / "transformer"
    options = ["--json", "--workers", "3", "--stability-window", "0.2", "--run-dir", str(run)]
    script = [str(ROOT / "examples" / "char_transformer.py"), "--steps", str(STEPS)]
    command = [*TENSORFORGE, "run", *options, *script, "--checkpoints", str(run / "checkpoints")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:  # noqa: S603
        for line in launcher.stdout or ():
            event = json.loads(line)
            if event["event"] == "step_committed" and event["step"] == KILL_AT:
                os.kill(read_record(run).workers["worker-1"].pid, signal.SIGKILL)


def photograph(page: Page, url: str, path: str, name: str) -> None:
    """Save one page as docs/dashboard-NAME.png."""
    page.goto(url + path)
    page.wait_for_selector("h1")
    page.screenshot(path=ROOT / "docs" / f"dashboard-{name}.png", full_page=True)


def main() -> None:
    """Make all screenshots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path)
    given = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        runs = given or Path(folder)
        if given is None:
            train(runs)
        command = [*TENSORFORGE, "dashboard", str(runs), "--port", "0", "--json"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
        try:
            facts = json.loads((server.stdout or sys.stdin).readline())
            time.sleep(3)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path="/usr/bin/chromium", args=FLAGS
                )
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                page.goto(f"{facts['url']}/sign-in#{facts['read_token']}")
                page.wait_for_url("**/runs")
                for path, name in (
                    ("/runs/transformer", "run"),
                    ("/runs/transformer/checkpoints", "checkpoints"),
                    ("/memory/gpt2", "memory"),
                ):
                    photograph(page, facts["url"], path, name)
                browser.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()

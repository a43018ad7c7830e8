"""A real Chromium, a real dashboard, and the accessibility check for the browser tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PROJECT = Path(__file__).parents[2]
AXE = PROJECT / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
WAIT = 60_000
"""Milliseconds that a condition may take on a busy machine."""


def pytest_collection_modifyitems(items):
    """Skip loudly where there is no Chromium."""
    here = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    for item in here:
        item.add_marker(pytest.mark.timeout(300))
        if not Path(CHROMIUM).exists():
            why = "NO CHROMIUM: the dashboard was NOT tested in a browser; apt-get install chromium"
            item.add_marker(pytest.mark.skip(reason=why))


@dataclass
class Dashboard:
    url: str
    read: str
    operate: str
    pid: int


@contextlib.contextmanager
def served(runs: Path, *options: str, port: int = 0):
    """A real `tensorforge dashboard` in a process of its own."""
    command = [sys.executable, "-m", "tensorforge", "dashboard", str(runs), "--allow-changes"]
    process = subprocess.Popen(
        [*command, "--json", "--port", str(port), *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        facts = json.loads(process.stdout.readline())
        _wait_until_it_answers(facts["url"], process)
        yield Dashboard(facts["url"], facts["read_token"], facts["operate_token"], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _wait_until_it_answers(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(f"{url}/static/dashboard.css", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise AssertionError("the dashboard did not answer within a minute")


class Browser:
    """Pages in one Chromium; every page notes what scripts printed and which errors came."""

    def __init__(self, chromium) -> None:
        self._chromium = chromium
        self.problems: list[str] = []

    def page(self, **options):
        page = self._chromium.new_context(**options).new_page()
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"a dialog: {dialog.message}"))
        return page

    def signed_in(self, url: str, token: str, **options):
        page = self.page(**options)
        page.goto(f"{url}/sign-in#{token}")
        page.wait_for_url(lambda address: "sign-in" not in address)
        return page


@pytest.fixture
def browser(tmp_path):
    from playwright.sync_api import sync_playwright

    # A profile of its own, in a folder that is removed with the test's.
    home = tmp_path / "home"
    home.mkdir()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, env={**os.environ, "HOME": str(home)}
        )
        opened = Browser(chromium)
        yield opened
        chromium.close()
    assert opened.problems == []


def serious_findings(page) -> list[str]:
    """What axe-core finds serious or critical on the page; skips loudly where axe-core is missing."""
    if not AXE.exists():
        pytest.skip("NO AXE-CORE: accessibility was NOT checked; make browser installs it")
    # Evaluated by the debugger, so the page's own policy stays as strict as it is.
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations")
    return [
        f"{page.url}: {one['id']}: {one['nodes'][0]['html']}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]

"""The dashboard in a real Chromium: live runs, changes of models, hostile names, restarts, accessibility."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.browser.conftest import WAIT, serious_findings, served

from tensorforge.dashboard.dashboard_server import free_port
from tensorforge.launch.run_directory import read_record
from tensorforge.registry import ModelRegistry
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.models import Lineage, ModelMetadata, Sla, ValidationResult
from tensorforge.registry.domain.versions import ModelVersion

TOY = Path(__file__).parents[1] / "integration" / "toy_train.py"
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
OLD, NEW = ModelVersion(1, 0, 0), ModelVersion(1, 1, 0)

pytestmark = pytest.mark.may_leak("threads", "the browser's driver ends its thread a little later")


@contextmanager
def training(folder: Path):
    """A run of two workers that trains until the block ends."""
    stop = folder.parent / "stop"
    command = [
        sys.executable,
        "-m",
        "tensorforge",
        "run",
        "--json",
        "--run-dir",
        str(folder),
        "-n",
        "2",
    ]
    timing = ["--stability-window", "0.05", "--heartbeat-timeout", "3"]
    process = subprocess.Popen(
        [*command, *timing, str(TOY), "--until", str(stop), "--seconds", "0.05"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "generation_formed" and event["size"] == 2:
                break
        yield process
    finally:
        stop.touch()
        process.communicate(timeout=60)


def test_a_killed_worker_is_seen_with_its_reason_without_a_reload(tmp_path, browser):
    runs = tmp_path / "runs"
    runs.mkdir()
    with training(runs / "live"), served(runs) as dashboard:
        page = browser.signed_in(dashboard.url, dashboard.read)
        page.get_by_role("link", name="live", exact=True).click()
        page.wait_for_selector("body[data-connection=live]")
        page.evaluate("window.notReloaded = true")
        page.wait_for_selector("#run-workers >> text=worker-1")
        os.kill(read_record(runs / "live").workers["worker-1"].pid, signal.SIGKILL)
        killed = time.monotonic()
        page.wait_for_selector("#run-rescales >> text=worker-1 failed", timeout=WAIT)
        print(
            f"the page showed the rescale {time.monotonic() - killed:.2f} s after the kill (aim: 2 s)"
        )
        assert page.evaluate("window.notReloaded") is True
        assert serious_findings(page) == []


def test_an_operator_scales_and_reads_a_stack_in_a_growing_log(tmp_path, browser):
    runs = tmp_path / "runs"
    runs.mkdir()
    with training(runs / "live"), served(runs) as dashboard:
        page = browser.signed_in(dashboard.url, dashboard.operate)
        page.goto(f"{dashboard.url}/runs/live")
        scale = page.locator("form[action$='/scale']")
        scale.locator("input[name=workers]").fill("3")
        scale.get_by_role("checkbox").check()
        scale.get_by_role("button").click()
        page.wait_for_selector("text=Done: asked for 3 workers")
        page.wait_for_selector("#run-workers >> text=worker-2")
        stacks = page.locator("form[action$='/stacks']")
        stacks.locator("input[name=worker]").fill("worker-0")
        stacks.get_by_role("button").click()
        page.wait_for_selector("#log >> text=most recent call first")


def test_the_page_reconnects_after_the_server_restarts(tmp_path, browser):
    folder, port = tmp_path / "runs" / "grows", free_port()
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "metrics": {"loss": 3.0}}) + "\n")
    with served(folder.parent, port=port) as dashboard:
        page = browser.signed_in(dashboard.url, dashboard.read)
        page.goto(f"{dashboard.url}/runs/grows")
        page.wait_for_selector("body[data-connection=live]")
        page.evaluate("window.notReloaded = true")
    page.wait_for_selector("body[data-connection^=reconnecting]")
    with metrics.open("a") as file:
        file.write(json.dumps({"step": 4321, "metrics": {"loss": 2.0}}) + "\n")
    with served(folder.parent, port=port):
        page.wait_for_selector("#run-state >> text=4,321")
        assert page.evaluate("window.notReloaded") is True
        page.close()


def make_registry(path: Path, text: str = "plain") -> None:
    with ModelRegistry(path) as registry:
        for version in (OLD, NEW):
            registry.register(
                ModelMetadata(
                    model_id="vision",
                    name=text,
                    version=version,
                    framework=text,
                    input_shape=(1,),
                    output_shape=(1,),
                    size_bytes=1,
                    checksum="0" * 64,
                    registered_at=datetime.now(UTC),
                    tags={"owner": text},
                    description=text,
                    source=text,
                    lineage=Lineage(run_id=text, step=3, checkpoint_id=text),
                )
            )
        registry.set_sla("vision", Sla(max_latency_ms=10, min_accuracy=0.9))
        registry.describe_model("vision", text)
        registry.set_tags("vision", put={"team": text})
        promote(registry, OLD, text)


def promote(registry: ModelRegistry, version: ModelVersion, text: str) -> None:
    for state in (
        DeploymentState.VALIDATING,
        DeploymentState.STAGING,
        DeploymentState.CANARY,
        DeploymentState.PRODUCTION,
    ):
        record(registry, version, text)
        registry.transition_state("vision", version, state, reason=text)


def record(registry: ModelRegistry, version: ModelVersion, text: str = "") -> None:
    registry.record_validation(
        ValidationResult(
            model_id="vision",
            version=version,
            passed=True,
            latency_p50_ms=2.0,
            latency_p99_ms=8.0,
            accuracy_score=0.95,
            errors=(text,) if text else (),
        )
    )


def transition(page, state: str) -> None:
    form = page.locator(f"form:has(#to-{state})")
    form.get_by_label("Reason").fill("because")
    form.get_by_label(f"Yes, 1.1.0 to {state}").check()
    form.get_by_role("button").click()


def test_a_version_is_promoted_refused_without_evidence_and_rolled_back(tmp_path, browser):
    database = tmp_path / "registry.db"
    make_registry(database)
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs", "--registry", str(database)) as dashboard:
        page = browser.signed_in(dashboard.url, dashboard.operate)
        version = f"{dashboard.url}/models/vision/versions/1.1.0"
        page.goto(version)
        transition(page, "validating")
        page.wait_for_selector("text=Done: 1.1.0 is in validating now")
        transition(page, "staging")
        page.wait_for_selector("h1 >> text=Refused")
        with ModelRegistry(database) as registry:
            record(registry, NEW)
        for state in ("staging", "canary"):
            page.goto(version)
            transition(page, state)
            page.wait_for_selector(f"text=Done: 1.1.0 is in {state} now")
        with ModelRegistry(database) as registry:
            record(registry, NEW)
        page.goto(version)
        transition(page, "production")
        page.wait_for_selector("text=Done: 1.1.0 is in production now")
        page.goto(f"{dashboard.url}/models/vision")
        form = page.locator("form[action$='/rollback']")
        form.get_by_label("Reason").fill("it is slow")
        form.get_by_role("checkbox").check()
        form.get_by_role("button").click()
        page.wait_for_selector("text=Done: 1.0.0 serves instead of 1.1.0")
        page.wait_for_selector("text=it is slow")


def hostile_run(folder: Path) -> None:
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "worker-0.log").write_text(f"{HOSTILE}\n" * 3)
    line = {"step": 1, "time": time.time(), "world_size": 1, "metrics": {"loss": 1.0, HOSTILE: 2.0}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_hostile_names_do_nothing_and_each_page_is_accessible(tmp_path, browser):
    runs, name = tmp_path / "runs", "<script>document.title='taken'<script>"
    hostile_run(runs / name)
    database = tmp_path / "registry.db"
    make_registry(database, HOSTILE)
    with served(runs, "--registry", str(database)) as dashboard:
        page = browser.signed_in(dashboard.url, dashboard.operate)
        page.get_by_role("link", name=name).click()
        page.wait_for_selector("body[data-connection=live]")
        paths = [
            page.url,
            f"{page.url}/logs/worker-0",
            f"{page.url}/checkpoints",
            f"{dashboard.url}/runs",
        ]
        paths += [f"{dashboard.url}/{path}" for path in (
            "models", "models/vision", "models/vision/versions/1.0.0", "memory",
            "models/vision/compare?before=1.0.0&after=1.1.0", "models/none", "sign-in", "memory/resnet",
        )]  # fmt: skip
        found = []
        for path in paths:
            page.goto(path)
            page.wait_for_selector("h1")
            assert page.title() != "taken"
            assert page.evaluate("document.querySelectorAll('main script, main img').length") == 0
            found += serious_findings(page)
        assert found == []


def test_a_narrow_and_a_wide_screen_need_no_scrolling_sideways(tmp_path, browser):
    runs = tmp_path / "runs"
    hostile_run(runs / "narrow")
    with served(runs) as dashboard:
        for width in (360, 3840):
            size = {"width": width, "height": 800}
            page = browser.signed_in(dashboard.url, dashboard.operate, viewport=size)
            for path in ("/runs", "/runs/narrow", "/memory"):
                page.goto(dashboard.url + path)
                assert page.evaluate("document.documentElement.scrollWidth") <= width

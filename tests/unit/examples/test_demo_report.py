"""The demo's claims fail when the evidence does."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "examples" / "demo_report.py"
STEPS = 6


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("demo_report", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def commit(worker, step, loss=None):
    metrics = {"loss": 4.0 / (step + 1) if loss is None else loss}
    facts = {"epoch": 0, "samples": 8, "metrics": metrics, "workers": 2}
    return {"kind": "commit", "worker": worker, "step": step, "time": 10.0 + step, **facts}


def final(worker, outcome="complete", digest="d1", proof="all of them"):
    facts = {"outcome": outcome, "digest": digest, "proof": proof, "committed_step": STEPS - 1}
    return {"kind": "final", "worker": worker, "time": 99.0, **facts}


@pytest.fixture
def evidence(report):
    storm = [commit(worker, step) for step in range(STEPS) for worker in ("worker-2", "worker-3")]
    ends = [final("worker-2"), final("worker-3"), final("worker-0", "left", "d0", "some of them")]
    return report.Evidence(
        steps=STEPS,
        codes=(0, 0),
        storm=[*storm, *ends],
        alone=[*(commit("alone", step) for step in range(STEPS)), final("alone")],
        disturbances=[(1, "kill -9 worker-1")],
        rescales=[
            {
                "generation": 1,
                "size": 2,
                "members": ["worker-2", "worker-3"],
                "reason": "<start>",
                "phases": {"decision": 1.0, "first commit": 2.5},
            }
        ],
        exits={"worker-0": 75, "worker-1": -9, "worker-2": 0, "worker-3": 0},
        facts={
            "came back": "worker-2",
            "coordinator killed at": 12.5,
            "coordinator back at": 14.5,
        },
    )


def failed(report, evidence):
    return [claim.text for claim in report.check(evidence) if not claim.holds]


def test_good_evidence_holds(report, evidence):
    assert failed(report, evidence) == []


def without(lines, **facts):
    return [line for line in lines if not facts.items() <= line.items()]


SABOTAGE = {
    "a failed run": (lambda e: {"codes": (1, 0)}, "both trainings"),
    "other weights": (
        lambda e: {"alone": [*without(e.alone, kind="final"), final("alone", digest="d2")]},
        "the weights are",
    ),
    "one of two has other weights": (
        lambda e: {"storm": [*without(e.storm, worker="worker-3"), final("worker-3", digest="d2")]},
        "the weights are",
    ),
    "another loss in one step": (
        lambda e: {"alone": [*without(e.alone, step=3), commit("alone", 3, loss=1.0000001)]},
        "losses are equal",
    ),
    "a step that nobody committed": (
        lambda e: {"storm": without(e.storm, step=3)},
        "no step was lost",
    ),
    "a step twice": (lambda e: {"storm": [*e.storm, commit("worker-2", 3)]}, "no step was lost"),
    "another ledger": (
        lambda e: {"alone": [*without(e.alone, kind="final"), final("alone", proof="others")]},
        "each sample",
    ),
    "a second death": (lambda e: {"exits": {**e.exits, "worker-3": 1}}, "one worker was killed"),
    "nobody left": (lambda e: {"storm": without(e.storm, outcome="left")}, "asked to leave"),
    "the frozen one stayed away": (lambda e: {"facts": {}}, "the frozen worker"),
    "training stood still": (
        lambda e: {"facts": {**e.facts, "coordinator back at": 12.6}},
        "without the coordinator",
    ),
    "nothing at all": (lambda e: {"storm": [], "alone": [], "exits": {}}, "the weights are"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_found(report, evidence, name):
    change, claim = SABOTAGE[name]
    broken = replace(evidence, **change(evidence))
    assert any(claim in text for text in failed(report, broken))


@pytest.mark.may_leak("descriptors", "matplotlib keeps its fonts open")
def test_the_page_needs_no_other_file_and_escapes_what_it_shows(report, evidence, tmp_path):
    report.save(tmp_path, evidence, report.check(evidence))
    page = (tmp_path / "demo.html").read_text()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("<svg") == 2
    assert " src=" not in page
    assert "<link" not in page
    assert "&lt;start&gt;" in page
    assert "All claims hold." in page
    report.save(tmp_path, evidence, [report.Claim("two is three", False)])
    assert "A claim failed." in (tmp_path / "demo.html").read_text()

"""Whether a job has recovered from a storm."""

from __future__ import annotations

from types import SimpleNamespace

from tensorforge.launch.chaos import strikes
from tensorforge.launch.chaos.strikes import check_job


class Job:
    """Shows one view after the other."""

    folder = None
    generations = (1, 2)

    def __init__(self, *steps):
        self._views = [
            SimpleNamespace(phase="active", ended=None, state=SimpleNamespace(step=step))
            for step in steps
        ]

    @property
    def newest(self):
        return self._views.pop(0) if len(self._views) > 1 else self._views[0]


def survived(monkeypatch, *steps, until_end=False):
    times = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: next(times), sleep=lambda _seconds: None)
    monkeypatch.setattr(strikes, "time", clock)
    return check_job(Job(*steps), settle=20, until_end=until_end, strikes=[]).verdicts[0]


def test_a_job_that_is_active_but_commits_nothing_has_not_recovered(monkeypatch):
    assert not survived(monkeypatch, 7, 7, 7).holds


def test_a_step_proves_that_it_goes_on_even_an_earlier_one(monkeypatch):
    assert survived(monkeypatch, 7, 7, 8).holds
    assert survived(monkeypatch, 7, 7, 7, 0).holds


def test_a_job_that_was_to_end_and_did_not_is_told(monkeypatch):
    verdict = survived(monkeypatch, 7, 7, 8, until_end=True)
    assert verdict.holds
    assert verdict.detail.endswith("but the run has not ended within 20 s")

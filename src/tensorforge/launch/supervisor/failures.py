"""The failures since the last committed step: which one explains the end, and which were shown."""

from __future__ import annotations

from dataclasses import replace

from tensorforge.launch.supervisor.exit_codes import UserFailure
from tensorforge.launch.supervisor.instructions import Outcome


class FailureLog:
    """Exceptions and other deaths of a run's workers.

    If the run ends, the first exception since the last committed step is given as the cause, because later
    failures may be its consequence. Deaths without an exception are kept as text.
    """

    def __init__(self) -> None:
        self._worker: str | None = None
        self._failure: UserFailure | None = None
        self._deaths: list[str] = []
        self._seen: set[tuple[str, str]] = set()
        self._shown: set[tuple[str, str]] = set()

    def step_committed(self) -> None:
        """Forget the failures before this step: the run survived them."""
        self._worker = self._failure = None
        self._deaths.clear()

    def add_exception(self, worker: str, failure: UserFailure) -> None:
        """Note what a worker's script raised, unless it only reports that the run has ended."""
        if self._failure is None and not failure.is_run_ended:
            self._worker, self._failure = worker, failure

    def add_death(self, text: str) -> None:
        """Note that a worker ended without an exception; `text` names the worker and says how."""
        if text not in self._deaths:
            self._deaths.append(text)

    def is_repeated(self, failure: UserFailure) -> bool:
        """Whether the same exception was raised at the same place before; remember this one."""
        known = failure.signature in self._seen
        self._seen.add(failure.signature)
        return known

    def traceback_once(self, failure: UserFailure | None) -> str:
        """The traceback to show; empty if one from the same place was shown before."""
        if failure is None or failure.signature in self._shown:
            return ""
        self._shown.add(failure.signature)
        return failure.traceback_shown

    def is_shown_at_end(self, failure: UserFailure, outcome: Outcome | None) -> bool:
        """Whether the outcome of the run will show this failure's traceback."""
        last = self._failure if outcome is None or outcome.failure is None else outcome.failure
        return last is not None and last.signature == failure.signature

    def explain(self, outcome: Outcome, *, with_deaths: bool) -> Outcome:
        """Add the first exception to the outcome of a failed run; without one, the deaths if `with_deaths`."""
        if outcome.failure is None and self._failure is not None:
            outcome = replace(outcome, worker=self._worker, failure=self._failure)
        if with_deaths and outcome.failure is None and self._deaths:
            outcome = replace(
                outcome, reason=f"{outcome.reason}. Before: {'; '.join(self._deaths)}"
            )
        return outcome

"""Who failed since the last committed step, why, and what people have been shown of it already."""

from __future__ import annotations

from dataclasses import replace

from tensorforge.launch.supervisor.exit_codes import UserFailure
from tensorforge.launch.supervisor.instructions import Outcome


class Blame:
    """The failures of a run's workers.

    The first exception since the last step is taken for the reason if the run ends: what follows it may
    follow from it. Deaths that nobody has an exception for are remembered in words.
    """

    def __init__(self) -> None:
        self._worker: str | None = None
        self._failure: UserFailure | None = None
        self._deaths: list[str] = []
        self._seen: set[tuple[str, str]] = set()
        self._shown: set[tuple[str, str]] = set()

    def committed(self) -> None:
        """A step was committed: what happened before did not end the run."""
        self._worker = self._failure = None
        self._deaths.clear()

    def raised(self, worker: str, failure: UserFailure) -> None:
        """A worker's script raised this; an echo of the run's end is nobody's fault."""
        if self._failure is None and not failure.is_echo:
            self._worker, self._failure = worker, failure

    def died(self, told: str) -> None:
        """A worker ended in another way."""
        if told not in self._deaths:
            self._deaths.append(told)

    def came_before(self, failure: UserFailure) -> bool:
        """Whether the same exception came from the same place before; from now on it has."""
        known = failure.signature in self._seen
        self._seen.add(failure.signature)
        return known

    def to_show(self, failure: UserFailure | None) -> str:
        """The traceback, once for each place that it comes from."""
        if failure is None or failure.signature in self._shown:
            return ""
        self._shown.add(failure.signature)
        return failure.shown

    def will_be_shown(self, failure: UserFailure, outcome: Outcome | None) -> bool:
        """Whether the end of the run will show this one anyway."""
        last = self._failure if outcome is None or outcome.failure is None else outcome.failure
        return last is not None and last.signature == failure.signature

    def explain(self, outcome: Outcome, *, in_full: bool) -> Outcome:
        """The outcome of a failed run with the exception behind it; `in_full`, with the deaths as well."""
        if outcome.failure is None and self._failure is not None:
            outcome = replace(outcome, worker=self._worker, failure=self._failure)
        if in_full and outcome.failure is None and self._deaths:
            outcome = replace(
                outcome, reason=f"{outcome.reason}. Before: {'; '.join(self._deaths)}"
            )
        return outcome

"""The exit codes that tell how a run ended, and what this process's runs ended with.

A script that trains ends by itself once its run is over, and Python's exit code is 0 then. The process that
starts the script asks `exit_code_of_runs` afterwards, so that a worker that left, or a run that was stopped,
does not look like a completed training.
"""

from __future__ import annotations

EXIT_COMPLETE = 0
EXIT_FAILED = 1
EXIT_UNFINISHED = 75
"""The run was stopped, or this worker left, before the goal was reached. Starting again continues."""

_outcomes: list[str] = []


def note_outcome(outcome: str) -> None:
    """A run of this process has ended: `"complete"`, `"stopped"` or `"left"`."""
    _outcomes.append(outcome)


def exit_code_of_runs() -> int:
    """`EXIT_UNFINISHED` if a run of this process ended without being complete, else `EXIT_COMPLETE`."""
    is_complete = all(outcome == "complete" for outcome in _outcomes)
    return EXIT_COMPLETE if is_complete else EXIT_UNFINISHED

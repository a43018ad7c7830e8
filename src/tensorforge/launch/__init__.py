"""Launching: a coordinator and its workers, supervised to the end.

The package separates decisions from processes. `supervisor/` is a pure state machine: an event and the
time go in, instructions come out. `launcher` is the loop around it, which owns the processes, threads
and the clock.

`crew/` starts the workers: `local_crew` as child processes, other crews on the machines of an engine.

The walk of one worker's death: `processes/children` sees the exit of the process and `launcher` makes it
a `WorkerExited` event (`supervisor/events`). `display/run_view` takes it in, and a display of
`display/displays` shows it. `supervisor/supervisor` counts the failure and returns `StartWorker`
(`supervisor/instructions`); `launcher` activates a spare process or starts a new one, whose first code
is `processes/bootstrap`. The coordinator lists the new worker, `coordinator_link` receives that view,
and `observations` turns it into `WorkerJoined`. The steps that the worker commits arrive through its run
log (`run_log_reader`).

`launch_settings` says what is launched, `run_directory` who runs in a folder, `chaos/` injects faults
into a running job.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorforge.launch.chaos.storm import StormPlan, Strike, StrikeKind, plan_storm
    from tensorforge.launch.display.displays import Display, JsonDisplay, LiveDisplay, PlainDisplay
    from tensorforge.launch.launch_settings import LaunchSettings
    from tensorforge.launch.launcher import Launcher
    from tensorforge.launch.supervisor.instructions import Outcome
    from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy

_HOMES = {
    "Display": "display.displays",
    "JsonDisplay": "display.displays",
    "LaunchSettings": "launch_settings",
    "Launcher": "launcher",
    "LiveDisplay": "display.displays",
    "Outcome": "supervisor.instructions",
    "PlainDisplay": "display.displays",
    "StormPlan": "chaos.storm",
    "Strike": "chaos.storm",
    "StrikeKind": "chaos.storm",
    "SupervisionPolicy": "supervisor.supervision_policy",
    "plan_storm": "chaos.storm",
}

__all__ = [
    "Display",
    "JsonDisplay",
    "LaunchSettings",
    "Launcher",
    "LiveDisplay",
    "Outcome",
    "PlainDisplay",
    "StormPlan",
    "Strike",
    "StrikeKind",
    "SupervisionPolicy",
    "plan_storm",
]


def __getattr__(name: str) -> Any:
    # Every worker imports this package before its script: the import must stay cheap.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

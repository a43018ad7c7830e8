"""Launching: one coordinator and its workers as processes of this machine, watched to the end.

    settings.py policy.py       what is launched, and how it is supervised
    events.py instructions.py   what happens, and what is to be done about it
    supervisor.py               the decisions between the two
      staffing.py  ending.py  hand.py  budget.py  departures.py  blame.py
      coordinator_care.py  exits.py  hangs.py  stacks.py
    observe.py runlogs.py       where events come from: the coordinator, the workers' own logs
    view.py render.py           what is known about the run, and how it looks
      displays.py  sparkline.py
    storm.py invariants.py      a seeded storm, and what must hold after it
    launcher.py                 the loop around the supervisor
      children.py  guard.py  lines.py  link.py  rundir.py
    bootstrap.py                what runs inside a worker; coordinator_process.py: inside the coordinator
    chaos.py                    a storm carried out

Decisions, views and plans are pure; processes, sockets and clocks are in the loop and what it uses.
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
    # Every worker passes through this package on its way to the script: it must cost nothing.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

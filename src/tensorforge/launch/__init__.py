"""Launching: one coordinator and its workers as processes of this machine, watched to the end.

    policy.py        how a run is supervised
    events.py        what happens            instructions.py  what to do about it
    supervisor.py    the decisions between the two (budget.py, hangs.py, stacks.py, exits.py)
    view.py          what the live view knows (sparkline.py)
    storm.py         a seeded storm against a running job
    lines.py         a child's bytes into clean lines
    children.py      processes that cannot outlive their launcher (guard.py)
    bootstrap.py     what runs inside a worker before and around the user's script

The upper half is pure: events, instructions and decisions know no clock and no process.
"""

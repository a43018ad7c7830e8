"""The decisions about a launched run, as a pure state machine.

`supervisor` takes one event (`events`) and the time, and returns `instructions` for the launcher. `staffing`
decides which workers to start and retire, `shutdown` how the run ends, `hangs` which worker is stuck.
"""

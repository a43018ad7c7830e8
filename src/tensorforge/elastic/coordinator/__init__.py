"""The coordinator of a run: `machine` decides, `journal` keeps its decisions, `control_server` serves it."""

"""The coordinator's decisions: inputs in, instructions out. Pure; every input carries its time."""

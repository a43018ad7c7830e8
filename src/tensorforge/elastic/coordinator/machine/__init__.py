"""The coordinator's decisions: inputs go in, instructions come out. Pure: every input comes with its time."""

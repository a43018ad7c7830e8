"""The launcher's decisions: events in, instructions out. Pure."""

"""The launcher's child processes: how they start, run, write output and end."""

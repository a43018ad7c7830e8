"""Checkpoint records, their chains, and which of them are kept or restored. Pure."""

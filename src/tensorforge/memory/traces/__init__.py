"""Recorded allocations of programs: how they are recorded, replayed, and used to size a pool."""

"""Allocation traces: recorded, replayed, and what they advise."""

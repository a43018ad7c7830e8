"""Seeded storms against a running job, and what must hold afterwards."""

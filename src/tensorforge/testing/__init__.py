"""Tools for tests, ours and our users': never imported by shipped code."""

"""Reads: one version or model, a search page by page, and two versions compared."""

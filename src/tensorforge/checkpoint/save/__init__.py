"""Saving: plans which rank writes what, copies and writes the files, and commits the manifest."""

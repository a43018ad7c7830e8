"""Elastic training: the run, its steps, and the machinery that gives the same model whatever happens."""

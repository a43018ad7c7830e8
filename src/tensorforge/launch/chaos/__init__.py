"""Fault injection: `storm` plans strikes from a seed, `strikes` carries them out, `invariants` judges."""

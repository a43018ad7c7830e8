"""How the ranks of a save or load talk to each other."""

"""The members of one generation: how they connect, agree and heal."""

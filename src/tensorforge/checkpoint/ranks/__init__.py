"""Communication between the ranks of a save or load: messages (coordinators) and common decisions (rounds)."""

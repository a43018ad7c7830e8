"""From live tensors to a committed checkpoint."""

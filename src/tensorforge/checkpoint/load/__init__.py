"""From a checkpoint to tensors, at any number of ranks."""

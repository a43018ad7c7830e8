"""Loading: chooses a checkpoint, plans which chunks each rank needs, and reads them into tensors."""

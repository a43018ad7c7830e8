"""What a training script sees, the run and its steps, and what they use: the engine and the training state."""

"""What a training script sees: the run, its steps, and the state that a commit changes."""

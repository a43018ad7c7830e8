"""Memory as real bytes: tensors lent from one reused buffer."""

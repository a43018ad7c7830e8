"""Real memory: one torch storage lent out as blocks, and as tensors over them."""

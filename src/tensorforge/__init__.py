"""TensorForge: elastic training for PyTorch.

Each concern is a package of its own; `docs/architecture.md` has the map. Importing `tensorforge`
imports none of them, so that the control plane starts without torch.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]

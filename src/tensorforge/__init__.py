"""TensorForge: elastic training for PyTorch.

Each concern is a package; `docs/architecture.md` has the picture. The modules of `tensorforge` itself are the
foundations: errors, checks of values, environment variables, process identities, encoding. Importing
`tensorforge` imports none of all that, so that the control plane starts without torch.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]

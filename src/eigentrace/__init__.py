"""Training-data attribution: which training examples taught a PyTorch model what it does."""

__version__ = "0.1.0"

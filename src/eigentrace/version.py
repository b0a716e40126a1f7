"""The version of this package, recorded in everything it writes."""

__version__ = "0.1.0"

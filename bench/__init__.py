"""Benchmarks, each a command: `python -m bench.projection`. No part of the installed package."""

"""Benchmarks, each a command such as `python -m bench.projection`. Not part of the installed package."""

"""Experiments, each a command that writes its results to docs/results: `python -m experiments.AREA.NAME`."""

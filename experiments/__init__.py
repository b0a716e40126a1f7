"""Experiments, each one command that writes what it found to docs/results: `python -m experiments.AREA.NAME`."""

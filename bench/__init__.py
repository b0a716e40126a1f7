"""Benchmarks: `python -m bench.projection` and `python -m bench.curvature`. No part of the installed package."""

"""Arithmetic that knows nothing of models: sums in float32, seeded generators, rank correlations, top-k."""

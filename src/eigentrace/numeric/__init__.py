"""Numerical tools independent of models: sums in float32, seeding, hashing, rank correlation, top-k search."""

"""Shared by benchmarks and experiments: measurements, mergeable results, generated pages, and models to measure."""

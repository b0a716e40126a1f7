"""Runs: scoring a corpus, and rankings, explanations and group statistics of the scores."""

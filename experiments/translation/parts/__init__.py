"""Corpora, networks, scores and pages of the experiments on sentence pairs."""

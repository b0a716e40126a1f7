"""Cleaning of datasets by scores: thresholds, decisions, export."""

"""From scores to a cleaned dataset: thresholds, decisions, export."""

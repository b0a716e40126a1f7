"""Score a corpus into a run, and ask it: rankings, explanations, groups."""

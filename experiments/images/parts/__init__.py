"""Data, networks, scores, figures and pages of the experiments on images."""

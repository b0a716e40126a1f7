"""Tasks: a trained model, its per-example loss and the selected parameters."""

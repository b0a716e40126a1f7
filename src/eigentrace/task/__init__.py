"""What was trained: a model, its per-example loss and the parameters that count."""

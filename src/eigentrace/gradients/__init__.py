"""Per-example gradients of a backward pass, layer by layer, without writing them out."""

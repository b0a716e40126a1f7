"""Per-example gradients from one backward pass, layer by layer, without materialising them."""

"""Files that appear whole or not at all: atomic writes, a lock, tensors, manifests."""

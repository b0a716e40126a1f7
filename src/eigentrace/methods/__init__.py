"""The attribution methods: each is a dataclass of settings with a `fit`. `eigentrace/__init__.py` lists them."""

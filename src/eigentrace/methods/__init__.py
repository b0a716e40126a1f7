"""The attribution methods: settings that know how to fit. `eigentrace/__init__.py` lists them."""

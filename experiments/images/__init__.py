"""The experiments on images and on model size: each module is a command, `python -m experiments.images.NAME`."""

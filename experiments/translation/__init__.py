"""The experiments on sentence pairs: each module is a command, `python -m experiments.translation.NAME`."""

"""The experiment on a language model: each module is a command, `python -m experiments.language.NAME`."""

"""The experiments on digits: each module is a command, `python -m experiments.digits.NAME`; `parts` helps them."""

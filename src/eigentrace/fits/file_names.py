"""File names of a saved fit, in a module that does not import torch."""

EIGENPAIRS = "eigenpairs.safetensors"
COORDINATES = "coordinates.safetensors"
MOMENTS = "moments.safetensors"
METRIC = "metric.safetensors"


def block_file(number: int) -> str:
    """Return the name of the file of a block."""
    return f"block-{number}.safetensors"


def member_folder(number: int) -> str:
    """Return the name of the directory of an ensemble member."""
    return f"member-{number}"


def state_file(number: int) -> str:
    """Return the name of the file with the parameters at which an ensemble member was fitted."""
    return f"state-{number}.safetensors"

"""Names of the files of a saved fit, for whoever looks into one without torch."""

EIGENPAIRS = "eigenpairs.safetensors"
COORDINATES = "coordinates.safetensors"


def block_file(number: int) -> str:
    """Name the file of one of several blocks."""
    return f"block-{number}.safetensors"


def member_folder(number: int) -> str:
    """Name the directory of a member of an ensemble."""
    return f"member-{number}"


def state_file(number: int) -> str:
    """Name the file of the parameters that a member of an ensemble was fitted at."""
    return f"state-{number}.safetensors"

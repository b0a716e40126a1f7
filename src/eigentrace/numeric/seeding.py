"""Random numbers of our own: a seed that is also given elsewhere draws other numbers here."""

import hashlib

import torch


def generator_of(seed: int) -> torch.Generator:
    """Return a generator that follows from a seed and shares no numbers with `torch.manual_seed(seed)`.

    People shuffle, split and relabel their data with small seeds too. With the same numbers, the examples that a fit
    samples would be exactly those that they picked.
    """
    digest = hashlib.sha256(f"eigentrace {int(seed)}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))

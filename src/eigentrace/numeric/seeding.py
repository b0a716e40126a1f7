"""Salted generators: seed=0 here differs from `torch.manual_seed(0)`."""

import hashlib

import torch


def generator_of(seed: int) -> torch.Generator:
    """Return a generator that depends only on `seed` and differs from `torch.manual_seed(seed)`.

    Data is often shuffled, split or relabelled with small seeds too. With the same random numbers, a fit would sample
    exactly the examples picked there.
    """
    digest = hashlib.sha256(f"eigentrace {int(seed)}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))

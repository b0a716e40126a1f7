import pytest
import torch

from tests.helpers.models import CASES, Case, make


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """Every small model, trained once."""
    return {name: make(name) for name in CASES}


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)

import hypothesis
import pytest
import torch

from tests.helpers.models import CASES, Case, make

# A busy machine is no reason to fail: examples have no time limit.
hypothesis.settings.register_profile("eigentrace", deadline=None)
hypothesis.settings.load_profile("eigentrace")


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """Every small model, trained once."""
    return {name: make(name) for name in CASES}


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)

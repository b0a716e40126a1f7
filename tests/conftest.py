import shlex
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from eigentrace import cli
from tests.helpers.models import CASES, Case, make

# A busy machine is no reason to fail: examples have no time limit.
hypothesis.settings.register_profile("eigentrace", deadline=None)
hypothesis.settings.load_profile("eigentrace")


@pytest.fixture(scope="session", autouse=True)
def _own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's configuration out of the tests, and the tests out of it, in all processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str, str]]:
    """Call the `eigentrace` command in this process; return its exit code, standard output and standard error."""

    def called(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eigentrace", *shlex.split(line)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return called


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """Every small model, trained once."""
    return {name: make(name) for name in CASES}


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(0)

import shutil

import numpy as np
import pytest

import eigentrace as et
from tests.helpers.pages import digit_run, pair_run
from tests.helpers.runs import data, fit


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A run of images, made by a function."""
    return digit_run(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A run of pairs of texts, some of them hostile, made from folders."""
    return pair_run(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def scored(tmp_path_factory):
    """A run of points, with ids and two columns, made in Python: it says nothing of its model."""
    columns = {"source": ["web", "books", None] * 20, "length": np.arange(60)}
    points = data(ids=[f"point {row}" for row in range(60)])
    return et.score(fit(), points, tmp_path_factory.mktemp("points") / "run", shard_rows=20, columns=columns).path


@pytest.fixture
def points(scored, tmp_path):
    """A copy of it to decide on."""
    return shutil.copytree(scored, tmp_path / "run")

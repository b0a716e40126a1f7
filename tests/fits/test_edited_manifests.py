"""Manifests of fits and of unfinished fits with entries of a wrong type are refused."""

import pytest

import eigentrace as et
from eigentrace.disk.manifest import MANIFEST
from eigentrace.errors import MismatchError
from tests.helpers.expecting import refused
from tests.helpers.manifests import edit_manifest
from tests.helpers.runs import data, fit, task

METHOD = et.Arnoldi(steps=20, keep=6)


def put(entries, place, value):
    *before, last = place
    for key in before:
        entries = entries[key]
    entries[last] = value


@pytest.fixture(scope="module")
def eigenpairs():
    return fit()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["trial", "losses"], 3),
        (["trial", "losses"], [[1.0]]),
        (["trial", "losses"], "x"),
        (["trial", "digests"], [1]),
        (["trial", "digests"], 1),
        (["trial"], []),
        (["num_train"], "60"),
        (["num_train"], None),
        (["num_train"], True),
        (["method"], []),
        (["method", "name"], 3),
        (["method", "sample"], "x"),
        (["num_products"], "x"),
        (["cut"], 3),
        (["cut", "stored"], "yes"),
        (["cut", "coordinates"], "x"),
    ],
    ids=str,
)
def test_wrong_types_in_a_fit_are_refused(place, value, eigenpairs, tmp_path):
    eigenpairs.save(tmp_path / "fit")
    edit_manifest(tmp_path / "fit", lambda entries: put(entries, place, value))
    with refused(MismatchError, tmp_path / "fit"):
        et.load(tmp_path / "fit", task())


@pytest.mark.parametrize(("name", "value"), [("identity", "x"), ("identity", None), ("identity", [1]), ("state", 3)])
def test_wrong_types_in_blocks_are_refused(name, value, tmp_path):
    fit(method=et.RandProj(keep=3)).save(tmp_path / "fit")
    edit_manifest(tmp_path / "fit", lambda entries: put(entries, ["blocks", 0, name], value))
    with refused(MismatchError, tmp_path / "fit", f"blocks[0].{name}"):
        et.load(tmp_path / "fit", task())


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    path = tmp_path_factory.mktemp("begun") / "x"
    METHOD.fit(task(), data(), resume=path)
    return path


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["identity"], []),
        (["identity"], "x"),
        (["identity", "losses", 0], None),
        (["identity", "losses", 0], "x"),
        (["identity", "losses", 0], [1]),
        (["identity", "losses", 0], 10**400),
        (["identity", "losses"], "x"),
        (["identity", "basis restart_keep"], "x"),
        (["identity", "basis restart_keep"], {}),
        (["identity", "basis max_vectors"], "x"),
        (["identity", "basis dtype"], []),
        (["chosen"], []),
        (["chosen"], 3),
        (["chosen", "compile"], "x"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_wrong_types_in_an_unfinished_fit_are_refused(place, value, begun):
    before = (begun / MANIFEST).read_text()
    try:
        edit_manifest(begun, lambda entries: put(entries, place, value))
        with refused(MismatchError, begun):
            METHOD.fit(task(), data(), resume=begun)
    finally:
        (begun / MANIFEST).write_text(before)


@pytest.mark.parametrize("members", [0, -1, 10**12, 10**30, "x", None])
def test_a_number_of_members_that_cannot_be_is_refused(members, eigenpairs, tmp_path):
    et.Ensemble([eigenpairs, fit(seed=1)]).save(tmp_path / "fit")
    edit_manifest(tmp_path / "fit", lambda entries: put(entries, ["members"], members))
    with refused(MismatchError, tmp_path / "fit"):
        et.load(tmp_path / "fit", task())

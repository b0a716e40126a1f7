"""What iterations take, on paper: a model of DistilBERT's size on machines of many sizes."""

import re
import warnings
from dataclasses import replace

import pytest
import torch

from eigentrace.errors import EigentraceWarning, MemoryLimitError, StorageError
from eigentrace.krylov.plan import IterationPlan, check_disk, fitted_basis
from eigentrace.krylov.vectors import Basis
from tests.helpers.expecting import refused, warned
from tests.helpers.small import table

SIZE = 66_955_010
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def plan(basis=None, size=SIZE, dtype=torch.float32, device=CPU, steps=200, keep=50, **options):
    return IterationPlan(size, dtype, device, steps, keep, basis or Basis(), **options)


def chosen(memory, device=CPU, **options):
    return fitted_basis(plan(Basis(memory=memory), device=device, **options))


def test_what_fits_is_as_without_a_limit():
    for found in (chosen("70GB"), chosen(0.5, size=100), fitted_basis(plan(size=100))):
        assert found == Basis(dtype="fp32", place="device")
        assert found.record() == {
            "name": "Basis", "dtype": "fp32", "place": "device", "max_vectors": None, "restart_keep": None,
        }  # fmt: skip


FITTING = {
    "half the bytes": ("40GB", {}, Basis(dtype="bf16", place="device"), ("201", "40GB", "'bf16'", "33.6 GB")),
    # 20 GB less 50 eigenvectors are 99 vectors of 134 MB.
    "restarts": ("20GB", {}, Basis(dtype="bf16", place="device", max_vectors=98), ("20GB", "max_vectors=98")),
    # 60% of 70 vectors are too few for 50 eigenpairs.
    "many kept": (
        "16.4GB",
        {},
        Basis(dtype="bf16", place="device", max_vectors=71, restart_keep=50),
        ("max_vectors=71", "restart_keep=50"),
    ),
    "float64": (
        "80GB",
        {"dtype": torch.float64},
        Basis(dtype="fp32", place="device", max_vectors=98),
        ("float64", "max_vectors=98"),
    ),
    "a matrix that changes": ("40GB", {"can_restart": False}, Basis(dtype="bf16", place="device"), ("'bf16'",)),
    # On the host, the temporary vectors of a product take nothing.
    "host memory": ("28GB", {"device": GPU, "keep": 1}, Basis(dtype="bf16", place="host"), ("place='host'",)),
}


@pytest.mark.parametrize(("memory", "options", "basis", "mentions"), table(FITTING))
def test_a_basis_that_fits_is_chosen_and_said(memory, options, basis, mentions):
    with warned(EigentraceWarning, f"{SIZE:,}", *mentions):
        found = chosen(memory, **options)
    assert found == basis
    planned = plan(replace(found, memory=memory), **options)
    assert planned.fits()
    if found.max_vectors is not None:
        more = replace(found, memory=memory, max_vectors=found.max_vectors + 1)
        assert not plan(more, **options).fits()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted_basis(planned) == found


def test_what_is_set_is_not_changed():
    with warned(EigentraceWarning, "'fp32'", "max_vectors=64"):
        assert fitted_basis(plan(Basis(dtype="fp32", memory="31GB"))).dtype == "fp32"
    with refused(MemoryLimitError, "max_vectors=98", "'bf16'", "101", "40.4 GB", "20GB"):
        fitted_basis(plan(Basis(dtype="fp32", place="device", max_vectors=100, memory="20GB")))


@pytest.mark.parametrize("options", [{}, {"can_restart": False}, {"dtype": torch.float64}], ids=str)
def test_a_refusal_names_settings_that_fit(options):
    memory = "12GB" if "dtype" in options else "6GB"
    with refused(MemoryLimitError, f"{SIZE:,}", memory) as caught:
        chosen(memory, **options)
    named = {name: int(number) for name, number in re.findall(r"(steps|keep)=(\d+)", str(caught.value))}
    assert named
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen(memory, **options, **named)


def test_without_room_for_one_eigenpair_only_fewer_parameters_help():
    with refused(MemoryLimitError, f"{SIZE:,}", "1GB", "params"):
        chosen("1GB")


def test_an_iteration_that_was_begun_keeps_its_basis():
    begun = Basis(dtype="fp32", place="device", memory="20GB")
    with refused(MemoryLimitError, "20GB", "67.2 GB"):
        fitted_basis(plan(begun), is_begun=True)
    assert fitted_basis(plan(replace(begun, memory="68GB")), is_begun=True) == replace(begun, memory=None)


def test_the_disk_must_have_room_for_the_vectors_and_the_fit(tmp_path):
    # A petabyte for a basis that nothing allocates.
    huge = plan(Basis(dtype="bf16", max_vectors=10_000), size=10**11, steps=20_000, keep=5000)
    assert huge.disk == (10_001 + 6001) * 2 * 10**11
    with refused(StorageError, tmp_path / "run" / "krylov", "4,200 TB", "3,200 TB", "1,000 TB"):
        check_disk(huge, tmp_path / "run" / "krylov")
    assert plan(size=100).disk == 101 * 400
    check_disk(plan(size=100), tmp_path / "run" / "krylov")


def test_vectors_on_disk_need_no_more_room(tmp_path):
    huge = plan(size=10**11, steps=10_000, keep=1)
    with (tmp_path / "vectors-00000.bin").open("wb") as file:
        file.truncate(2 * 10**12)  # sparse
    with refused(StorageError, "4,000 TB", "3,999 TB"):
        check_disk(huge, tmp_path)

"""Imports run one way, the core needs little, and importing the package changes nothing."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import eigentrace
from eigentrace.disk.manifest import MANIFEST
from eigentrace.fits.file_names import COORDINATES, EIGENPAIRS
from eigentrace.store import folder, shards
from tests.helpers.places import DOCS

SOURCE = Path(eigentrace.__file__).parent

DESIGN = DOCS / "design.md"
# Files beside the packages: what every module may import.
LOOSE = ("__init__", "errors", "progress", "settings", "version")
MOST_LOOSE = 6

CORE_PACKAGES = {"eigentrace", "torch", "numpy", "safetensors", "pyarrow", "tqdm"}
# An optional package may be imported by these packages only.
EXTRAS = {
    "typer": ("cli",),
    "fastapi": ("page",),
    "starlette": ("page",),
    "uvicorn": ("page",),
    "transformers": ("task", "methods", "loading"),
    "PIL": ("loading", "rendering", "page"),
}

# Two files may share a name where their packages say which is which.
SAME_FILE_NAME = {
    "checks": "what is checked of a task, and of a curvature product",
    "columns": "columns on disk, and in the memory of a page",
    "folder": "the directory of a run, and that of the demo",
    "inputs": "what every way of loading ends with, and the demo's; runs of the demo name it",
    "run": "a run, opened, and the demo's run",
}
# Names of other packages that are not public, and why each is used.
PRIVATE = {
    "_post_accumulate_grad_hooks": "how a parameter shows that it has hooks that cannot be called without effects",
    "_orig_mod": "the model inside of what torch.compile returns",
    "_checkpoint_without_reentrant_generator": "how a frame of torch's checkpointing is recognised",
    "_pack_padded_sequence": "the function by which packing shows itself to a function mode",
    "_allow_non_fake_inputs": "make_fx meets the constants of a model",
    "_valid_processor_keys": "an image processor's record of its keys, which is no setting",
    **dict.fromkeys(
        ("_C", "_set_grad_enabled", "_set_fwd_grad_enabled", "_is_fwd_grad_enabled"),
        "every form of disabling gradients ends there, and forward mode is disabled with them",
    ),
    "_engine_run_backward": "every gradient that a loss computes, and whether it has a graph",
    "_current_level": "whether forward mode is in use",
    "_functorch": "which of its transforms disables gradients, and how many are nested",
    **dict.fromkeys(
        ("_get_current_function_mode_stack", "_push_mode", "_pop_mode", "_device"),
        "a function mode goes below those of the user, and above that of a device",
    ),
    "_version": "how often a tensor was modified in place",
    "_weight_norm": "torch's fused weight norm, which is written out while a model is differentiated",
    **dict.fromkeys(("_eigentrace", "_eigentrace_number"), "our own marks on tensors that depend on numbers read"),
    **dict.fromkeys(("_attn_implementation", "_attn_implementation_internal"), "keys in a model folder's config.json"),
    "_replace": "public in named tuples",
    "_fields": "public in named tuples",
    **dict.fromkeys(("_data_files", "_indices_data_files", "_fingerprint", "_type"), "keys in files of `datasets`"),
}

MODULES = sorted(path for path in SOURCE.rglob("*.py"))


def packages():
    """The packages in the order in which they may import each other: a table of the design page, and nowhere else."""
    text = DESIGN.read_text().split("## Modules, in import order")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)


PACKAGES = packages()
PLACE = {name: number for number, name in enumerate(PACKAGES)}


def name_of(path):
    """The module's name below the package: `methods.arnoldi`, or `methods` for its `__init__`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def parsed(path):
    return ast.parse(path.read_text())


def imports(path):
    """Every module imported anywhere in a file, by its full name."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            # `from eigentrace.data import batch` names a module, `from eigentrace.task.task import Task` a class.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("eigentrace.") in NAMES else node.module


def own(path):
    """The package's own modules that a file imports."""
    found = [name.split(".", 1) for name in imports(path) if name.split(".")[0] == "eigentrace"]
    return {rest[0] if rest else "__init__" for _, *rest in found}


def package(name):
    return name.split(".")[0]


def test_the_design_page_lists_every_package():
    parts = [path.relative_to(SOURCE).parts for path in MODULES]
    assert max(map(len, parts)) == 2, "modules lie at most one folder deep"
    assert len(PACKAGES) == len(set(PACKAGES))
    assert set(PACKAGES) == {folder for folder, *rest in parts if rest}


def test_every_public_name_has_a_home():
    assert set(eigentrace._HOMES) == set(eigentrace.__all__)


def test_completion_offers_public_names_only():
    eigentrace.evaluate, eigentrace.Arnoldi, eigentrace.check  # noqa: B018
    offered = {name for name in dir(eigentrace) if not name.startswith("__")}
    assert offered == {*eigentrace.__all__, *eigentrace._PACKAGES}
    assert "__version__" in dir(eigentrace)


# Names of files that one module decides on, and where.
FILE_NAMES = {
    "store": (folder.WEIGHTS, folder.USER_COLUMNS, folder.TABLE, folder.REQUEST, folder.DECISIONS, folder.DECIDING),
    "store.shards": (shards.RECORD,),
    "disk.manifest": (MANIFEST,),
    "fits.file_names": (EIGENPAIRS, COORDINATES),
}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_names_of_files_are_written_once(path):
    name = name_of(path)
    known = {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)}
    for home, names in FILE_NAMES.items():
        if name != home and not name.startswith(f"{home}."):
            assert not known & set(names), f"{name} names a file that {home} names"


def test_few_files_are_loose():
    loose = sorted(path.stem for path in SOURCE.glob("*.py"))
    assert loose == sorted(LOOSE)
    assert len(loose) <= MOST_LOOSE


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_package_imports_only_packages_above_it(path):
    name = name_of(path)
    if name in LOOSE:  # the package itself re-exports what users write
        assert name == "__init__" or {package(other) for other in own(path)} <= set(LOOSE)
        return
    here = PLACE[package(name)]
    back = {other for other in own(path) if package(other) not in LOOSE and PLACE[package(other)] > here}
    assert not back, f"{name} imports {sorted(back)}, which come after it"


def test_no_circle_of_imports():
    graph = {name_of(path): own(path) - {name_of(path)} for path in MODULES}
    # A circle raises CycleError, which names it.
    assert set(graphlib.TopologicalSorter(graph).static_order()) >= graph.keys()


def test_module_names_are_unique_where_their_packages_do_not_tell_them_apart():
    stems = Counter(path.stem for path in MODULES if path.stem != "__init__")
    assert {name for name, count in stems.items() if count > 1} == set(SAME_FILE_NAME)
    assert not {stem for stem in stems if stem in PACKAGES} - {"task"}


def test_no_public_name_in_two_packages():
    homes = {}
    for path in MODULES:
        for node in parsed(path).body:
            # Functions of the command line are named by their commands, which are those of the package.
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and package(name_of(path)) != "cli":
                homes.setdefault(node.name, set()).add(package(name_of(path)))
    twice = {name: found for name, found in homes.items() if len(found) > 1 and not name.startswith("_")}
    assert not twice


def test_private_names_of_other_packages_have_a_reason():
    foreign = set()
    for path in MODULES:
        foreign |= foreign_names(path)
    assert {name for name in foreign if re.fullmatch(r"_[a-zA-Z]\w*", name)} == set(PRIVATE)


def foreign_names(path):
    """Names that a module uses, and neither defines nor has from `self` or `cls`."""
    used, ours = set(), set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            ours.add(node.name)
        elif isinstance(node, ast.Name):
            ours.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (ours if is_own else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used.update(part for part in node.module.split("."))
            used.update(alias.name for alias in node.names)
        elif isinstance(node, ast.keyword | ast.arg):
            used.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
    return {name for name in used - ours if name}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_packages_from_outside(path):
    name = name_of(path)
    outside = {imported.split(".")[0] for imported in imports(path)} - sys.stdlib_module_names
    allowed = CORE_PACKAGES | {extra for extra, only in EXTRAS.items() if package(name) in only}
    assert outside <= allowed, f"{name} imports {sorted(outside - allowed)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_fit_a_screen(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{name_of(path)}.{node.name} has {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_library_code_never_prints_or_asserts(path):
    if package(name_of(path)) == "cli":
        pytest.skip("the command line owns the terminal")
    for node in ast.walk(parsed(path)):
        assert not isinstance(node, ast.Assert), f"{name_of(path)}:{node.lineno} asserts: raise an error that says more"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{name_of(path)}:{node.lineno} prints"


IMPORTING = """
import json, logging, os, random, sys, warnings
import numpy, torch

def settings():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [
        torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()),
        torch.is_grad_enabled(), str(torch.get_default_dtype()), str(torch.get_default_device()),
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled,
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.is_autocast_enabled("cpu"),
        [str(h) for h in logging.getLogger().handlers], logging.getLogger().level, logging.root.manager.disable,
        [str(f) for f in warnings.filters], dict(os.environ),
    ]

before, loggers = settings(), set(logging.root.manager.loggerDict)
import eigentrace
print(json.dumps({
    "same": settings() == before,
    "loggers": sorted(set(logging.root.manager.loggerDict) - loggers),
    "modules": sorted(set(name.split(".")[0] for name in sys.modules)),
    "public": sorted(name for name in eigentrace.__all__ if not hasattr(eigentrace, name)),
}))
"""


@pytest.fixture(scope="module")
def imported():
    """What a fresh interpreter finds after `import eigentrace`."""
    run = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTING], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_importing_changes_no_global_state(imported):
    assert imported["same"]
    assert not [name for name in imported["loggers"] if name.startswith("eigentrace")]


def test_importing_loads_no_extras(imported):
    extras = {"transformers", "typer", "rich", "sklearn", "scipy", "matplotlib", "datasets", "torchvision", "pandas"}
    assert not extras & set(imported["modules"])


def test_public_names_exist(imported):
    assert imported["public"] == []
    assert len(set(eigentrace.__all__)) == len(eigentrace.__all__)

"""Imports run one way, the core needs little, and importing the package changes nothing."""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import eigentrace

SOURCE = Path(eigentrace.__file__).parent

# A room may import from its own tier and from those before it. The package itself re-exports what users write.
TIERS = (
    ("errors", "progress", "version"),
    ("settings", "seal", "trial", "fallback", "ranks", "files", "chance"),
    ("lock",),
    ("compute",),
    ("vector", "batch", "wide"),
    ("casts",),
    ("digest",),
    ("data", "guard", "selection"),
    ("task", "ready"),
    ("products",),
    ("compiled",),
    ("curvature",),
    ("probe", "basis"),
    ("krylov",),
    ("distill",),
    ("factors", "forms"),
    ("outer",),
    ("rows",),
    ("streams",),
    ("project",),
    ("kronecker",),
    ("coordinates",),
    ("artifact", "checkpoints"),
    ("iteration",),
    ("reliability",),
    ("fitted",),
    ("search",),
    ("blocks", "shortlist", "saved"),
    ("projected", "solved"),
    ("ensemble", "callbacks", "backing", "augmented"),
    ("methods",),
    ("store", "terms", "decisions"),
    ("candidates", "unchanged"),
    ("explain", "cleaning"),
    ("groups",),
    ("run",),
    ("scoring", "health"),
    ("shown",),
    ("inputs",),
    ("exporting",),
    ("__init__",),
    ("evaluate", "demo", "report"),
    ("serve",),
    ("cli",),
)
TIER = {room: number for number, rooms in enumerate(TIERS) for room in rooms}

CORE_PACKAGES = {"eigentrace", "torch", "numpy", "safetensors", "pyarrow", "tqdm"}
# An optional package may be imported by these rooms only.
EXTRAS = {
    "typer": ("cli",),
    "fastapi": ("serve",),
    "starlette": ("serve",),
    "uvicorn": ("serve",),
    "transformers": ("callbacks", "inputs"),
    "PIL": ("inputs", "shown", "serve"),
}

MODULES = sorted(path for path in SOURCE.rglob("*.py"))


def name_of(path):
    """The module's name below the package: `methods.arnoldi`, or `methods` for its `__init__`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def imports(path):
    """Every module imported anywhere in a file, by its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            # `from eigentrace import artifact` names a module, `from eigentrace.rows import Rows` something in one.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.removeprefix("eigentrace.") in NAMES else node.module


def own(path):
    """The package's own modules that a file imports."""
    found = [name.split(".", 1) for name in imports(path) if name.split(".")[0] == "eigentrace"]
    return {rest[0] if rest else "__init__" for _, *rest in found}


def room(name):
    return name.split(".")[0]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_one_way(path):
    name = name_of(path)
    assert room(name) in TIER, f"{name} has no place in the order: add its room to TIERS"
    back = {other for other in own(path) if TIER[room(other)] > TIER[room(name)]}
    assert not back, f"{name} imports {sorted(back)}, which come after it"


def test_no_circle_of_imports():
    graph = {name_of(path): own(path) - {name_of(path)} for path in MODULES}
    # A circle raises CycleError, which names it.
    assert set(graphlib.TopologicalSorter(graph).static_order()) >= graph.keys()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_packages_from_outside(path):
    name = name_of(path)
    outside = {imported.split(".")[0] for imported in imports(path)} - sys.stdlib_module_names
    allowed = CORE_PACKAGES | {package for package, only in EXTRAS.items() if room(name) in only}
    assert outside <= allowed, f"{name} imports {sorted(outside - allowed)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_rooms_are_small(path):
    tree, lines = ast.parse(path.read_text()), path.read_text().count("\n")
    assert lines <= 400, f"{name_of(path)} has {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{name_of(path)}.{node.name} has {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_library_code_never_prints_or_asserts(path):
    if room(name_of(path)) == "cli":
        pytest.skip("the command line owns the terminal")
    for node in ast.walk(ast.parse(path.read_text())):
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

"""Who may import whom, read from the source; and what importing really loads. New modules go into the tables."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pagedjax

ROOT = Path(__file__).parents[1]
STDLIB = set(sys.stdlib_module_names)

# The host tower, lowest first: a module imports the standard library, HOST_LIBRARIES and modules above it in this list.
HOST = (
    "types",
    "params",
    "config",
    "blocks",
    "policies",
    "branches",
    "beams",
    "state",
    "reservation",
    "turns",
    "sharing",
    "preemption",
    "admission",
    "scheduler",
    "replay",
    "viewer",
)
HOST_LIBRARIES = {"immutables"}

# The device tower knows arrays; it never sees a request, a queue or who owns a block.
DEVICE = ("cache", "attention", "layers", "models", "sampling", "step")
NEVER_ON_DEVICE = (
    *(name for name in HOST if name not in ("types", "params", "config")),
    "intake",
    "readout",
    "outputs",
    "tokenizer",
    "engine",
    "llm",
    "server",
    "cli",
)

KERNEL_LIBRARIES = {"jax"}
# Loaded when they are first used: the compiled kernel, and what loads its object code without a compiler.
COMPILED = tuple(f"pallas_kernels.paged_attention.cpu_{name}" for name in ("memory", "vectors", "items", "kernel"))
COMPILED_LIBRARIES = {"numba", "llvmlite", "numpy"}
LOADER = "pallas_kernels.paged_attention.cpu.object_files"
LOADER_LIBRARIES = {"jax", "llvmlite"}
ONLY_IMPORTER_OF_KERNELS = "pagedjax.device.attention"
ONLY_JIT = "pagedjax.device.step"


def modules(package: str) -> dict[str, ast.Module]:
    """Every module of a package by its dotted name; a package's own `__init__` goes by the package's name."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text("utf-8"), str(path))
    return found


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Full names of what a module imports, anywhere in it: `from a import b` is `a.b`."""
    is_package = (ROOT / Path(*name.split(".")) / "__init__.py").exists()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


ALL = {package: modules(package) for package in ("pagedjax", "pallas_kernels", "experiments")}
EDGES = [
    (name, target)
    for trees in ALL.values()
    for name, tree in trees.items()
    for target in sorted(set(imports(name, tree)))
]


def offending(allowed) -> list[str]:
    return [f"{name} imports {target}" for name, target in EDGES if not allowed(name, target)]


def test_the_walk_sees_imports_of_every_form():
    source = "import a.b, c\nfrom d import e\nfrom . import f\nfrom ..g import h\ndef i():\n    from j.k import l\n"
    assert set(imports("x.y.z", ast.parse(source))) == {"a.b", "c", "d.e", "x.y.f", "x.g.h", "j.k.l"}
    assert set(imports("pagedjax", ast.parse("from .types import Seq"))) == {"pagedjax.host.types.Seq"}
    assert len(EDGES) > 100


def test_every_module_of_the_tables_is_where_the_table_says():
    """Host modules all exist by now; a misspelt name would be held to nothing."""
    assert [name for name in HOST if f"pagedjax.{name}" not in ALL["pagedjax"]] == []


@pytest.mark.parametrize("at", range(len(HOST)), ids=HOST)
def test_a_host_module_imports_only_python_and_what_lies_below_it(at: int):
    own, below = f"pagedjax.{HOST[at]}", [f"pagedjax.{name}" for name in HOST[:at]]

    def allowed(name: str, target: str) -> bool:
        libraries = target.split(".")[0] in STDLIB | HOST_LIBRARIES
        return not within(name, own) or libraries or within(target, own, "pagedjax.__version__", *below)

    assert offending(allowed) == []


def test_the_device_tower_never_sees_a_request():
    device = [f"pagedjax.{name}" for name in DEVICE]
    banned = [f"pagedjax.{name}" for name in NEVER_ON_DEVICE]
    assert offending(lambda name, target: not (within(name, *device) and within(target, *banned))) == []


def test_kernels_import_jax_alone():
    def allowed(name: str, target: str) -> bool:
        libraries = COMPILED_LIBRARIES if name in COMPILED else KERNEL_LIBRARIES
        libraries = STDLIB | (LOADER_LIBRARIES if name == LOADER else libraries)
        fits = target.split(".")[0] in libraries or within(target, "pallas_kernels")
        return fits or not within(name, "pallas_kernels")

    assert offending(allowed) == []


def test_one_module_imports_the_kernels():
    def allowed(name: str, target: str) -> bool:
        return not within(name, "pagedjax") or not within(target, "pallas_kernels") or name == ONLY_IMPORTER_OF_KERNELS

    assert offending(allowed) == []


def test_nothing_imports_experiments_or_tests_but_experiments():
    assert (
        offending(lambda name, target: within(name, "experiments") or not within(target, "experiments", "tests")) == []
    )


def test_the_library_never_imports_torch():
    def allowed(name: str, target: str) -> bool:
        return within(name, "experiments") or not within(target, "torch", "torchvision", "accelerate")

    assert offending(allowed) == []


def jits(tree: ast.Module) -> int:
    """Mentions of a function called jit or pjit, however it is imported."""
    names = {"jit", "pjit"}
    attributes = sum(isinstance(node, ast.Attribute) and node.attr in names for node in ast.walk(tree))
    imported = sum(
        alias.name in names for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    )
    return attributes + imported


def donations(tree: ast.Module) -> int:
    keywords = (node for node in ast.walk(tree) if isinstance(node, ast.keyword))
    return sum(keyword.arg is not None and keyword.arg.startswith("donate") for keyword in keywords)


def test_the_library_jits_the_step_and_what_moves_blocks_and_donates_there_alone():
    """And a block inside the step, so that one of them is traced for all."""
    assert (
        jits(ast.parse("import jax\nfrom jax import jit\n@partial(jax.jit, donate_argnums=0)\ndef f(): nnx.jit")) == 3
    )
    trees = ALL["pagedjax"]
    assert {name: count for name, tree in trees.items() if (count := jits(tree))} == {
        ONLY_JIT: 5,
        "pagedjax.device.models.decoder": 1,
    }
    assert {name for name, tree in trees.items() if donations(tree)} == {ONLY_JIT}


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh Python has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    return {name.split(".")[0] for name in done.stdout.split()}


HEAVY = {"jax", "jaxlib", "flax", "optax", "chex", "numpy", "transformers", "torch"}


@pytest.mark.parametrize("name", HOST)
def test_a_host_module_loads_no_arrays(name: str):
    assert loaded_by(f"import pagedjax.{name}") & HEAVY == set()


@pytest.mark.parametrize("statement", ["import pagedjax", "from pagedjax import SamplingParams, EngineConfig"])
def test_importing_the_package_loads_no_jax(statement: str):
    assert loaded_by(statement) & HEAVY == set()


def test_importing_the_kernels_loads_no_compiler():
    assert loaded_by("import pallas_kernels.paged_attention") & {"numba", "llvmlite"} == set()


def test_what_loads_is_seen():
    assert "numpy" in loaded_by("import numpy")


def test_the_version_is_the_same_in_the_package_and_its_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == pagedjax.__version__

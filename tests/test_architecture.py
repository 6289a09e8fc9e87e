"""Which folder may import which, read from the source of every module; and which libraries an
import loads.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import FrameType

import pytest

import pagedjax
from pagedjax import SamplingParams
from tests import fresh_python

ROOT = Path(__file__).parents[1]
STDLIB = set(sys.stdlib_module_names)
PACKAGES = ("pagedjax", "pallas_kernels", "experiments")

# The project's own modules that a folder (or one module) may import, beside its own folder; a
# folder includes what is in it. The longest name that fits a module counts, and every module has
# one: a new folder needs a line here.
LEAVES = ("pagedjax.options",)
BELOW_LLM = (*LEAVES, "pagedjax.host", "pagedjax.device", "pagedjax.engine", "pagedjax.text")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "pagedjax.options": (),
    "pagedjax.host": LEAVES,
    "pagedjax.policies": ("pagedjax.host",),
    "pagedjax.routing": LEAVES,
    "pagedjax.device": (
        *LEAVES,
        "pallas_kernels.paged_attention",
        "pallas_kernels.kv_write",
        "pallas_kernels.linear",
        "pallas_kernels.states",
        "pallas_kernels.shared.page_bits",
        "pallas_kernels.shared.cpu.handler",
    ),
    "pagedjax.models": ("pagedjax.device", "pagedjax.weights"),
    "pagedjax.text": (*LEAVES, "pagedjax.host.types"),
    "pagedjax.weights": (
        "pagedjax.options.config",
        "pagedjax.options.own_values",
        "pagedjax.device",
        "pagedjax.text",
    ),
    "pagedjax.engine": (
        *LEAVES,
        "pagedjax.host",
        "pagedjax.device",
        "pagedjax.weights",
        "pagedjax.text.structured.matcher",
        "pagedjax.text.tap_arrays",
    ),
    "pagedjax.engine.session": (*BELOW_LLM, "pagedjax.weights"),
    "pagedjax.llm": (*BELOW_LLM, "pagedjax.weights"),
    "pagedjax.disaggregated": (
        *LEAVES,
        "pagedjax.host",
        "pagedjax.device",
        "pagedjax.engine",
        "pagedjax.text.structured.matcher",
        "pagedjax.llm",
    ),
    "pagedjax.viewer": ("pagedjax.host",),
    "pagedjax.server": (
        *BELOW_LLM,
        "pagedjax.weights",
        "pagedjax.llm",
        "pagedjax.viewer",
        "pagedjax.routing",
    ),
    "pagedjax.server.load_client": (),
    "pagedjax.commands": (*BELOW_LLM, "pagedjax.weights", "pagedjax.llm"),
    "pagedjax.commands.cli": ("pagedjax",),
    "pagedjax.__main__": ("pagedjax.commands.cli",),
    "pagedjax": ("pagedjax",),  # the public names, imported when they are first used
    "pallas_kernels": (),
    "experiments": ("pagedjax", "pallas_kernels"),
}
# every folder may import it
VERSION = (
    "pagedjax",
    "pagedjax.__version__",
    "pagedjax._import_seconds",
)

ARRAYS = {"jax", "jaxlib", "flax", "optax", "chex", "orbax", "numpy"}
TORCH = {"torch", "torchvision", "accelerate"}
# Libraries that a folder may import; a folder that is not here may import any, except torch.
LIBRARIES: dict[str, set[str]] = {
    "pagedjax.options": set(),
    "pagedjax.host": {"immutables"},
    "pagedjax.routing": {"immutables"},
    "pagedjax.viewer": {"immutables"},
    "pallas_kernels": {"jax"},
    # weights are packed on the host
    "pallas_kernels.linear.factors": {"numpy"},
    "pallas_kernels.linear.words": {"jax", "numpy"},
    "pallas_kernels.linear.pallas_tpu": {"jax", "numpy"},
    "pallas_kernels.linear.pallas_gpu": {"jax", "numpy"},
    "pallas_kernels.interpreted": {"jax", "numpy"},
    # compiled code for CPUs, loaded when it is first used
    **{
        f"pallas_kernels.{folder}.cpu": {"jax", "numpy", "llvmlite"}
        for folder in ("paged_attention", "linear", "shared")
    },
}
KERNELS_ARE_IMPORTED_BY = "pagedjax.device"
JITTED_IN = "pagedjax.device.step"


def files(package: str) -> dict[str, Path]:
    """The file of every module of a package by its dotted name; a package's own `__init__` goes by
    the package's name.
    """
    paths = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the tests ask about a module. Its syntax tree is a thousand times as large."""

    imports: frozenset[str]  # names, as of `imported`
    imports_with_types: frozenset[str]  # also those for type checkers alone
    jits: int
    donations: int


def facts_of(name: str, source: str) -> Facts:
    """Reads a module once.

    Args:
        name: dotted; relative imports start there.
    """
    tree = ast.parse(source, name)
    has_jit = "jit" in source or "donate" in source
    nodes = list(ast.walk(tree)) if has_jit else []
    return Facts(
        frozenset(imported(name, tree)),
        frozenset(imported(name, tree, for_types=True)),
        jits(nodes),
        donations(nodes),
    )


def imported(name: str, tree: ast.Module, for_types: bool = False) -> Iterator[str]:
    """Full names of what a module imports, anywhere in it: `from a import b` is `a.b`.

    Args:
        for_types: also what is imported for type checkers alone.
    """
    is_package = (ROOT / Path(*name.split(".")) / "__init__.py").exists()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if not for_types and _for_type_checkers(node):
            continue
        todo += _statements_in(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (
                name.split(".")[: len(name.split(".")) - node.level + is_package]
                if node.level
                else []
            )
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a statement's blocks; an import is nowhere else."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        yield from getattr(node, block, ())


def _for_type_checkers(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def jits(nodes: Iterable[ast.AST]) -> int:
    """Mentions of a function called jit or pjit, however it is imported."""
    names = {"jit", "pjit"}
    attributes = sum(isinstance(node, ast.Attribute) and node.attr in names for node in nodes)
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
    return attributes + sum(alias.name in names for node in imports for alias in node.names)


def donations(nodes: Iterable[ast.AST]) -> int:
    keywords = (node for node in nodes if isinstance(node, ast.keyword))
    return sum(keyword.arg is not None and keyword.arg.startswith("donate") for keyword in keywords)


def within(name: str, *packages: str) -> bool:
    return f"{name}.".startswith(tuple(f"{package}." for package in packages))


@functools.cache  # read when a test needs it: every worker imports this file
def all_modules() -> dict[str, Facts]:
    """Every module of the project by its dotted name."""
    return {
        name: facts_of(name, path.read_text("utf-8"))
        for package in PACKAGES
        for name, path in files(package).items()
    }


@functools.cache
def edges(for_types: bool = False) -> list[tuple[str, str]]:
    """(a module, the name that it imports). for_types: as in `imported`."""
    return [
        (name, target)
        for name, facts in all_modules().items()
        for target in sorted(facts.imports_with_types if for_types else facts.imports)
    ]


def module_of(target: str) -> str:
    """The module that an imported name comes from."""
    return target if target in all_modules() else target.rpartition(".")[0]


def rule_of(name: str, rules: Collection[str]) -> str | None:
    """The longest name among the rules that the module lies in."""
    while name and name not in rules:
        name = name.rpartition(".")[0]
    return name or None


def folder_of(module: str) -> str:
    """Where a module lies: its folder, or the module itself where it stands at the top of a
    package.
    """
    parts = module.split(".")
    return ".".join(parts[:2])


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Groups of nodes that can reach each other. Every group of the result is one circle or several
    joined ones.
    """
    reach: dict[str, set[str]] = {}
    for start in graph:
        reached = set()
        todo = list(graph[start])
        while todo:
            node = todo.pop()
            if node not in reached:
                reached.add(node)
                todo += graph.get(node, ())
        reach[start] = reached
    groups = {
        tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in graph if a in reach[a]
    }
    return [list(group) for group in sorted(groups)]


def graph_of(place, for_types: bool = False) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = defaultdict(set)
    for name, target in edges(for_types):
        if within(target, *PACKAGES) and target not in VERSION:
            a, b = place(name), place(module_of(target))
            if a != b:
                graph[a].add(b)
    return graph


def offending(allowed, for_types: bool = False) -> list[str]:
    return [
        f"{name} imports {target}" for name, target in edges(for_types) if not allowed(name, target)
    ]


def test_the_walk_sees_imports_of_every_form():
    source = "import a.b, c\nfrom d import e\nfrom . import f\nfrom ..g import h\ndef i():\n    from j.k import l\n"
    assert facts_of("x.y.z", source).imports == {
        "a.b",
        "c",
        "d.e",
        "x.y.f",
        "x.g.h",
        "j.k.l",
    }
    blocks = "try: import a\nexcept E: import b\nelse: import c\nfinally: import d\nmatch e:\n  case _: import f"
    assert facts_of("x", blocks).imports == {"a", "b", "c", "d", "f"}
    assert facts_of("pagedjax", "from .host import types").imports == {"pagedjax.host.types"}
    for_types = facts_of("x", "if TYPE_CHECKING:\n    import a\nimport b")
    assert for_types.imports == {"b"}
    assert for_types.imports_with_types == {"a", "b"}
    assert len(edges()) > 500


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}}) == []


def test_the_top_floor_has_few_rooms():
    parts = [name.split(".") for name in all_modules() if within(name, "pagedjax")]
    rooms = {names[1] for names in parts if len(names) > 1} - {"__main__"}
    assert len(rooms) <= 14, sorted(rooms)


@pytest.mark.parametrize("rules", [MAY_IMPORT, LIBRARIES], ids=["modules", "libraries"])
def test_every_rule_names_a_module(rules):
    assert [rule for rule in rules if rule not in all_modules()] == []


def test_every_module_has_a_rule():
    assert [name for name in all_modules() if rule_of(name, MAY_IMPORT) is None] == []


@pytest.mark.parametrize("rule", MAY_IMPORT)
def test_a_folder_imports_only_the_folders_below_it(rule: str):
    def allowed(name: str, target: str) -> bool:
        if rule_of(name, MAY_IMPORT) != rule or not within(target, *PACKAGES) or target in VERSION:
            return True
        return within(target, rule, *MAY_IMPORT[rule])

    assert offending(allowed, for_types=True) == []


@pytest.mark.parametrize("rule", LIBRARIES)
def test_a_folder_imports_only_its_libraries(rule: str):
    def allowed(name: str, target: str) -> bool:
        elsewhere = rule_of(name, LIBRARIES) != rule or within(target, *PACKAGES)
        return elsewhere or target.split(".")[0] in STDLIB | LIBRARIES[rule]

    assert offending(allowed) == []


@pytest.mark.parametrize(
    "folder",
    ["pagedjax.text", "pagedjax.server.load_client", "pagedjax.commands", "pagedjax.commands.cli"],
)
def test_text_and_clients_import_no_jax(folder: str):
    banned = ARRAYS - {"numpy"}
    assert (
        offending(
            lambda name, target: not (within(name, folder) and target.split(".")[0] in banned)
        )
        == []
    )


def test_the_device_knows_no_request_and_the_host_no_array():
    """The two towers. The rules above say it too; these two say it whatever those become."""
    host = ("pagedjax.host",)
    device = ("pagedjax.device",)
    towers = offending(lambda name, target: not (within(name, *host) and within(target, *device)))
    assert (
        towers
        + offending(lambda name, target: not (within(name, *device) and within(target, *host)))
        == []
    )
    arrays = [
        edge for edge in edges() if within(edge[0], *host) and edge[1].split(".")[0] in ARRAYS
    ]
    assert arrays == []


def test_no_file_imports_itself_through_others():
    assert circles(graph_of(lambda name: name)) == []


def test_no_folder_imports_itself_through_others():
    """Except the package itself, whose public names come from everywhere."""
    graph = graph_of(folder_of, for_types=True)
    graph.pop("pagedjax")
    assert circles(graph) == []


def test_kernels_are_imported_by_the_device_tower_only():
    def allowed(name: str, target: str) -> bool:
        outside = not within(name, "pagedjax") or not within(target, "pallas_kernels")
        return outside or within(name, KERNELS_ARE_IMPORTED_BY)

    assert offending(allowed) == []


def test_nothing_imports_experiments_or_tests_but_experiments():
    def allowed(name: str, target: str) -> bool:
        return within(name, "experiments") or not within(target, "experiments", "tests")

    assert offending(allowed) == []


def test_the_library_never_imports_torch():
    assert (
        offending(
            lambda name, target: within(name, "experiments") or target.split(".")[0] not in TORCH
        )
        == []
    )


def test_the_step_and_block_moves_are_jitted_and_donate_in_one_module():
    """And a block of layers inside the step, so that one of them is traced for all; `score`, which
    is no step; and a solver that is lowered and never run.
    """
    three = "import jax\nfrom jax import jit\n@partial(jax.jit, donate_argnums=0)\ndef f(): nnx.jit"
    assert facts_of("x", three).jits == 3
    assert facts_of("x", three).donations == 1
    library = {name: facts for name, facts in all_modules().items() if within(name, "pagedjax")}
    assert {name: facts.jits for name, facts in library.items() if facts.jits} == {
        JITTED_IN: 6,
        "pagedjax.device.models.decoder": 1,
        "pagedjax.device.score": 1,
        "pagedjax.engine.kept_programs": 1,
    }
    assert {name for name, facts in library.items() if facts.donations} == {JITTED_IN}


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh Python has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(fresh_python.output_of(program).split())


HEAVY = {"jax", "jaxlib", "flax", "optax", "chex", "numpy", "transformers", "torch"}
LIGHT = [
    name
    for package in PACKAGES
    for name in files(package)
    if rule_of(name, MAY_IMPORT)
    in ("pagedjax.host", "pagedjax.routing", "pagedjax.viewer", *LEAVES)
]


def test_host_routing_and_viewer_load_no_arrays():
    """In one process: a module that loads an array library would show."""
    loaded = loaded_by("; ".join(f"import {name}" for name in LIGHT))
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()
    assert set(LIGHT) <= loaded


@pytest.mark.parametrize(
    "statement",
    [
        "import pagedjax",
        "from pagedjax import SamplingParams, EngineConfig",
        "import pagedjax.policies",
    ],
)
def test_importing_the_package_loads_no_jax(statement: str):
    assert {name.split(".")[0] for name in loaded_by(statement)} & HEAVY == set()


def test_importing_the_kernels_loads_no_compiler():
    loaded = {name.split(".")[0] for name in loaded_by("import pallas_kernels.paged_attention")}
    assert "llvmlite" not in loaded


def test_loaded_modules_are_seen():
    assert "numpy" in loaded_by("import numpy")


def test_one_generate_passes_through_few_modules(tiny_llm):
    """Modules whose functions run between the call of `LLM.generate` and its return, on a warm
    engine. `step` is one thing among them: the engine's transition, and the methods that call it.
    """
    params = SamplingParams(max_tokens=4)
    prompts = ["some words", "others"]
    passed: set[str] = set()
    modules_of_step: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_globals.get("__name__", "")
        passed.add(name)
        if frame.f_code.co_name == "step" and within(name, "pagedjax"):
            modules_of_step.add(name)

    tiny_llm.generate(prompts, params, use_tqdm=False)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        tiny_llm.generate(prompts, params, use_tqdm=False)
    finally:
        sys.setprofile(before)
    project = sorted(name for name in passed if within(name, "pagedjax", "pallas_kernels"))
    assert {"pagedjax.llm", "pagedjax.engine.state", "pagedjax.host.scheduler"} <= set(project)
    assert len(project) <= 22, project
    assert modules_of_step == {f"pagedjax.engine.{name}" for name in ("session", "engine", "state")}


def test_the_version_is_the_same_in_the_package_its_metadata_and_the_change_log():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == pagedjax.__version__
    assert f"\nversion: {pagedjax.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {pagedjax.__version__} (" in (ROOT / "CHANGELOG.md").read_text("utf-8")

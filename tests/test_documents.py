"""The documents agree with the tree: links, anchors, file names and commands exist, and pages are
short.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("configs", "docs", "experiments", "pagedjax", "pallas_kernels", "tests")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
)
DESIGN = ROOT / "docs" / "design"
MAPS = [
    ROOT / folder / "README.md" for folder in ("experiments", "pagedjax", "pallas_kernels", "tests")
]
EXAMPLES = {
    "file.py",
    "folder/file.py",
    "least_work.py",
    "mine.py",
    "round_robin.py",
}  # names of a user's own files
PLACEHOLDER = re.compile(r"\bN[A-Z]+(?=\b|_)")  # NAME of a command, NNN of a study
NOT_FOR_TESTS = {"sphinx"}  # packages of extras that the tests run without
# which also has names of the past
CURRENT = [path for path in DOCUMENTS if path != ROOT / "CHANGELOG.md"]


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def links(text: str) -> list[str]:
    """Targets of Markdown links and images that are not addresses of the web."""
    targets = re.findall(r"\]\(\s*([^()\s]+)\s*\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    slugs: set[str] = set()
    for title in re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    ):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        number = sum(
            earlier == slug or re.fullmatch(re.escape(slug) + r"-\d+", earlier) is not None
            for earlier in slugs
        )
        slugs.add(f"{slug}-{number}" if slug in slugs else slug)
    return slugs


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in links(path.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        missing = not target.exists()
        if not missing and anchor and target.suffix == ".md":
            missing = anchor not in anchors(target.read_text("utf-8"))
        if missing:
            broken.append(link)
    return broken


def modules(text: str) -> list[str]:
    """Names of the modules that a document runs: `python -m NAME`."""
    return [
        n
        for n in re.findall(r"python3? -m\s+([A-Za-z_][\w.]*\w)", text)
        if not PLACEHOLDER.search(n)
    ]


def runs(module: str) -> bool:
    """Whether `python -m` can run a module of this project, or whether a foreign package exists."""
    path = ROOT.joinpath(*module.split("."))
    if (path / "__main__.py").exists():
        return True
    if path.with_suffix(".py").exists():
        return '__name__ == "__main__"' in path.with_suffix(".py").read_text("utf-8")
    package = module.split(".")[0]
    return package not in FOLDERS and (
        package in NOT_FOR_TESTS or importlib.util.find_spec(package) is not None
    )


def named_files(text: str) -> set[str]:
    """Names of source files in backticks, with or without their folders."""
    paths = set(re.findall(r"`([\w./-]+\.(?:py|yaml|jinja))`", text)) - EXAMPLES
    return {name for name in paths if not PLACEHOLDER.search(name)}


TREE = {
    "/".join(path.relative_to(ROOT).parts[start:])
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.*")
    for start in range(len(path.relative_to(ROOT).parts))
}


def test_checks_see_what_is_wrong(tmp_path):
    """Each check can fail."""
    (tmp_path / "a.md").write_text(
        "# One `two`, three\n[x](a.md#one-two-three) [y](b.md) [z](#four) ![](no.png)"
    )
    assert broken_links(tmp_path / "a.md") == ["b.md", "#four", "no.png"]
    assert modules("`python -m a.b --c`, python3 -m venv .venv") == ["a.b", "venv"]
    assert runs("experiments.run")
    assert runs("venv")
    assert not runs("experiments.bench_floors")
    assert not runs("pagedjax.host.types")  # has no command
    assert named_files("`engine/no_such.py`, `mine.py`, `scheduler.py`") - TREE == {
        "engine/no_such.py"
    }
    assert len(DOCUMENTS) > 40


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids(DOCUMENTS))
def test_relative_links_and_anchors_resolve(path: Path):
    assert broken_links(path) == []


@pytest.mark.parametrize("path", CURRENT, ids=ids(CURRENT))
def test_documented_modules_run_and_documented_files_exist(path: Path):
    text = path.read_text("utf-8")
    assert [name for name in modules(text) if not runs(name)] == []
    assert sorted(named_files(text) - TREE) == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_pages_are_short(path: Path):
    # A tutorial is a notebook: most of its lines are code that runs, read once from top to bottom
    # and not looked up.
    limit = 300 if path.parent.name == "tutorials" else 120
    assert len(path.read_text("utf-8").splitlines()) <= limit


@pytest.mark.parametrize("path", MAPS, ids=ids(MAPS))
def test_maps_of_folders_are_short_and_name_every_folder(path: Path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= 30
    inner = [
        p.name for p in path.parent.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))
    ]
    assert [name for name in inner if f"{name}/" not in text] == []


def test_readme_is_one_screen_and_has_both_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 90
    for name in ("main command", "test command"):  # .ci/run takes the second one from here
        assert re.search(
            rf"<!-- {name} -->\n```sh\npython3 -m venv [^\n]+\n```\n<!-- end -->", text
        ), name


def test_ratios_of_the_comparison_are_those_of_the_results():
    quoted = re.findall(
        r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", (ROOT / "docs/field.md").read_text("utf-8")
    )
    assert len(quoted) == 6
    results = (ROOT / "experiments/results/README.md").read_text("utf-8")
    assert [ratio for ratio in quoted if ratio not in results] == []


def test_index_links_every_page():
    linked = set(links((DESIGN / "README.md").read_text("utf-8")))
    assert {path.name for path in DESIGN.glob("*.md")} - {"README.md"} == {
        x for x in linked if "/" not in x
    }

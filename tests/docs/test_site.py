"""The documentation site: every public name is documented and in the reference, and a built site
has no broken link.
"""

from __future__ import annotations

import inspect
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from _generate import api, docstrings

import pagedjax
from tests import fresh_python
from tests.docs import built_pages

ROOT = Path(__file__).parents[2]
PUBLIC = api.public()
IDS = [f"{module}.{name}" for module, name, _ in PUBLIC]

# Names whose meaning is in the names and types of their fields.
WITHOUT_TEXT: set[str] = set()
# Properties that say nothing more than their names.
SELF_EVIDENT = {
    "pagedjax.Engine": {"is_sleeping", "model"},
    "pagedjax.PoolingParams": {"normalized"},
    "pagedjax.SamplingParams": {"greedy"},
    "pagedjax.models.DecoderConfig": {"layers", "qkv_rows"},
    "pagedjax.models.Model": {"weight_dtype"},
}
# Arrays without a shape in their text: the pages of a layer, as `attend` gets them.
WITHOUT_SHAPE = {"pagedjax.models.Decoder.attention_weights: k_pages"}

SHAPE = re.compile(r"\[\w[^\]]*\]")  # [T, N, D]
ARRAY = re.compile(r"\b(?:Array|ndarray)\b")


def has_text(module: str, name: str, item: Any) -> bool:
    """Whether a name has a text of its own: a docstring, or the comment of a constant."""
    if api.kind(item) == "data":
        home = sys.modules[module]
        return (
            bool(api.comment(home, name))
            or isinstance(item, dict)
            or not isinstance(item, (int, float, str))
        )
    return bool(docstrings.text_of(item))


def members(cls: type) -> dict[str, Any]:
    """The public methods and properties of a class itself."""
    kinds = (property, classmethod, staticmethod)
    return {
        name: item
        for name, item in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(item) or isinstance(item, kinds))
    }


def without_shape(function: Any) -> list[str]:
    """Array arguments whose text has no shape such as [T, D], and "return" for an array that is
    returned without one.

    An argument counts as an array if its annotation names one. Its text is that of its entry under
    Args. Without such an entry, the docstring's first part must have a shape. A result may name
    arguments whose shapes are given.
    """
    text = inspect.getdoc(function) or ""
    parts = re.split(r"^(Args|Returns|Raises):$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], map(inspect.cleandoc, parts[2::2]), strict=True))
    texts = {
        name: words
        for names, words in docstrings.entries(sections.get("Args", "").split("\n"))
        for name in names
    }
    missing = []
    for name, kind in inspect.unwrap(function).__annotations__.items():
        if not ARRAY.search(str(kind)):
            continue
        description = (
            sections.get("Returns", parts[0]) if name == "return" else texts.get(name, parts[0])
        )
        named = name == "return" and any(
            argument in description for argument, words in texts.items() if SHAPE.search(words)
        )
        if not named and not SHAPE.search(description):
            missing.append(name)
    return missing


def functions() -> dict[str, Any]:
    """Public functions, and methods of public classes, by full name."""
    public = {
        f"{module}.{name}": item for module, name, item in PUBLIC if api.kind(item) == "function"
    }
    for module, name, item in PUBLIC:
        for member, method in members(item).items() if api.kind(item) == "class" else ():
            plain = (
                method.fget if isinstance(method, property) else getattr(method, "__func__", method)
            )
            public[f"{module}.{name}.{member}"] = plain
    return public


@pytest.mark.parametrize(("module", "name", "item"), PUBLIC, ids=IDS)
def test_every_public_name_has_a_text(module: str, name: str, item: Any):
    full = f"{module}.{name}"
    assert has_text(module, name, item) != (full in WITHOUT_TEXT)
    if api.kind(item) == "class":
        silent = {member for member, value in members(item).items() if not inspect.getdoc(value)}
        assert silent == SELF_EVIDENT.get(full, set())


@pytest.mark.parametrize("module", api.MODULES)
def test_every_public_name_is_on_the_page_of_its_module(module: str):
    page = "\n".join(api.page(module)())
    for name in sys.modules[module].__all__:
        directive = rf"(?:auto(?:class|function):: {re.escape(module)}\.|py:data:: ){name}$"
        assert len(re.findall(directive, page, re.MULTILINE)) == 1, name


def test_a_function_without_a_shape_is_seen():
    def wrong(q: jax.Array, k: jax.Array, count: int) -> jax.Array:  # type: ignore[name-defined]  # noqa: F821
        """Args:
            q: [T, D] tokens.
            k: keys.

        Returns:
            the sums.
        """

    assert without_shape(wrong) == ["k", "return"]


def test_docstrings_give_the_shapes_of_arrays():
    arrays = {
        f"{name}: {argument}"
        for name, function in functions().items()
        for argument in without_shape(function)
    }
    assert arrays == WITHOUT_SHAPE
    assert (
        sum(
            bool(ARRAY.search(str(inspect.unwrap(item).__annotations__)))
            for item in functions().values()
        )
        >= 4
    )


def test_generators_load_without_what_they_describe():
    """conf.py can be read by tools without starting JAX."""
    names = "api, commands, docstrings, keys, links, rst, server, sources"
    program = (
        f"import sys; sys.path[:0] = ['docs']; from _generate import {names}; print(*sys.modules)"
    )
    loaded = set(fresh_python.output_of(program).split())
    assert {"jax", "numpy", "pagedjax", "fastapi", "sphinx"} & loaded == set()


def test_broken_links_and_foreign_files_are_seen(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="x"></h1><a href="#x"></a><a href="#y"></a><a href="b.html#z"></a><a href="c.html"></a>'
        '<a href="https://example.org/a"></a><script src="https://example.org/b.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="w"></p><img src="no%20such.png">')
    assert built_pages.broken(tmp_path) == [
        "a.html -> #y",
        "a.html -> b.html#z",
        "a.html -> c.html",
        "b.html -> no%20such.png",
    ]
    assert built_pages.foreign(tmp_path) == ["a.html -> https://example.org/b.js"]


def test_a_built_site_is_checked_by_a_command(tmp_path, capsys):
    assert built_pages.main(tmp_path) == 1  # there is no page
    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="#x"></a>')
    assert built_pages.main(tmp_path) == 0
    (tmp_path / "b.html").write_text('<a href="a.html#y"></a>')
    assert built_pages.main(tmp_path) == 1
    assert "b.html -> a.html#y\n2 pages, 1 links" in capsys.readouterr().out


def test_the_version_to_cite_is_the_package_s():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (cited["version"], cited["license"]) == (pagedjax.__version__, "Apache-2.0")


def inventory(path: Path) -> set[str]:
    """The names that a built site documents, from its objects.inv."""
    packed = path.read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_its_links_work(build_site: Callable[[], Path]):
    """One test, because the generated pages are written to one folder of the working tree."""
    folder = build_site()
    assert len(built_pages.pages_of(folder)) > 60
    assert built_pages.broken(folder) == []
    assert built_pages.foreign(folder) == []
    assert {f"{module}.{name}" for module, name, _ in PUBLIC} - inventory(
        folder / "objects.inv"
    ) == set()
    named = [
        page.name for page in built_pages.pages_of(folder) if str(ROOT) in page.read_text("utf-8")
    ]
    assert named == [], "a page has a path of this machine"

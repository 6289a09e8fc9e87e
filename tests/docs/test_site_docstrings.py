"""Docstrings as reStructuredText. docutils is the oracle: it finds no markup that the docstring
does not mean.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from _generate import api, rst
from _generate.docstrings import entries, field_names, field_texts, signature, text_of, to_rst
from hypothesis import example, given
from hypothesis import strategies as st

SIZES = """Sizes of a thing.

name: of the thing; `None` is all.
low, high: of its range,
    both included. step: between them.

    indented = code
"""

FUNCTION = """Computes y = x W^T.

Args:
    q, k: [T, D] *packed* tokens_
        of two lines.

    scale: no default

Returns:
    [T, D]; see `q`s.

Raises:
    ValueError: wrong shapes.
"""


@dataclass
class Sizes:
    name: str = ""
    low: int = 0
    high: int = 0
    step: int = 1


Sizes.__doc__ = SIZES


class Base(NamedTuple):
    number: int


def parse(lines: list[str]):
    """The document that docutils reads; any remark of it is an error."""
    core = pytest.importorskip("docutils.core", reason="the `docs` extra is not installed")
    options = {
        "report_level": 1,
        "halt_level": 1,
        "syntax_highlight": "none",
        "file_insertion_enabled": False,
    }
    return core.publish_doctree("\n".join(lines), settings_overrides=options)


def test_fields_are_a_list_of_definitions():
    assert to_rst(SIZES, field_names(Sizes)) == [
        "Sizes of a thing.",
        "",
        "``name``",
        "   of the thing; ``None`` is all.",
        "",
        "``low``, ``high``",
        "   of its range, both included.",
        "",
        "``step``",
        "   between them.",
        "",
        ".. code-block:: none",
        "",
        "   indented = code",
        "",
    ]
    assert to_rst("name: of what is no field") == ["name: of what is no field", ""]


def test_sections_are_fields_with_definitions():
    assert to_rst(FUNCTION) == [
        "Computes y = x W^T.",
        "",
        ":Arguments:",
        "   ``q``, ``k``",
        "      \\ [T, D] \\*packed\\* tokens\\_ of two lines.",
        "",
        "   ``scale``",
        "      no default",
        "",
        "",
        ":Returns:",
        "   \\ [T, D]; see ``q``\\ s.",
        "",
        "",
        ":Raises:",
        "   ``ValueError``",
        "      wrong shapes.",
        "",
        "",
    ]


def test_the_texts_of_fields_are_found_by_name():
    assert field_texts(Sizes) == {
        "name": "of the thing; `None` is all.",
        "low": "of its range, both included.",
        "high": "of its range, both included.",
        "step": "between them.",
    }
    assert entries(["a: b", "  c", "d, e: f"]) == [(("a",), "b c"), (("d", "e"), "f")]


def test_docstrings_that_python_writes_are_none():
    assert text_of(Base) == ""
    assert inspect.getdoc(Base) != ""

    class Inner(Sizes):
        pass

    assert text_of(Inner) == SIZES.strip()


def test_defaults_that_are_functions_have_no_address():
    text = "(a=<function f>, b=<function A.g at 0x7f01>, c=<function h.<locals>.<lambda> at 0x7f>, d: int = 3)"
    assert signature(text) == "(a=f, b=g, c=..., d: int = 3)"


def test_lists_and_columns_are_kept():
    assert to_rst("One:\n- a `b`\n  c\n- d") == ["One:", "", "- a ``b`` c", "- d", ""]
    assert to_rst("a.py    one\nbb.py   two") == [
        ".. code-block:: none",
        "",
        "   a.py    one",
        "   bb.py   two",
        "",
    ]


# Characters that mean something in reStructuredText, beside letters.
MARKUP = st.text(alphabet=" abi1.*_`|\\:-=+~#()[]{}<>\"'/,;\n", max_size=60)


@given(MARKUP)
def test_no_text_becomes_markup(text: str):
    """docutils reads back the same words as one paragraph, without a remark."""
    document = parse([rst.plain(text)])
    assert document.astext().split() == text.split()
    assert [node.tagname for node in document.children] in ([], ["paragraph"])


@given(MARKUP)
def test_no_paragraph_becomes_other_markup_than_code(text: str):
    document = parse([rst.inline(text)])
    assert "".join(document.astext().split()).replace("`", "") == "".join(text.split()).replace(
        "`", ""
    )
    kinds = {
        node.tagname
        for node in document.findall()
        if node.tagname not in ("#text", "document", "paragraph")
    }
    assert kinds <= {"literal"}


@given(st.lists(MARKUP, max_size=5).map("\n".join), st.sets(st.sampled_from(["a", "b", "i"])))
@example("i:", {"i"})  # an entry without words
@example("'`'_`", set())  # code that begins with the partner of the quote before it
def test_every_docstring_is_read_without_a_remark(text: str, fields: set[str]):
    parse(to_rst(text, fields))


@pytest.mark.parametrize(("module", "name", "item"), api.public())
def test_public_docstrings_are_read_without_a_remark(module: str, name: str, item: object):
    parse(to_rst(text_of(item), field_names(item)))

"""The pages of vLLM's names are made from the code's tables: `python -m
tests.vllm_names.test_document` writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagedjax.options.vllm_names import engine_arguments, request_arguments
from pagedjax.options.vllm_names.rows import Row

PAGES = [
    Path(__file__).parents[2] / "docs" / "design" / name for name in ("vllm.md", "vllm-engine.md")
]
NAMES = {
    key: value.split()
    for key, value in json.loads((Path(__file__).parent / "vllm-0.33.0.json").read_text()).items()
}
TABLES = {
    "engine": engine_arguments.TABLE,
    "sampling": request_arguments.SAMPLING,
    "beams": request_arguments.BEAM_SEARCH,
    "structured": request_arguments.STRUCTURED_OUTPUTS,
}
OF_VLLM = {
    "engine": {*NAMES["EngineArgs"], *NAMES["LLM"]},
    "sampling": {*NAMES["SamplingParams"]},
    "beams": {*NAMES["BeamSearchParams"]},
    "structured": {*NAMES["StructuredOutputsParams"]},
}


def markdown(rows: Sequence[Row]) -> str:
    lines = ["| arguments | what happens | as what, why, or what instead |", "|---|---|---|"]
    lines += [
        f"| {', '.join(f'`{name}`' for name in row.names)} | {row.effect} | {row.text} |"
        for row in rows
    ]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the tables of the code."""
    for name, rows in TABLES.items():
        section = f"<!-- {name} -->\n\n{markdown(rows)}\n\n<!-- end -->"
        text = re.sub(
            rf"<!-- {name} -->.*?<!-- end -->",
            lambda _, section=section: section,
            text,
            flags=re.DOTALL,
        )
    return text


def test_the_pages_show_the_tables_of_the_code():
    texts = [path.read_text("utf-8") for path in PAGES]
    assert [page(text) for text in texts] == texts, "run python -m tests.vllm_names.test_document"
    assert all(any(f"<!-- {name} -->" in text for text in texts) for name in TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_every_argument_of_vllm_has_one_row(name):
    arguments = [argument for row in TABLES[name] for argument in row.names]
    assert OF_VLLM[name] - set(arguments) == set()
    assert [argument for argument in arguments if arguments.count(argument) > 1] == []


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text("utf-8")), "utf-8")

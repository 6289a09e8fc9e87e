"""What the site generates: keys, command lines, endpoints and metrics, each against what it
describes; and links.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import _generate
import pytest
from _generate import commands, keys, links, server, sources

from pagedjax.options.config import EngineConfig

DOCS = Path(__file__).parents[2] / "docs"
DESIGN = DOCS / "design"


# keys ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    kind: Literal["inner"]
    size: int = 3  # of it


@dataclass(frozen=True)
class Outer:
    """A section.

    names: of `things`.
    """

    names: tuple[str, ...] = ()
    inner: Inner | None = None
    sizes: list[int] = field(default_factory=list)


def test_a_section_has_names_types_defaults_and_texts():
    assert list(keys.sections(Outer, "outer")) == [
        keys.Section(
            "outer",
            Outer,
            (
                keys.Key("names", "tuple[str, ...]", "()", "of `things`."),
                keys.Key("inner", "Inner | None", "None", ""),
                keys.Key("sizes", "list[int]", "list()", ""),
            ),
        ),
        keys.Section(
            "inner[inner]",
            Inner,
            (keys.Key("kind", "'inner'", None, ""), keys.Key("size", "int", "3", "of it")),
        ),
    ]


def test_every_field_of_the_engine_is_a_key_with_a_text():
    by_name = {key.name: key for key in keys.keys(EngineConfig)}
    assert list(by_name) == [f.name for f in dataclasses.fields(EngineConfig)]
    assert [name for name, key in by_name.items() if not key.text] == []
    assert (by_name["block_size"].type, by_name["block_size"].default) == ("int", "16")


def test_the_page_of_keys_has_each_key_of_an_experiment_once():
    from experiments.core.config import Experiment
    from experiments.core.workloads import Synthetic

    named = re.findall(r"^\.\. confval:: (\S+)$", "\n".join(keys.page()), re.MULTILINE)
    assert len(named) == len(set(named))
    assert {f.name for f in dataclasses.fields(Experiment)} <= set(named)
    assert {f"workload[synthetic].{f.name}" for f in dataclasses.fields(Synthetic)} <= set(named)
    assert {"speculative.num_tokens", "arrivals[poisson].rate", "changes.join"} <= set(named)


# command lines ------------------------------------------------------------------------------------


def test_no_command_takes_a_part_of_an_options_name():
    """A part that is clear today is not when an option is added, and may mean a file where a secret
    was meant.
    """
    every = {name: parser for name, parser, _ in commands.commands()}
    assert "pagedjax serve" in every
    assert [name for name, parser in every.items() if parser.allow_abbrev] == []


def test_the_parser_of_a_command_is_taken_before_anything_runs():
    ran = []

    def main(argv=None):
        parser = argparse.ArgumentParser(description="Does it.")
        parser.add_argument("--size", type=int, default=3, help="of it")
        ran.append(parser.parse_args(argv))

    command_parser = commands.parser_of(main)
    assert (command_parser.description, ran) == ("Does it.", [])
    assert command_parser.parse_args(["--size", "4"]).size == 4  # argparse is as it was


@pytest.mark.parametrize(
    ("main", "message"),
    [(lambda: None, "reads no words"), (lambda: exit(3), r"exits with 3 before")],
)
def test_a_command_without_a_parser_is_an_error(main, message: str):
    with pytest.raises(LookupError, match=message):
        commands.parser_of(main)


def test_a_section_has_the_usage_and_each_word():
    parser = argparse.ArgumentParser(prog="x", description="Does `it`.")
    parser.add_argument("file", help="to read")
    parser.add_argument("-n", "--count", type=int, default=0, metavar="N", help="of them")
    parser.add_argument("--kind", choices=("a", "b"), default="a")
    parser.add_argument("--at", type=Path, default=commands.ROOT / "configs")
    parser.add_argument("--secret", help=argparse.SUPPRESS)
    text = "\n".join(commands.section("run x", parser))
    assert "   run x [-h] [-n N] [--kind {a,b}] [--at AT] file" in text
    assert ".. option:: -n N, --count N\n\n   Of them. The default is ``0``.\n" in text
    assert ".. option:: --kind KIND\n\n   One of ``a``, ``b``. The default is ``a``.\n" in text
    assert "The default is ``configs``." in text
    assert "secret" not in text


def test_every_command_is_found_with_all_its_options():
    sections = {
        name: (parser, "\n".join(commands.section(name, parser)))
        for name, parser, _ in commands.commands()
    }
    assert {
        name.removeprefix("python -m ") for name in sections if name.startswith("python")
    } == set(commands.modules())
    for parser, text in sections.values():
        listed = set(
            re.findall(
                r"(?<=[ ,])--?[a-z][\w-]*", " ".join(re.findall(r"^\.\. option:: .*$", text, re.M))
            )
        )
        assert set(parser._option_string_actions) - {"-h", "--help"} == listed
    about = [name for name, (_, text) in sections.items() if str(commands.ROOT) in text]
    assert about == [], "a default is a path of this machine"


# the server ---------------------------------------------------------------------------------------


def test_the_page_of_endpoints_has_every_route():
    """The routes are read from the source, apart from the application."""
    source = "".join(
        path.read_text("utf-8") for path in (DOCS.parent / "pagedjax" / "server").glob("*.py")
    )
    routes = {
        f"``{method.upper()} {path.replace(':path', '')}``"
        for method, path, arguments in re.findall(r'@app\.(get|post)\("([^"]+)"(.*)\)', source)
        if "include_in_schema=False" not in arguments
    }
    page = server.endpoints_page()
    assert len(routes) >= 16
    assert routes == {
        line for line in page if re.match(r"``(GET|POST) /", line) and "``." not in line
    }
    assert "- ``since`` (query, ``integer``)" in page


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "integer"),
        ({}, "any value"),
        ({"anyOf": [{"$ref": "#/a/B"}, {"type": "null"}]}, "B | null"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, 'list of "a" | "b"'),
        ({"const": "a"}, '"a"'),
    ],
)
def test_a_schema_is_told_in_few_words(schema: dict, text: str):
    assert server.schema_type(schema) == text


def test_metrics_are_those_that_prometheus_reads():
    """Names, kinds and texts as Prometheus's own parser reads them from the server's answer."""
    from prometheus_client.parser import text_string_to_metric_families

    from pagedjax.server.metrics import Metrics

    config = server._config(speculative={"method": "ngram"}, enable_lora=True)
    answer = Metrics("m", config).text(0)
    families = {
        family.name: family
        for family in text_string_to_metric_families(answer)
        if not family.name.endswith("_created")
    }
    documented = {metric.name: metric for metric in server.metrics() if metric.kind != "info"}
    assert {name.removesuffix("_info") for name in set(families) - set(documented)} == {
        "pagedjax:cache_config"
    }
    for name, metric in documented.items():
        assert (families[name].type, families[name].documentation) == (metric.kind, metric.text)
        for sample in families[name].samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
    assert documented["pagedjax:spec_decode_num_drafts"].needs == "speculative"
    assert documented["pagedjax:lora_requests_info"].needs == "enable_lora"
    assert documented["pagedjax:request_success"].labels == ("model_name", "finished_reason")


# links and pages ----------------------------------------------------------------------------------

LINKED = """[in](b.md#x) [web](https://a.b/c) [`code`
of](../../pagedjax/llm.py) ![picture](../../no.png) [top](../../README.md#one-step)

```python
[not](../../a.py)
```
[last](../../tests/)
"""


def test_links_to_files_outside_go_to_the_repository_or_become_text():
    text = links.outside(LINKED, DESIGN / "a.md", DOCS, None)
    assert text == LINKED.replace("[`code`\nof](../../pagedjax/llm.py)", "`code`\nof").replace(
        "[top](../../README.md#one-step)", "top"
    ).replace("[last](../../tests/)", "last")
    text = links.outside(LINKED, DESIGN / "a.md", DOCS, "https://h/o/n/blob/main/")
    assert "[`code`\nof](https://h/o/n/blob/main/pagedjax/llm.py)" in text
    assert "[top](https://h/o/n/blob/main/README.md#one-step)" in text
    assert "[not](../../a.py)" in text


def test_no_page_keeps_a_link_that_leads_out():
    pages = list(DOCS.rglob("*.md"))
    for page in pages:
        for match in links.LINK.finditer(links.outside(page.read_text("utf-8"), page, DOCS, None)):
            assert re.match(r"[a-z]+:", match[3]) or not match[3].startswith("../.."), (
                page,
                match[0],
            )
    assert len(pages) > 50


def test_the_toctree_has_the_order_of_the_index():
    index = (DESIGN / "README.md").read_text("utf-8")
    order = links.pages_in_order(index)
    assert set(order) == {page.stem for page in DESIGN.glob("*.md")} - {"README"}
    assert order[:2] == links.pages_in_order(
        "[a](" + order[0] + ".md) [b](" + order[1] + ".md#x) [a](c/d.md)"
    )
    assert links.with_toctree("[a](b.md)\n").endswith("```{toctree}\n:hidden:\n\nb\n```\n")


def test_pages_are_written_once_and_old_ones_go(tmp_path):
    (tmp_path / "old.rst").write_text("x")
    written = _generate.write(tmp_path, {"a.rst": lambda: ["one", ""]})
    assert (written, [path.name for path in tmp_path.iterdir()]) == (
        [tmp_path / "a.rst"],
        ["a.rst"],
    )
    before = (tmp_path / "a.rst").stat().st_mtime_ns
    _generate.write(tmp_path, {"a.rst": lambda: ["one"]})
    assert (tmp_path / "a.rst").stat().st_mtime_ns == before
    assert (tmp_path / "a.rst").read_text() == "one\n"


def test_a_changed_line_and_a_new_name_change_the_digest(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.py").write_text("1")
    digests = [sources.digest([tmp_path / "p"]), sources.digest([tmp_path / "p"])]
    (tmp_path / "p" / "a.py").write_text("2")
    digests.append(sources.digest([tmp_path / "p"]))
    (tmp_path / "p" / "a.py").rename(tmp_path / "p" / "b.py")
    digests.append(sources.digest([tmp_path / "p"]))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_index_of_the_reference_lists_every_generated_page():
    listed = set(
        re.findall(
            r"^generated/(\S+)$", (DOCS / "reference" / "index.md").read_text("utf-8"), re.MULTILINE
        )
    )
    assert listed == {name.removesuffix(".rst") for name in _generate.pages()}

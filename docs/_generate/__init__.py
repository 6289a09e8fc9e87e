"""What the documentation site generates from the code, when it is built. conf.py calls `write`;
nothing ships this.

It lies beside conf.py, because only the site and its tests need it: neither the library nor
experiments may.

rst.py           text and lists as reStructuredText, with every special character escaped
docstrings.py    a docstring in the form that this project uses -> reStructuredText; the texts of fields in it
api.py           a page for each public module
keys.py          the keys of an engine's config and of an experiment's YAML, from the dataclasses
commands.py      every command line, from its argparse parser
server.py        endpoints from the OpenAPI document, options, and metrics from their registry
links.py         links of pages to files outside docs/; the order of the design pages
sources.py       a digest of the code that tutorials run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

Page = Callable[[], list[str]]


def pages() -> dict[str, Page]:
    """By name of the page's file: the function that returns its lines."""
    from _generate import api, commands, keys, server

    found: dict[str, Page] = {f"{module}.rst": api.page(module) for module in api.MODULES}
    return found | {
        "config-keys.rst": keys.page,
        "commands.rst": commands.page,
        "endpoints.rst": server.endpoints_page,
        "metrics.rst": server.metrics_page,
    }


def write(folder: Path, contents: Mapping[str, Page] | None = None) -> list[Path]:
    """Writes the pages into a folder and removes others from it -> the files.

    A file whose content is the same is not touched, so that Sphinx does not read it again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, page in (pages() if contents is None else contents).items():
        target, text = folder / name, "\n".join(page()).rstrip() + "\n"
        if not target.exists() or target.read_text("utf-8") != text:
            target.write_text(text, "utf-8")
        written.append(target)
    for old in set(folder.glob("*.rst")) - set(written):
        old.unlink()
    return written

"""Links of pages to files outside docs/, which the site does not have; and the order of the design
pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(\s*([^()\s]+)\s*\)")
FENCE = re.compile(r"^( {0,3})(`{3,}|~{3,}).*?^\1\2[`~]*[ ]*$", re.MULTILINE | re.DOTALL)


def outside(text: str, page: Path, docs: Path, base: str | None) -> str:
    """A page's Markdown with links that work in the site.

    A link to a file outside `docs` becomes one to the repository's file at `base`, a web address
    such as https://host/owner/name/blob/main. Without a base it becomes its text. Code is left as
    it is.

    Args:
        page: the file of the text.
        docs: the folder of the site's pages, at the top of the repository.
    """

    def moved(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        name, _, anchor = target.partition("#")
        if mark or not name or re.match(r"[a-z]+:", target):
            return match[0]
        place = (page.parent / name).resolve()
        if place.is_relative_to(docs.resolve()):
            return match[0]
        if not base:
            return words
        path = place.relative_to(docs.resolve().parent).as_posix()
        return f"[{words}]({base.rstrip('/')}/{path}{'#' if anchor else ''}{anchor})"

    return _without_code(text, lambda part: LINK.sub(moved, part))


def _without_code(text: str, change: Callable[[str], str]) -> str:
    """Changes what is not in a fence of code."""
    found, end = "", 0
    for fence in FENCE.finditer(text):
        found += change(text[end : fence.start()]) + fence[0]
        end = fence.end()
    return found + change(text[end:])


def pages_in_order(index: str) -> list[str]:
    """The pages of its own folder that an index links, in its order, each once, without .md."""
    targets = [match[3].partition("#")[0] for match in LINK.finditer(index)]
    return list(
        dict.fromkeys(
            name.removesuffix(".md") for name in targets if re.fullmatch(r"[\w-]+\.md", name)
        )
    )


def with_toctree(index: str) -> str:
    """An index with a hidden table of contents, so that its pages have the order of its links."""
    return "\n".join(
        [index.rstrip(), "", "```{toctree}", ":hidden:", "", *pages_in_order(index), "```", ""]
    )

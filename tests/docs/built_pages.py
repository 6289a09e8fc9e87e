"""What is read from the HTML of a built site: names of anchors, links and pictures.

python -m tests.docs.built_pages build/docs        prints links and anchors that do not resolve; exit status 1 if any
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse


class Read(NamedTuple):
    """anchors: the ids of a page. targets: what its links, pictures, scripts and styles name."""

    anchors: set[str]
    targets: list[str]


def read(page: str) -> Read:
    """Reads the text of an HTML page."""
    contents = Read(set(), [])

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            attributes = dict(attrs)
            contents.anchors.update(
                value for name in ("id", "name") if (value := attributes.get(name))
            )
            contents.targets.extend(
                value for name in ("href", "src") if (value := attributes.get(name))
            )

    Parser().feed(page)
    return contents


def pages_of(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.rglob("*.html"))
        if "_static" not in path.relative_to(folder).parts
    ]


def broken(folder: Path) -> list[str]:
    """Return `page -> target` for each local target that does not exist, or whose anchor does not."""
    contents = {path.resolve(): read(path.read_text("utf-8")) for path in pages_of(folder)}
    links = []
    for path, (_, targets) in contents.items():
        for target in targets:
            address = urlparse(target)
            if address.scheme or address.netloc:
                continue
            place = (path.parent / unquote(address.path)).resolve() if address.path else path
            anchor = unquote(address.fragment)
            target_contents = contents.get(place)
            if not place.is_file() or (
                anchor and target_contents and anchor not in target_contents.anchors
            ):
                links.append(f"{path.relative_to(folder.resolve())} -> {target}")
    return links


def foreign(folder: Path) -> list[str]:
    """Scripts, styles and pictures of other machines: a page with one of them needs a network."""
    links = []
    for path in pages_of(folder):
        for target in read(path.read_text("utf-8")).targets:
            address = urlparse(target)
            if address.netloc and address.path.endswith((".js", ".css", ".png", ".svg", ".woff2")):
                links.append(f"{path.name} -> {target}")
    return links


def main(folder: Path) -> int:
    """Print what is wrong with a built site. Returns the exit status."""
    count = len(pages_of(folder))
    wrong = [*broken(folder), *foreign(folder)]
    print(
        *wrong, f"{count} pages, {len(wrong)} links that do not resolve or need a network", sep="\n"
    )
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""Text and lists as reStructuredText. All text is escaped, so that no character of a docstring
becomes markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SPECIAL = re.compile(r"([\\*_|`])")
# What could begin a list, a directive, a field, a table or a title at the start of a line. Code
# could not.
STARTS = re.compile(r"(?!``)[^\w\s]|\(?([A-Za-z]|[\d#]+|[ivxlcdmIVXLCDM]+)[.)](\s|$)")


def plain(text: str) -> str:
    """Text without any markup, on one line."""
    text = SPECIAL.sub(r"\\\1", " ".join(text.split()))
    return _not_at_the_start(text)


def literal(text: str) -> str:
    """Code within a line."""
    text = " ".join(text.split())
    return f"``{text}``" if text and "``" not in text and not text.endswith("\\") else plain(text)


def inline(text: str) -> str:
    """A paragraph whose code is in backticks, on one line. A backtick without a partner stays a
    backtick.
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = ["`".join(parts[-2:])]
    found = ""
    for i, part in enumerate(parts):
        if i % 2 and part.strip():
            # behind a quote or bracket too: code that begins with its partner, as in ('), would be
            # no code
            found += ("\\ " if found and not re.search(r"[\s/:-]$", found) else "") + literal(part)
            after = parts[i + 1][:1]
            found += "\\ " if after and not re.match(r"[\s)\]}\"'/:.,;!?-]", after) else ""
        else:
            words = SPECIAL.sub(r"\\\1", re.sub(r"\s+", " ", part))
            found += words
    return _not_at_the_start(found.strip())


def _not_at_the_start(text: str) -> str:
    """Escaped text whose first and last characters are no markup of a block either."""
    text = f"\\ {text}" if STARTS.match(text) else text
    return f"{text[:-1]}\\:" if text.endswith("::") else text


def indented(lines: Iterable[str], by: int = 3) -> list[str]:
    return [" " * by + line if line else "" for line in lines]


def code(lines: Iterable[str], language: str = "none") -> list[str]:
    """A block of code, as it is."""
    return [f".. code-block:: {language}", "", *indented(lines), ""]


def definitions(items: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Terms that are markup already, each with the lines that explain it."""
    found: list[str] = []
    for term, lines in items:
        found += [term, *(indented(lines) if any(lines) else [f"   {NOTHING}"]), ""]
    return found


NOTHING = ".."  # an explanation of no words, a comment, without which a term is a paragraph


def directive(
    name: str, argument: str, lines: Iterable[str] = (), **options: str | None
) -> list[str]:
    """A directive; an option that is None is left out."""
    given = [
        f"   :{key.replace('_', '-')}: {value}".rstrip()
        for key, value in options.items()
        if value is not None
    ]
    return [f".. {name}:: {argument}".rstrip(), *given, "", *indented(lines), ""]


def title(text: str, line: str = "=") -> list[str]:
    text = inline(text)
    return [text, line * len(text), ""]

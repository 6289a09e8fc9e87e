"""A scheduler's state as one SVG picture, for notebooks and papers.

It shows the block tables, and the pool that they point into.

    drawing.draw(state)                      shown by a notebook (`_repr_svg_`)
    drawing.draw(state).svg                  the text of the picture

The page of a run (document.py) moves through steps in a browser. This picture is one state, without
a script.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import NamedTuple

from pagedjax.host import scheduler
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import HOLE, Seq

MOST_BLOCKS = 1024  # of a pool that a person can still read
MOST_ENTRIES = 1024  # of all block tables together
ENTRIES_ACROSS = 8  # cells in a line of a block table
BLOCKS_ACROSS = 18  # cells in a line of the pool
# Pixels
ENTRY_WIDTH = 64  # width of a table's cell, with the gap behind it
ENTRY_HEIGHT = 18  # height of a table's cell
GAP = 4  # between cells
BLOCK_SIDE = 30  # side of a pool's cell, with the gap behind it
LINE_HEIGHT = 46  # height of a table's line
NAMES_WIDTH = 120  # room for names
TOP_MARGIN = 14  # room above
HUE_STEP = 137.508  # degrees between the hues of neighbours in arrival, as on the viewer's page
INK = "#1b1f27"
SOFT = "#5d6675"
FREE = "#ffffff"
FREE_LINE = "#b9c0cc"
IDLE = "#d5d9e1"


class Drawing(NamedTuple):
    """A picture as SVG text, which a notebook shows."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg


def draw(state: SchedulerState) -> Drawing:
    """Draws the block tables of all running sequences, the queue, and the owner of every block.

    A cell of a block table is a block with its slots in token order: dark where keys and values are
    in the cache, pale where a token is known and not computed yet, white where no token is. In the
    pool a block has the colours of its owners (two, if it is shared), or it is idle (grey) or empty
    (white). Block 0 is the trash block.

    Raises:
        ValueError: more blocks, or more entries of block tables, than a picture can show.
    """
    num_blocks = state.pool.num_blocks
    running = scheduler.running(state)
    entries = sum(len(seq.blocks) for seq in running)
    for subject, count, limit in (
        ("the pool has", num_blocks, MOST_BLOCKS),
        ("the block tables have", entries, MOST_ENTRIES),
    ):
        if count > limit:
            raise ValueError(
                f"{subject} {count} blocks, and a drawing shows at most {limit}; "
                "draw a smaller engine, or record the run and open it with `pagedjax view`"
            )
    body = []
    y = TOP_MARGIN
    for seq in running:
        lines, y = _table(seq, state.config.block_size, state.config.groups, y)
        body += lines
    body.append(_text(4, y + 12, f"waiting: {_queue(state)}", fill=SOFT))
    lines, height = _pool(state, running, y + 26)
    width = (
        max(NAMES_WIDTH + ENTRIES_ACROSS * ENTRY_WIDTH, NAMES_WIDTH + BLOCKS_ACROSS * BLOCK_SIDE)
        + 10
    )
    label = (
        f"{len(running)} running sequences, {len(state.waiting)} waiting, "
        f"{state.pool.num_free} of {num_blocks} free"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{label}" '
        'font-family="sans-serif" font-size="11">'
    )
    paper = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return Drawing("\n".join([head, paper, *body, *lines, "</svg>"]))


def colour(arrival: int, *, light: float = 0.5) -> str:
    """The colour of a sequence as #rrggbb, by its number of arrival."""
    red, green, blue = colorsys.hls_to_rgb((210 + arrival * HUE_STEP) % 360 / 360, light, 0.6)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _table(seq: Seq, size: int, groups: int, top: int) -> tuple[list[str], int]:
    """Returns (lines, y below them) of a sequence's block table.

    It is drawn once for each group of layers.
    """
    lines = [
        _text(
            4,
            top + 14,
            _short(seq.request_id, 16),
            weight="bold",
            fill=colour(seq.arrival, light=0.35),
        ),
        _text(4, top + 28, f"computed {seq.computed} of {seq.length}", fill=SOFT),
    ]
    y = top
    for group in range(groups):
        blocks = seq.blocks[group::groups]
        for i, block in enumerate(blocks):
            x = NAMES_WIDTH + i % ENTRIES_ACROSS * ENTRY_WIDTH
            lines += _entry(seq, block, i * size, size, x, y + i // ENTRIES_ACROSS * LINE_HEIGHT)
        y += max(1, -(-len(blocks) // ENTRIES_ACROSS)) * LINE_HEIGHT
    return lines, y


def _entry(seq: Seq, block: int, first: int, size: int, x: int, y: int) -> Iterator[str]:
    """One entry of a block table. first: the position of the token in its first slot."""
    computed_slots, known_slots = (
        min(max(count - first, 0), size) for count in (seq.computed, seq.length)
    )
    note = f"tokens {first} to {first + size - 1}: {known_slots} known, {computed_slots} computed"
    attributes = f'data-sequence="{escape(_printable(seq.request_id))}" data-block="{block}"'
    counts = f'data-known="{known_slots}" data-computed="{computed_slots}"'
    yield f'<g class="entry" {attributes} {counts}><title>{note}</title>'
    if block == HOLE:
        yield _rect(x, y, ENTRY_WIDTH - GAP, ENTRY_HEIGHT, FREE, FREE_LINE, dash="3 3")
    else:
        slot = (ENTRY_WIDTH - GAP) / size
        yield _rect(x, y, ENTRY_WIDTH - GAP, ENTRY_HEIGHT, FREE, FREE_LINE)
        yield _rect(x, y, slot * known_slots, ENTRY_HEIGHT, colour(seq.arrival, light=0.85))
        yield _rect(x, y, slot * computed_slots, ENTRY_HEIGHT, colour(seq.arrival))
        if size <= 16:  # more lines between slots would hide their colours
            yield from (
                f'<path d="M{x + slot * i:g} {y}v{ENTRY_HEIGHT}" stroke="#ffffff" stroke-width="0.7"/>'
                for i in range(1, size)
            )
        yield _rect(x, y, ENTRY_WIDTH - GAP, ENTRY_HEIGHT, "none", INK)
    name = "hole" if block == HOLE else str(block)
    yield _text(x + (ENTRY_WIDTH - GAP) / 2, y + 31, name, anchor="middle") + "</g>"


def _pool(state: SchedulerState, running: tuple[Seq, ...], top: int) -> tuple[list[str], int]:
    """Every block of the pool, in order of id -> (lines, y below it)."""
    pool = state.pool
    owners: dict[int, list[Seq]] = {}
    for seq in running:
        for block in seq.blocks:
            owners.setdefault(block, []).append(seq)
    count = f"{pool.num_blocks - pool.num_free} of {pool.num_blocks} blocks owned"
    lines = [_text(4, top + 14, "block pool", weight="bold"), _text(4, top + 28, count, fill=SOFT)]
    for block in range(pool.num_blocks + 1):
        x = NAMES_WIDTH + block % BLOCKS_ACROSS * BLOCK_SIDE
        y = top + block // BLOCKS_ACROSS * BLOCK_SIDE
        block_owners = owners.get(block, []) if block else []
        if not block:
            kind = "trash"
        elif block_owners:
            kind = "owned"
        else:
            kind = "idle" if block in pool.stamps else "empty"
        lines += _cell(block, kind, block_owners, x, y)
    bottom = top + (pool.num_blocks // BLOCKS_ACROSS + 1) * BLOCK_SIDE
    note = (
        "0: trash block, for padding; white: empty; grey: idle, content can be found; "
        "two colours: shared"
    )
    return [*lines, _text(NAMES_WIDTH, bottom + 14, note, fill=SOFT)], bottom + 24


def _cell(block: int, kind: str, owners: list[Seq], x: int, y: int) -> Iterator[str]:
    """One block of the pool."""
    names = ", ".join(seq.request_id for seq in owners)
    yield f'<g class="block" data-block="{block}" data-state="{kind}" data-owners="{len(owners)}">'
    yield f"<title>block {block}: {escape(_printable(names)) or kind}</title>"
    side = BLOCK_SIDE - GAP
    yield _rect(x, y, side, side, IDLE if kind == "idle" else FREE, FREE_LINE)
    for i, seq in enumerate(owners[:2]):
        yield _rect(x, y + i * side / 2, side, side / (1 + i), colour(seq.arrival, light=0.75))
    if kind == "trash":
        yield f'<path d="M{x} {y}l{side} {side}m0 {-side}l{-side} {side}" stroke="{FREE_LINE}"/>'
    yield (
        _text(
            x + side / 2,
            y + side / 2 + 4,
            str(block),
            anchor="middle",
            fill=INK if owners else SOFT,
        )
        + "</g>"
    )


def _queue(state: SchedulerState) -> str:
    """The first sequences of the queue, in words."""
    names = [
        f"{_short(seq.request_id, 12)} ({seq.length} tokens)" for seq in islice(state.waiting, 6)
    ]
    if not names:
        return "no sequence"
    hidden = len(state.waiting) - len(names)
    hidden_note = f" and {hidden} more" if hidden else ""
    return ", ".join(names) + hidden_note


def _short(name: str, length: int) -> str:
    name = _printable(name)
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _printable(text: str) -> str:
    """The text without what cannot be printed: XML cannot have most control characters, and a
    request may have any name.
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def _rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    line: str = "none",
    dash: str = "none",
) -> str:
    position = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {position} fill="{fill}" stroke="{line}" stroke-dasharray="{dash}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = INK
) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'

"""Counts the bundles (instruction words) that a row of a TPU kernel executes.

They are counted in libtpu's final schedule.
A schedule's length says little about a row: most of its time is in loops. The text marks loops
("LB:" begins one, as many ">" as it is deep) and predicated regions (a branch to "$regionN", which
ends at "empty region N"). Each bundle is counted as often as the loops around it turn. It is a
count and not a time: a wait for memory is one bundle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

LINE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s*(LB|PF|PB|LH|LE)?\s*:\s*(>*)\s*(.*)")
PRODUCT = re.compile(r"mxu|vmatmul|vmatpush")
COPY = re.compile(r"dma\.hbm_to_vmem")
WAIT = re.compile(r"vsyncadd")
# How deep these loops are: the grid is 1
ITEM = 2
STEP = 3
DELAY = 4  # bundles after a branch that are still executed, at most


class Bundle(NamedTuple):
    mark: str  # LB: a loop begins; PF: a predicated region has ended
    depth: int
    text: str


class Trips(NamedTuple):
    """How often the loops of a row turn."""

    steps: int
    pages: int  # of a step
    heads: int  # bodies of the loop over key heads


def of_a_row(schedule: str, trips: Trips) -> int:
    """Returns the bundles that a row executes, from a `final_bundles.txt` of the attention kernel.

    It is 0, which means not known, if the loop over steps is not found. The row's context fills its
    steps, so nothing is cleared. Every step also starts the copies of a later one.

    Raises:
        ValueError: the text has no loop with products in it, so it is no such schedule.
    """
    bundles = [
        Bundle(m[1] or "", len(m[2]), m[3]) for m in map(LINE.match, schedule.splitlines()) if m
    ]
    item = next(
        (span for span in _loops(bundles, ITEM, 0, len(bundles)) if _has(bundles, span, PRODUCT)),
        None,
    )
    if item is None:
        raise ValueError("libtpu's schedule has no loop with products; has its text another form?")
    counts = [1] * len(bundles)
    loops = list(_loops(bundles, STEP, *item))
    if not any(_has(bundles, span, COPY) and _has(bundles, span, PRODUCT) for span in loops):
        return 0
    for span in loops:
        stepping = _has(bundles, span, COPY)
        for i in range(*span):
            counts[i] *= trips.steps if stepping else trips.heads
        for inner in _loops(bundles, STEP + 1, *span) if stepping else ():
            product = _has(bundles, inner, PRODUCT)
            moving = _has(bundles, inner, COPY) or _has(bundles, inner, WAIT)
            for i in range(*inner):
                counts[i] *= trips.heads if product else trips.pages if moving else 1
        for skipped in _regions(bundles, *span) if stepping else ():
            if not any(_has(bundles, skipped, pattern) for pattern in (PRODUCT, COPY, WAIT)):
                counts[slice(*skipped)] = [0] * (skipped[1] - skipped[0])
    return sum(counts[slice(*item)])


def _has(bundles: list[Bundle], span: tuple[int, int], pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(bundle.text) for bundle in bundles[slice(*span)])


def _loops(bundles: list[Bundle], depth: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields [first, last + 1) of the loops of a depth.

    A loop goes from its mark to the branch back, and the bundles that still run after it.
    """
    for i in range(begin, end):
        if bundles[i].mark == "LB" and bundles[i].depth == depth:
            names = "|".join(re.findall(r"Start region (\d+)", bundles[i].text))
            back = re.compile(rf"sbr\.rel .*target = \$region({names})\b")
            last = next((j for j in range(i, end) if names and back.search(bundles[j].text)), None)
            if last is not None:
                slots = range(last + 1, min(last + 1 + DELAY, end))
                yield i, next((j for j in slots if bundles[j].mark), slots.stop)


def _regions(bundles: list[Bundle], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields [first, last + 1) of the predicated regions."""
    for i in range(begin, end):
        target = re.search(r"sbr\.rel \(.*?target = \$region(\d+)", bundles[i].text)
        if target:
            ended = re.compile(rf"empty region {target[1]}\b")
            past = (
                j
                for j in range(i + 1, end)
                if bundles[j].mark == "PF" and ended.search(bundles[j].text)
            )
            if (stop := next(past, None)) is not None:
                yield i + 1, stop

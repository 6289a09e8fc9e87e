"""The page of `pagedjax blame`: who delayed whom, as matrices. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.analysis import pages
from experiments.analysis.sweep_points import number
from experiments.laboratory.blame import Audit, Matrix, Result, caused, order, suffered
from experiments.laboratory.whatif_page import signed

MOST_GROUPS = 40  # rows and columns of a matrix
DARKEST = 55  # per cent of the colour behind the largest number; text on it is readable


class About(NamedTuple):
    """What the page says beside the numbers.

    name: of the recording.
    command: that makes this page.
    links: to the viewer's pages of the worst cases, in their order; "": there is none.
    links_note: why there are none.
    """

    name: str
    command: str
    links: Sequence[str]
    links_note: str = ""


def page(audit: Audit, result: Result, about: About) -> str:
    """The HTML of a result."""
    unit = "seconds" if result.unit == "s" else result.unit
    matrices = [
        {
            "title": f"Added by each {result.by}",
            "note": f"The time of the others' requests with all, minus that without it, in {unit}. "
            "This does not add up to the delays: of two groups, either of which would be enough "
            "for a delay, none has added it.",
            "grid": grid(audit, result.added),
            "sum": "all others",
        }
    ]
    if result.shares is not None:
        how = "Exact."
        if result.shares.permutations:
            how = (
                f"Over {result.shares.permutations} orders that were drawn, with the interval of "
                "95 %."
            )
        shares = result.shares
        matrices.append(
            {
                "title": f"The delay of each {result.by}, shared among the others",
                "note": f"Shapley values in {unit}, which add up to the delay: the time of a "
                f"{result.by} with all minus its time alone. {how}",
                "grid": grid(audit, shares.shares, shares.error, shares.errors),
                "sum": "delay",
            }
        )
    cases = [
        case._asdict() | {"text": signed(case.seconds), "link": link}
        for case, link in zip(result.worst, about.links, strict=True)
    ]
    return pages.filled(
        "blame.html.jinja",
        name=about.name,
        by=result.by,
        unit=unit,
        reading=list(reading(audit, result)),
        tiles=tiles(audit, result),
        matrices=matrices,
        groups=len(audit.groups),
        most_groups=MOST_GROUPS,
        cases=cases,
        links_note=about.links_note,
        notes=[f"Not exact: {count} {name}" for name, count in audit.inexact.items()],
        command=about.command,
    )


def reading(audit: Audit, result: Result) -> list[str]:
    """What the page says first."""
    matrix = result.added if result.shares is None else result.shares.shares
    worst = max(audit.groups, key=lambda name: caused(matrix, name))
    texts = [
        f"{worst} causes most of what others wait: {number(caused(matrix, worst))} {result.unit}."
    ]
    if audit.seconds_of_step:
        error = audit.seconds_of_step.model.error
        texts.append(
            f"Seconds are those of a fit to the recorded steps, in every run; its median error is "
            f"{error:.1%}."
        )
    return texts


def tiles(audit: Audit, result: Result) -> list[dict[str, str]]:
    """The main numbers."""
    requests = sum(map(len, audit.groups.values()))
    numbers = []
    if result.shares is not None:
        total = sum(result.delays.values())
        note = "the sum of all shares"
        numbers.append(("total delay", total, result.unit, note))
    numbers += [
        (f"groups by {result.by}", len(audit.groups), "", f"{requests} requests"),
        ("runs", audit.num_runs, "", "of the recorded scheduler, with some of the groups"),
    ]
    return [
        {"value": number(value), "unit": unit, "title": title, "note": note}
        for title, value, unit, note in numbers
    ]


def grid(
    audit: Audit,
    matrix: Matrix,
    total_errors: Mapping[str, float] = {},
    share_errors: Mapping[tuple[str, str], float] = {},
) -> dict[str, Any]:
    """A matrix as rows of cells, each with its number and the strength of its colour.

    total_errors, share_errors: `error` and `errors` of `Shares`.
    """
    groups = list(audit.groups)
    rows, columns = order(groups, matrix, MOST_GROUPS)
    largest = max(map(abs, matrix.values()), default=0.0)

    def cell(value: float, error: float | None = None, scale: float = 0.0) -> dict[str, Any]:
        return {
            "text": signed(value),
            "range": "" if error is None else f"± {number(error, 2)}",
            "sign": "more" if value > 0 else "less",
            "shade": round(DARKEST * abs(value) / scale) if scale else 0,
        }

    def cell_of(causer: str, sufferer: str) -> dict[str, Any] | None:
        if causer == sufferer:
            return None
        pair = (causer, sufferer)
        return cell(matrix[pair], share_errors.get(pair), scale=largest)

    return {
        "columns": columns,
        "rows": [
            {
                "name": name,
                "total": cell(caused(matrix, name), total_errors.get(name)),
                "cells": [cell_of(name, sufferer) for sufferer in columns],
            }
            for name in rows
        ],
        "sums": [cell(suffered(matrix, name)) for name in columns],
        "total": cell(sum(matrix.values())),
    }

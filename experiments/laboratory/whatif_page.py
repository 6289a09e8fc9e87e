"""The page of `pagedjax whatif`: both runs of each request on one axis. Pure functions.

Only the lines in view are elements of the page (whatif.js.jinja), so it opens quickly with
thousands of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.analysis import pages
from experiments.analysis.sweep_points import number
from experiments.laboratory import paired
from experiments.laboratory.outcomes import Outcome, by_request
from experiments.laboratory.prediction import Prediction

MOST_REQUESTS = 20_000  # that are drawn; each takes some 150 bytes of the page
MOST_GROUPS = 40  # in the table
PLACES = 6  # of a second; a clock has no more
DECIMALS = 5  # that are shown; ten microseconds of a difference are nothing to a reader


class Bar(NamedTuple):
    """A request in one run, in seconds or steps of the run.

    admitted, step: when a step first admitted it, and the number of that step; None: none did.
    ended: when its last sequence ended, by itself or not; None: one did not.
    first_token, mean_gap, largest_gap, end: see `paired.Times`.
    """

    came: float
    admitted: float | None
    step: int | None
    ended: float | None
    preemptions: int
    first_token: float | None
    mean_gap: float | None
    largest_gap: float | None
    end: float | None


class About(NamedTuple):
    """What the page says beside the numbers.

    name: of the recording.
    changes, reading, notes: sentences.
    totals: (name, recorded, changed).
    command: that makes this page.
    parts_at: the step at which the runs part; None: at none, or they are of several engines.
    steps: the link to the viewer's page of both runs; "": there is none.
    steps_note: why there is none.
    """

    name: str
    changes: Sequence[str]
    reading: Sequence[str]
    notes: Sequence[str]
    totals: Sequence[tuple[str, float, float]]
    command: str
    parts_at: int | None = None
    steps: str = ""
    steps_note: str = ""


def page(prediction: Prediction, about: About) -> str:
    """The HTML of a prediction."""
    timed = prediction.times is not None
    groups = list(dict.fromkeys(row.group for row in prediction.table))
    shown_groups = set(groups[:MOST_GROUPS])
    rows = [row for row in prediction.table if row.group in shown_groups]
    measures = [
        {"field": field, "name": words(field)}
        for field in paired.MEASURES
        if any(row.measure == field for row in rows)
    ]
    requests = drawn_requests(prediction)
    has_intervals = any(row.low for row in rows)
    return pages.filled(
        "whatif.html.jinja",
        name=about.name,
        changes="; ".join(about.changes),
        reading=[*about.reading, f"{len(prediction.before)} requests."],
        steps=about.steps,
        steps_note=about.steps_note,
        parts_at=about.parts_at,
        tiles=[tile(*total) for total in about.totals],
        table=table(rows),
        unit_name="seconds" if timed else "steps",
        confidence=f"{100 * paired.CONFIDENCE:.0f} %" if has_intervals else "",
        groups_left_out=len(groups) - len(shown_groups),
        drawn=sentence_of_drawn(len(requests), len(prediction.before)),
        measures=measures,
        notes=about.notes,
        command=about.command,
        data={
            "unit": "s" if timed else "steps",
            "ends": [rounded(prediction.recorded.end), rounded(prediction.changed.end)],
            "fields": Bar._fields,
            "names": [(field, words(field)) for field in paired.MEASURES],
            "steps": about.steps,
            "requests": requests,
        },
    )


def tile(name: str, before: float, after: float) -> dict[str, str]:
    """A total of both runs as a main number."""
    unit = "s" if name.endswith("_s") else ""
    return {
        "value": number(after),
        "unit": unit,
        "title": words(name.removesuffix("_s")),
        "note": f"recorded: {number(before)} {unit}".rstrip(),
    }


def table(rows: Sequence[paired.Row]) -> dict[str, Any]:
    """The paired differences as a table that can be sorted."""
    heads = [{"title": title, "unit": ""} for title in ("group", "time")]
    heads += [{"title": name, "unit": "difference"} for name in paired.STATISTICS]
    heads += [
        {"title": title, "unit": ""} for title in ("median recorded", "median changed", "requests")
    ]
    body = []
    for row in rows:
        cells: list[dict[str, Any]] = [
            {"text": row.group, "sort": row.group},
            {"text": words(row.measure), "sort": row.measure},
        ]
        for place, value in enumerate(row.differences):
            cell = {"text": signed(value), "sort": value}
            if row.low:
                cell["range"] = f"{signed(row.low[place])} .. {signed(row.high[place])}"
            cells.append(cell)
        cells += [
            {"text": short(value), "sort": value} for value in (row.before, row.after, row.requests)
        ]
        body.append({"cells": cells})
    return {"heads": heads, "body": body}


def drawn_requests(prediction: Prediction) -> list[list[Any]]:
    """The requests as the script reads them: id, user, class, and a `Bar` of each run. Of more than
    MOST_REQUESTS, those that differ most, in the order in which they came.
    """
    recorded = prediction.recorded.outcomes
    changed = prediction.changed.outcomes
    before = bars(recorded, paired.came(recorded, recorded, {}), prediction.before)
    came = paired.came(recorded, changed, prediction.change.predecessors)
    after = bars(changed, came, prediction.after)
    firsts = sorted(before)
    if len(firsts) > MOST_REQUESTS:
        firsts.sort(key=lambda first: -_distance(before[first], after.get(first)))
        firsts = sorted(firsts[:MOST_REQUESTS])
    return [
        [
            recorded[first].request.request_id,
            recorded[first].request.user,
            recorded[first].request.service_class,
            before[first],
            after.get(first),
        ]
        for first in firsts
    ]


def sentence_of_drawn(drawn: int, count: int) -> str:
    """How many requests the page has."""
    if drawn == count:
        return f"{count} requests."
    return f"The {drawn} of {count} requests whose times differ most; --json has all."


def _distance(before: Bar, after: Bar | None) -> float:
    """By how much a request differs."""
    if after is None:
        return float("inf")
    for field in ("end", "first_token"):
        a = getattr(before, field)
        b = getattr(after, field)
        if a is not None and b is not None:
            return abs(b - a)
    return 0.0


def bars(
    outcomes: Mapping[int, Outcome],
    came: Mapping[int, float],
    times: Mapping[int, paired.Times],
) -> dict[int, Bar]:
    """The bar of each request of a run, by the arrival of its first sequence."""
    result: dict[int, Bar] = {}
    for first, group in by_request(outcomes).items():
        admissions = [
            (outcome.admitted, outcome.admitted_step)
            for outcome in group
            if outcome.admitted is not None
        ]
        admitted, step = min(admissions, default=(None, None))
        ends = [outcome.ended for outcome in group if outcome.ended is not None]
        ended = max(ends) if len(ends) == len(group) else None
        result[first] = Bar(
            rounded(came[first]),
            rounded(admitted),
            step,
            rounded(ended),
            sum([outcome.preemptions for outcome in group]),
            rounded(times[first].first_token),
            rounded(times[first].mean_gap),
            rounded(times[first].largest_gap),
            rounded(times[first].end),
        )
    return result


def rounded(value: float | None) -> Any:
    """A time in as many digits as the page needs."""
    return None if value is None else round(value, PLACES)


def words(name: str) -> str:
    """The name of a field in words."""
    return name.replace("_", " ")


def short(value: float) -> str:
    """A number in three digits, and at most DECIMALS after the point."""
    if abs(value) < 10**-DECIMALS / 2:
        return "0"
    if value == round(value):
        return number(value)
    places = min(DECIMALS, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{places}f}".replace(",", "\u2009")


def signed(value: float) -> str:
    """A difference with its sign."""
    return f"+{short(value)}" if value > 0 else short(value)

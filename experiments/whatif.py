"""What would another policy, or another configuration, have done with a recorded run?

    pagedjax whatif run.jsonl --policy shortest --page shortest.html
    pagedjax whatif run.jsonl --set block_size=8 --set max_num_batched_tokens=512 --record other.jsonl
    pagedjax whatif run.jsonl --replicas 2 --router least_loaded --loop closed
    pagedjax whatif run.jsonl --policy sjf --confirm smollm2-135m

The recording must replay byte for byte. Then the changed scheduler runs on its requests, with the
recorded tokens. As long as it decides the same, the recorded times hold. From the first other
decision on, a step takes the seconds of a fit to the recorded steps, plus the deviation of the
recorded step from that fit. Without times, steps are counted. The table has the paired differences,
request by request. A positive difference is later in the changed run. Below the differences of all
requests is their interval of 90 %, which follows from the fit's error (docs/guides/what_if.md).

With `--confirm`, a real engine is run so too, and must decide the same, with the same blocks.

Exit status: 0; 1 if the engine of `--confirm` decides otherwise; 2 if the recording cannot be used
or cannot have this change.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from experiments.analysis.sweep_points import aligned
from experiments.core import kept_blocks
from experiments.laboratory import command, confirming, paired, rerun, whatif_page
from experiments.laboratory.clock import Clock
from experiments.laboratory.past import Past
from experiments.laboratory.prediction import LOOPS, Prediction, Reading, predict
from experiments.laboratory.rerun import Change
from pagedjax import routing
from pagedjax.commands.options import EXAMPLES, name_or_mapping
from pagedjax.host import policies, scheduler
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.options.config import PrefixCheckpoints
from pagedjax.options.own_names import names_own_value

if TYPE_CHECKING:
    from experiments.laboratory.confirmation import Confirmation

SHOWN = 5  # users, or classes, in the table of the terminal
FIXED = ("views", "shares_filling")  # fields of the configuration that a recording cannot change


def main(words: Sequence[str] | None = None) -> int:
    return command.run(_parser(), words, _run, lambda options: f"cannot change {options.recording}")


def _run(options: argparse.Namespace) -> int:
    """Predicts, and confirms if the options say so -> 1 if a confirmation does not hold, else 0."""
    confirming.check(options)
    _check(options)
    recorded = command.read(options.recording, options)
    confirming.check_recording(recorded, options)
    prediction = predict(
        recorded,
        change_of(recorded, options),
        router=routing.find(options.router),
        replicas=options.replicas,
        loop=options.loop,
        draws=options.draws,
        buckets=options.buckets,
    )
    for line in lines(recorded, prediction, options):
        print(line)
    if options.record:
        rerun.record(options.record, rerun.run(recorded, prediction.change))
        view = command.view_command(
            (options.recording, recorded.own_policy),
            (options.record, prediction.change.own_policy),
        )
        print(
            f"wrote {options.record}; `{view}` shows both runs, and `pagedjax diff` their first "
            "difference"
        )
    result = as_json(recorded, prediction, options)
    confirmation = confirming.confirmation(recorded, prediction, options)
    if confirmation is not None:
        for line in confirming.lines(confirmation, options.confirm):
            print(line)
        result["confirmation"] = confirming.as_json(confirmation)
    if options.page:
        _write_page(recorded, prediction, options, confirmation)
    command.write_json(options.json, result)
    return 0 if confirmation is None or confirmation.holds else 1


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be, before anything runs."""
    if options.draws < 0:
        raise ValueError(f"draws is {options.draws}; it must be at least 0")
    if options.replicas < 1:
        raise ValueError(f"replicas is {options.replicas}; it must be at least 1")
    if options.record and options.replicas > 1:
        raise ValueError(
            f"replicas is {options.replicas}, and --record writes the recording of one "
            "engine; leave it out, or take --json"
        )
    written = [options.record] if options.record else []
    command.check_results(options, "whatif", recordings=[options.recording], written=written)


def change_of(recorded: Past, options: argparse.Namespace) -> Change:
    """What the options change.

    Raises:
        ValueError: no such field or policy, or a value that is not allowed.
    """
    change = rerun.unchanged(recorded)
    if options.policy is not None:
        own_policy = options.policy if names_own_value(options.policy) else None
        change = change._replace(policy=policies.find(options.policy), own_policy=own_policy)
    values = dict(map(_setting, options.set))
    size = values.get("block_size", recorded.config.block_size)
    if recorded.config.views and size != recorded.config.block_size:
        raise ValueError(
            f"block_size is {size}, and queries of the recorded run see a number of blocks of "
            f"{recorded.config.block_size} tokens, whose window in tokens a recording does not "
            "tell; leave it as it was, or record a run with that block size"
        )
    if values.get("prefix_checkpoints") and not any(
        view.window is not None for view in recorded.config.views
    ):
        raise ValueError(
            "--set gives prefix_checkpoints, and all layers of the recorded engine see whole "
            "sequences, so that a prefix is found at every boundary; leave it out"
        )
    config = recorded.config._replace(**values)
    scheduler.init(config)
    caching = False if options.without_caching else None
    return change._replace(config=config, caching=caching)


def _setting(text: str) -> tuple[str, Any]:
    """A field of the configuration and its value, from "NAME=VALUE"."""
    name, sign, value = text.partition("=")
    names = [field for field in SchedulerConfig._fields if field not in FIXED]
    if not sign or name not in names:
        raise ValueError(
            f"--set {text!r} names no field of the scheduler; write NAME=VALUE with one of "
            f"{', '.join(names)}"
        )
    if name == "reservation":
        return name, value
    if name == "prefix_checkpoints":
        return name, PrefixCheckpoints.read(name_or_mapping(EXAMPLES[name])(value))
    if name in ("chunked_prefill", "mixed_steps"):
        switches = {"true": True, "false": False}
        if value.lower() not in switches:
            raise ValueError(f"{name} is {value!r}; it must be true or false")
        return name, switches[value.lower()]
    try:
        return name, int(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r}; it must be a whole number") from None


# --- output ---------------------------------------------------------------------------------------


def lines(recorded: Past, prediction: Prediction, options: argparse.Namespace) -> Iterator[str]:
    """The result as lines for a terminal."""
    before = prediction.recorded
    after = prediction.changed
    yield f"{options.recording} replays byte for byte: {len(recorded.requests)} requests"
    yield f"changed: {'; '.join(changes(recorded, prediction, options)) or 'nothing'}"
    yield from reading(prediction, options)
    unit = _unit(recorded)
    yield ""
    yield aligned(
        {
            "": ["recorded", "changed"],
            **{
                name.replace("_", " "): [_number(total_before), _number(total_after)]
                for name, total_before, total_after in _totals(before, after, unit)
            },
        }
    )
    yield ""
    yield f"paired differences, changed - recorded ({unit})"
    yield _table(prediction.table)
    yield from [f"NOTE: {note}" for note in notes(recorded, prediction)]


def reading(prediction: Prediction, options: argparse.Namespace) -> Iterator[str]:
    """Where the runs part, and how far seconds can be trusted."""
    if prediction.identical:
        yield f"identical: none of {prediction.recorded.steps} steps decides differently"
    elif options.replicas == 1:
        step = _parting(prediction.changed)
        yield f"the runs differ from step {step} on, first in {prediction.kind!r}"
    if prediction.times is not None:
        error = prediction.times.model.error
        yield f"seconds are those of a fit to the recorded steps; its median error is {error:.1%}"
    if sentence := kept_blocks.sentence(prediction.change.config):
        yield sentence


def changes(recorded: Past, prediction: Prediction, options: argparse.Namespace) -> Iterator[str]:
    """What differs from the recorded run, in words."""
    change = prediction.change
    policy = change.own_policy or change.policy.name
    recorded_policy = recorded.own_policy or recorded.policy.name
    if policy != recorded_policy:
        yield f"policy {recorded_policy} -> {policy}"
    fields = recorded.config._asdict()
    for name, value in change.config._asdict().items():
        if value != fields[name]:
            yield f"{name} {fields[name]} -> {value}"
    if change.caching is False:
        yield "no prefix caching"
    if options.replicas > 1:
        yield f"{options.replicas} replicas behind the router {options.router}"
    if change.predecessors:
        followers = len(change.predecessors)
        yield f"{followers} requests come after the end of another one ({options.loop})"


def _parting(after: Reading) -> int:
    assert after.parting is not None, "the caller asks only if the runs differ"
    return after.parting[0]


def _totals(before: Reading, after: Reading, unit: str) -> Iterator[tuple[str, float, float]]:
    """Sums of both runs."""
    for name in ("steps", "preemptions", "cached_tokens", "rejected"):
        yield name, getattr(before, name), getattr(after, name)
    if unit == "s":
        yield "end_s", before.end, after.end


def _table(table: Sequence[paired.Row]) -> str:
    """The rows of the largest groups; those of all requests with their intervals below."""
    groups = list(dict.fromkeys(row.group for row in table))
    largest: list[str] = []
    for kind in ("all", "user", "class"):
        largest += [group for group in groups if group.split()[0] == kind][:SHOWN]
    texts: list[list[str]] = []
    for row in table:
        if row.group not in largest:
            continue
        texts.append(
            [
                row.group,
                row.measure.replace("_", " "),
                str(row.requests),
                _number(row.before),
                _number(row.after),
                *[_signed(number) for number in row.differences],
            ]
        )
        if row.low and row.group == paired.EVERYBODY:
            pairs = zip(row.low, row.high, strict=True)
            texts.append([""] * 5 + [f"{_signed(low)} .. {_signed(high)}" for low, high in pairs])
    names = ["group", "time", "requests", "recorded", "changed", *paired.STATISTICS]
    columns = zip(*texts, strict=True) if texts else [()] * len(names)
    text = aligned(dict(zip(names, columns, strict=True)))
    left_out = len(groups) - len(largest)
    return f"{text}\n({left_out} smaller groups are in --json)" if left_out else text


def notes(recorded: Past, prediction: Prediction) -> Iterator[str]:
    """What is not exact, or not in the table, with its number."""
    changed = prediction.changed
    if not prediction.identical:
        yield from _notes_on_the_clock(recorded, prediction.change)
    for name, number in changed.inexact.items():
        yield f"not exact: {number} {name}"
    clock = prediction.change.seconds
    if isinstance(clock, Clock) and not prediction.identical:
        if changed.beyond:
            yield (
                f"not exact: {changed.beyond} steps have more tokens than any recorded one; their "
                "seconds are proportional to their tokens"
            )
        if clock.stalls:
            yield (
                f"{len(clock.stalls)} recorded steps took more than 3 times the fit, "
                f"{_number(sum(clock.stalls))} s more in all; the changed run waits as long in the "
                "steps of the same numbers"
            )
    requests = len(prediction.before)
    ends = sum([times.end is not None for times in prediction.before.values()])
    if ends < requests:
        yield (
            f"{requests - ends} recorded requests did not end by themselves; only their first "
            "tokens are compared"
        )


def _notes_on_the_clock(recorded: Past, change: Change) -> Iterator[str]:
    """What is not exact, because it depends on times that the changed run does not have."""
    cancelled = sum([output.ended == "abort" for output in recorded.outputs.values()])
    if cancelled:
        yield (
            f"not exact: {cancelled} sequences were cancelled by their clients, or by a timeout, and "
            "are cancelled at the same times here, whatever they have by then"
        )
    if change.policy.timed:
        yield (
            f"not exact: the policy {change.policy.name} reads the clock, and here that is the "
            "clock of the predicted steps"
        )
    if any(output.drafts for output in recorded.outputs.values()):
        yield (
            "not exact: the recorded drafts come again at the same lengths; a drafter that learns "
            "from other requests would give others"
        )


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+.3g}" if value else "0"


def _write_page(
    recorded: Past,
    prediction: Prediction,
    options: argparse.Namespace,
    confirmation: Confirmation | None,
) -> None:
    """Writes the page, and beside it the viewer's page of both runs, if the recording is short."""
    path = Path(options.page)
    steps = path.with_name(f"{path.stem}.steps.html")
    sentences = list(reading(prediction, options))
    if confirmation is not None:
        sentences.append(confirming.summary(confirmation, options.confirm))
    about = whatif_page.About(
        name=Path(options.recording).name,
        changes=list(changes(recorded, prediction, options)),
        reading=[f"{sentence[:1].upper()}{sentence[1:]}." for sentence in sentences],
        notes=list(notes(recorded, prediction)),
        totals=list(_totals(prediction.recorded, prediction.changed, _unit(recorded))),
        command=options.command_line,
    )
    if options.replicas > 1:
        note = "The viewer shows the steps of one engine, so there is no page of these."
        about = about._replace(steps_note=note)
    elif not command.has_steps_page(options.recording):
        note = f"{command.TOO_LONG} --record writes the changed run, for pagedjax view."
        about = about._replace(steps_note=note)
    else:
        with tempfile.TemporaryDirectory() as folder:
            changed = options.record or Path(folder, "changed.jsonl")
            if not options.record:
                rerun.record(changed, rerun.run(recorded, prediction.change))
            names = (about.name, f"{about.name}, changed")
            text = command.steps_page(
                (options.recording, recorded.policy),
                (changed, prediction.change.policy),
                names=names,
            )
        command.write_page(steps, text)
        about = about._replace(steps=quote(steps.name))
    if options.replicas == 1 and prediction.changed.parting is not None:
        number, plan = prediction.changed.parting
        about = about._replace(parts_at=number if plan is None else plan.step)
    command.write_page(path, whatif_page.page(prediction, about))


def _unit(recorded: Past) -> str:
    return "s" if recorded.timed else "steps"


def as_json(recorded: Past, prediction: Prediction, options: argparse.Namespace) -> dict[str, Any]:
    """The whole result: both runs, the table with all groups, and every request."""
    changed = prediction.changed
    unit = _unit(recorded)
    return {
        "recording": options.recording,
        "changed": list(changes(recorded, prediction, options)),
        "identical": prediction.identical,
        "parts_at_step": None if changed.parting is None else changed.parting[0],
        "parts_in": prediction.kind,
        "unit": unit,
        "fit_error": None if prediction.times is None else prediction.times.model.error,
        "confidence": paired.CONFIDENCE if any(row.low for row in prediction.table) else None,
        "totals": {
            name: {"recorded": before, "changed": after}
            for name, before, after in _totals(prediction.recorded, changed, unit)
        },
        "inexact": dict(changed.inexact),
        "notes": list(notes(recorded, prediction)),
        "statistics": paired.STATISTICS,
        "table": [row._asdict() for row in prediction.table],
        "requests": [
            {
                "id": request.request_id,
                "user": request.user,
                "class": request.service_class,
                "recorded": prediction.before[first]._asdict(),
                "changed": prediction.after[first]._asdict() if first in prediction.after else None,
            }
            for first, request in recorded.requests.items()
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = command.new_parser(
        "whatif", "What would another policy or configuration have done with a recorded run?"
    )
    parser.add_argument("recording", metavar="RUN", help="a recording")
    parser.add_argument("--policy", help="of the changed run; a name, or mine.py:NAME")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of the scheduler's configuration, e.g. block_size=8; may be given again",
    )
    parser.add_argument(
        "--without-caching", action="store_true", help="the changed run shares no prefixes"
    )
    parser.add_argument(
        "--loop",
        choices=tuple(LOOPS),
        default="open",
        help="when requests come: at their times; when a client is free (closed); after the end of "
        "the user's request before (sessions)",
    )
    parser.add_argument("--replicas", type=int, default=1, help="equal engines behind a router (1)")
    parser.add_argument(
        "--router", default="least_loaded", help="of the replicas; a name, or mine.py:NAME"
    )
    parser.add_argument(
        "--draws", type=int, default=20, help="runs for the intervals (20); 0: no intervals"
    )
    parser.add_argument(
        "--buckets",
        type=_sizes,
        help="the engine's token_buckets, e.g. 16,64,256, if they are not the default ones",
    )
    confirming.add_options(parser)
    parser.add_argument("--record", metavar="FILE", help="write the changed run as a recording")
    command.add_results(
        parser, page="write a page with both runs of every request on one time axis"
    )
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, text.split(","))))


if __name__ == "__main__":
    sys.exit(main())

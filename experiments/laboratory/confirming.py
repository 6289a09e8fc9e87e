"""The options of `pagedjax whatif` that run a real engine, and what they print (confirmation.py)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from experiments.core.strict_yaml import load_text
from experiments.laboratory import differences, engine_tokens, measured, past
from experiments.laboratory.past import Past
from experiments.laboratory.prediction import Prediction
from pagedjax.host.event_log import check_target

if TYPE_CHECKING:
    from experiments.laboratory.confirmation import Confirmation, OwnTokens

SHOWN = 5  # sequences whose own tokens differ, in the text
NEED_AN_ENGINE = ("engine", "sampling", "real_time", "record_engine")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to the parser of `whatif`."""
    parser.add_argument(
        "--confirm",
        metavar="MODEL",
        help="also run the changed configuration on a real engine with this model, with the same "
        "inputs before the same steps and the recorded tokens, and compare",
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="with --confirm: a further argument of LLM, e.g. dtype=bfloat16; may be given again",
    )
    parser.add_argument(
        "--sampling",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="with --confirm: how all recorded requests sampled, e.g. temperature=0; the engine "
        "also samples its own tokens so, and they are compared; may be given again",
    )
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="with --confirm: also run the requests at their times, and show the measured medians",
    )
    parser.add_argument(
        "--record-engine", metavar="FILE", help="with --confirm: write the engine's recording"
    )


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that cannot be, before anything runs."""
    if options.confirm is None:
        for name in NEED_AN_ENGINE:
            if getattr(options, name):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is for --confirm MODEL, which is not given")
        return
    if options.replicas > 1:
        raise ValueError(
            f"replicas is {options.replicas}, and --confirm runs one engine; leave one of them out"
        )
    settings(options.engine, "--engine")
    settings(options.sampling, "--sampling")
    if options.record_engine:
        check_target(options.record_engine)
        past.check_other_file(options.record_engine, (options.recording,))


def check_recording(recorded: Past, options: argparse.Namespace) -> None:
    """Raises Refused if an engine cannot repeat a run, before one is loaded."""
    if options.confirm is not None:
        engine_tokens.check(recorded, real_time=options.real_time)


def settings(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Values by names, from texts such as "NAME=VALUE" with a value in YAML.

    Raises:
        ValueError: a text has another form.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise ValueError(f"{option} {text!r} is no setting; write NAME=VALUE")
        values[name] = load_text(value, f"{option} {text!r}")
    return values


def confirmation(
    recorded: Past, prediction: Prediction, options: argparse.Namespace
) -> Confirmation | None:
    """Runs the engine, if the options ask for it."""
    if options.confirm is None:
        return None
    from experiments.laboratory.confirmation import confirm  # an engine takes seconds to import

    return confirm(
        recorded,
        prediction,
        options.confirm,
        buckets=options.buckets,
        options=settings(options.engine, "--engine"),
        sampling=settings(options.sampling, "--sampling") if options.sampling else None,
        real_time=options.real_time,
        record=options.record_engine,
    )


def summary(result: Confirmation, model: str) -> str:
    """Whether a prediction holds, in words."""
    if not result.holds:
        return f"not confirmed by {model}"
    return (
        f"confirmed by {model}: {result.steps} steps decide the same, with the same blocks, and "
        f"{result.tokens} tokens are the same"
    )


def lines(result: Confirmation, model: str) -> Iterator[str]:
    """A confirmation as lines for a terminal."""
    yield ""
    if result.holds:
        yield summary(result, model)
    else:
        yield f"{summary(result, model)} (A is the prediction, B the engine):"
        yield differences.text(result.difference)
    yield from [f"NOTE: {note}" for note in notes(result)]
    if result.own_tokens is not None:
        yield from _lines_of_own_tokens(result.own_tokens)
    if result.times:
        yield ""
        yield measured.text_of(result.times)


def notes(result: Confirmation) -> Iterator[str]:
    """What the engine got in the place of recorded inputs."""
    if result.inputs.made_up:
        yield (
            "the prompts are made up: they share the blocks that the recorded ones share, because "
            "the recording has no prompts, or a cache salt or an adapter that it does not name"
        )
    if result.inputs.stand_ins:
        yield (
            f"{len(result.inputs.stand_ins)} recorded tokens are beyond the model's vocabulary; "
            "others stand for them"
        )
    if result.without_meaning:
        yield (
            f"{result.without_meaning} tokens are made up: they are of requests that the recording "
            "saw cut off"
        )


def _lines_of_own_tokens(tokens: OwnTokens) -> Iterator[str]:
    yield (
        f"tokens that the engine samples itself: {tokens.equal} of {tokens.sequences} sequences "
        "have the recorded ones"
    )
    for token in tokens.differences[:SHOWN]:
        yield (
            f"  {token.request_id!r} differs from output token {token.index} on: "
            f"{_token_text(token.recorded)} in the recording, {_token_text(token.sampled)} here"
        )
    if len(tokens.differences) > SHOWN:
        yield f"  and {len(tokens.differences) - SHOWN} more, in --json"


def _token_text(token: int | None) -> str:
    return "the end" if token is None else str(token)


def as_json(result: Confirmation) -> dict[str, Any]:
    """A confirmation as JSON."""
    tokens = result.own_tokens
    return {
        "confirmed": result.holds,
        "steps": result.steps,
        "tokens": result.tokens,
        "difference": differences.as_json(result.difference),
        "notes": list(notes(result)),
        "own_tokens": None
        if tokens is None
        else {
            "sequences": tokens.sequences,
            "equal": tokens.equal,
            "differences": [token._asdict() for token in tokens.differences],
        },
        "times": [{**cell._asdict(), "error": cell.error} for cell in result.times],
    }

"""All readers of a step's outcome, and what an engine does with them. A new output of steps is one
file with a `Reader`, and its name in `READERS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from immutables import Map

from pagedjax.device.side_outputs import NOTHING, SideOutputs, union
from pagedjax.engine import given_tokens, pooling, results, taps, token_masks
from pagedjax.engine.outcome import Entries, NewRequest, Outcome, Reader
from pagedjax.engine.requests import EngineRequest, SequenceData
from pagedjax.host.types import Choice, FinishReason, Plan

READERS: tuple[Reader, ...] = (
    results.SEARCHES,
    results.LOGPROBS,
    pooling.POOLS,
    taps.TAPS,
    token_masks.MASKS,
    given_tokens.GIVEN_TOKENS,
)

Readers = Map[str, Entries]  # by the name of a reader, for the readers that have entries


class StepReading(NamedTuple):
    """What all readers have read of a step, together (see `Reading`).

    readers: the entries of all readers after the step.
    outputs: the results, by the reader's name.
    """

    readers: Readers
    outputs: Mapping[str, Any]
    choices: Mapping[str, Choice]
    ends: Mapping[str, FinishReason]


def start(readers: Readers, request: NewRequest) -> Readers:
    """Adds the entries of a new request.

    Raises:
        ValueError: a reader refuses the request.
    """
    params = request.submitted.params
    for reader in READERS:
        if not isinstance(params, reader.params):
            continue
        if reader.options and not any(_sets(request, option) for option in reader.options):
            continue
        entries = reader.start(request)
        if entries:
            readers = readers.set(reader.name, readers.get(reader.name, Map()).update(entries))
    return readers


def _sets(request: NewRequest, option: str) -> bool:
    """Whether a request sets an option of its parameters, or of its own."""
    submitted = request.submitted
    if option in EngineRequest._fields:
        return bool(getattr(submitted, option))
    return getattr(submitted.params, option) is not None


def read(readers: Readers, outcome: Outcome) -> StepReading:
    """Let all readers read what a step computed."""
    outputs: dict[str, Any] = {}
    choices: dict[str, Choice] = {}
    ends: dict[str, FinishReason] = {}
    for reader, entries in _asked(readers):
        reading = reader.read(entries, outcome)
        readers = readers.set(reader.name, reading.entries)
        if reading.result:
            outputs[reader.name] = reading.result
        choices |= reading.choices
        ends |= reading.ends
    return StepReading(readers, outputs, choices, ends)


def _asked(readers: Readers) -> list[tuple[Reader, Entries]]:
    """The readers that have entries, with these."""
    return [(reader, readers[reader.name]) for reader in READERS if reader.name in readers]


def side_outputs_of(readers: Readers, sequence_ids: Iterable[str]) -> SideOutputs:
    """What a step with these sequences returns beside samples."""
    if not readers:
        return NOTHING
    ids = tuple(sequence_ids)
    parts = set()
    for reader, entries in _asked(readers):
        parts |= {reader.side_outputs(entries[name]) for name in ids if name in entries}
    parts.discard(NOTHING)
    return union(parts) if parts else NOTHING


def masks_of(
    readers: Readers, plan: Plan, sequences: Mapping[str, SequenceData]
) -> Mapping[int, bytes]:
    """For each sample of a plan that may not have all tokens, the mask of those that it may have,
    by the index of the sample.
    """
    masks: dict[int, bytes] = {}
    for reader, entries in _asked(readers):
        if reader.masks:
            masks |= reader.masks(entries, plan, sequences)
    return masks


def decide(readers: Readers, plan: Plan) -> bool:
    """Whether a reader decides how the sequences of a plan continue, so that the step after it
    cannot be predicted.
    """
    entries_by_reader = _asked(readers)
    return any(
        reader.decides(entries, plan) for reader, entries in entries_by_reader if reader.decides
    )


def restarted(readers: Readers) -> Readers:
    """The entries when running sequences return to the queue and are computed again."""
    for reader, entries in _asked(readers):
        readers = readers.set(reader.name, reader.restarted(entries))
    return readers


def without(readers: Readers, names: Iterable[str]) -> Readers:
    """The entries without the sequences `names`, which have ended."""
    for reader, entries in readers.items():
        for name in names:
            if name in entries:
                entries = entries.delete(name)
        readers = readers.set(reader, entries) if entries else readers.delete(reader)
    return readers

"""All readers of a step's outcome, and what an engine does with them. A new output of steps is one
file with a `Reader`, and its name in `READERS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from immutables import Map

from pagedjax.device.taps import NOTHING, SideOutputs, union
from pagedjax.engine import pooling, results, taps, token_masks
from pagedjax.engine.outcome import Entries, NewRequest, Outcome, Propose, Reader, Tokens
from pagedjax.engine.requests import SequenceData, of_rows
from pagedjax.host.types import Choice, FinishReason, Plan

READERS: tuple[Reader, ...] = (
    results.SEARCHES,
    results.LOGPROBS,
    pooling.POOLS,
    taps.TAPS,
    token_masks.MASKS,
)

Readers = Map[str, Entries]  # by the name of a reader; of those that have entries


class Read(NamedTuple):
    """What all readers have read of a step; fields as in `Reading`. outputs: by the reader's
    name.
    """

    readers: Readers
    outputs: Mapping[str, Any]
    choices: Mapping[str, Choice]
    ends: Mapping[str, FinishReason]


def start(readers: Readers, request: NewRequest) -> Readers:
    """The entries with those of a new request.

    Raises:
        ValueError: a reader refuses the request.
    """
    params = request.submitted.params
    for reader in READERS:
        if not isinstance(params, reader.params):
            continue
        if reader.options and all(getattr(params, name) is None for name in reader.options):
            continue
        entries = reader.start(request)
        if entries:
            readers = readers.set(reader.name, readers.get(reader.name, Map()).update(entries))
    return readers


def read(readers: Readers, outcome: Outcome) -> Read:
    """Let all readers read what a step computed."""
    outputs: dict[str, Any] = {}
    choices: dict[str, Choice] = {}
    ends: dict[str, FinishReason] = {}
    for reader in READERS:
        if reader.name not in readers:
            continue
        reading = reader.read(readers[reader.name], outcome)
        readers = readers.set(reader.name, reading.entries)
        if reading.result:
            outputs[reader.name] = reading.result
        choices |= reading.choices
        ends |= reading.ends
    return Read(readers, outputs, choices, ends)


def side_outputs_of(readers: Readers, sequence_ids: Iterable[str]) -> SideOutputs:
    """What a step with these sequences returns beside samples."""
    if not readers:
        return NOTHING
    ids = tuple(sequence_ids)
    parts = set()
    for reader in READERS:
        entries = readers.get(reader.name, Map())
        parts |= {reader.side_outputs(entries[name]) for name in ids if name in entries}
    parts.discard(NOTHING)
    return union(parts) if parts else NOTHING


def without(readers: Readers, names: Iterable[str]) -> Readers:
    """The entries without those of sequences that have ended."""
    for reader, entries in readers.items():
        for name in names:
            if name in entries:
                entries = entries.delete(name)
        readers = readers.set(reader, entries) if entries else readers.delete(reader)
    return readers


def restarted(readers: Readers) -> Readers:
    """The entries when running sequences return to the queue and are computed again."""
    for reader in READERS:
        if reader.name in readers:
            readers = readers.set(reader.name, reader.restarted(readers[reader.name]))
    return readers


def masks_of(
    readers: Readers, plan: Plan, sequences: Mapping[str, SequenceData]
) -> Mapping[int, bytes]:
    """By the index of the sample, the tokens that the samples of a plan may have; of those that may
    not have all.
    """
    masks: dict[int, bytes] = {}
    for reader in READERS:
        if reader.masks and reader.name in readers:
            masks |= reader.masks(readers[reader.name], plan, of_rows(plan, sequences))
    return masks


def drafts_of(
    readers: Readers, name: str, data: SequenceData, length: int, k: int, propose: Propose
) -> Tokens:
    """At most k drafts behind the known tokens of a sequence: those of a reader that makes some for
    it, else what `propose` returns.
    """
    for reader in READERS:
        if reader.drafts and name in readers.get(reader.name, Map()):
            return reader.drafts(readers[reader.name][name], data, length, k, propose)
    return propose(data.tokens[:length], k)[:k]


def decide(readers: Readers, plan: Plan) -> bool:
    """Whether a reader decides how the sequences of a plan continue, so that the step after it
    cannot be predicted.
    """
    return any(
        reader.name in readers and reader.decides(readers[reader.name], plan) for reader in READERS
    )

"""`Digest`: a hash of all inputs and transitions of one engine, and the lines that name a
difference.
"""

from __future__ import annotations

import json
from hashlib import blake2b

from pagedjax.engine.lookahead import Lookahead
from pagedjax.engine.requests import Sequences
from pagedjax.engine.state import EngineState, ScheduledStep
from pagedjax.host.event_log import Entry, Schedule, Written, line_of


class Digest:
    """A hash of the lines of an event log, and of inputs.

    Attributes:
        lines: the lines since the last step.
    """

    def __init__(self) -> None:
        self._written: Written = {}
        self._hash = blake2b(digest_size=16)
        self.lines: list[str] = []

    def write(self, entry: Entry) -> None:
        """Add a transition."""
        self._add(line_of(entry, self._written))

    def _add(self, line: str) -> None:
        self._hash.update(line.encode())
        self.lines.append(line)

    def input(self, name: str, text: str) -> None:
        """Add an input, after the transitions that it caused.

        Args:
            text: the JSON that was sent.
        """
        if name == "reset":  # no sequence is left, and ids may come again
            self._written.clear()
        self._add(text)

    def transitions(self, state: EngineState) -> None:
        """Add the transitions of a state's log. The plan of a step was added by `scheduled`."""
        for entry in state.log:
            if isinstance(entry, Entry) and not isinstance(entry, Schedule):
                self.write(entry)

    def scheduled(self, step: ScheduledStep, sequences: Sequences, lookahead: Lookahead) -> str:
        """Add the plan of a step, the drafts that the host wrote for it, and the predicted plans
        that the devices compute already. Returns the digest.
        """
        self.write(Schedule(step.plan, step.offered))
        lengths = {
            seq.request.request_id: length
            for seq, length in zip(step.plan.seqs, step.plan.lengths, strict=True)
        }
        for name, num_drafts in step.offered.items():
            if name in lengths:
                first = lengths[name]
                drafts = sequences[name].tokens[first : first + num_drafts]
                self._hash.update(drafts.tobytes())
        for sent in lookahead.sent:
            rows = [(seq.arrival, seq.blocks) for seq in sent.plan.seqs]
            self._hash.update(json.dumps((rows, sent.plan.starts, sent.plan.counts)).encode())
        return self._hash.hexdigest()

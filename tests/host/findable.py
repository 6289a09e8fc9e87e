"""The oracle of prefix checkpoints: which blocks can be found, from the definition of a boundary.

`Findable` keeps the keys that the prefix cache must have. It lists boundaries one by one, and asks
of each block whether a query behind one of them sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pagedjax.host import blocks
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Plan, SchedulerConfig, Seq

MAX_BOUNDARY = 100  # of the sequences in tests


def key(block_hash: str, group: int) -> str:
    return f"{block_hash}.{group}" if group else block_hash


def seen_before(view: View, boundary: int) -> set[int]:
    """The blocks before a boundary that the query behind it sees."""
    window = view.window or MAX_BOUNDARY
    return {i for i in range(boundary) if i in view.kept or boundary - i < window}


class Findable:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.views = config.views or (ALL,)
        self.keys: set[str] = set()

    def boundaries(self, seq: Seq) -> set[int]:
        """Where the sequence's prefix is kept while it runs."""
        policy = self.config.prefix_checkpoints
        size = self.config.block_size
        every = range(1, MAX_BOUNDARY)
        assert policy is not None
        boundaries = {b for b in every if policy.interval and b * size % policy.interval == 0}
        if policy.prompts:  # the last one behind which a token of the prompt is left
            before = [b for b in every if b * size < seq.request.prompt_len]
            boundaries |= set(before[-1:])
        return boundaries | ({seq.junction} if policy.junctions else set())

    def keys_of(self, seq: Seq, hashes: Sequence[str], computed: range) -> set[str]:
        """The keys of the blocks that are full in `computed`, and seen behind a boundary. Without a
        policy, those of all full blocks.
        """
        size = self.config.block_size
        full = [i for i in range(len(hashes)) if (i + 1) * size in computed]
        if self.config.prefix_checkpoints is None:
            return {key(hashes[i], group) for i in full for group in range(len(self.views))}
        boundaries = self.boundaries(seq)
        keys = set()
        for group, view in enumerate(self.views):
            visible = set(view.kept).union(*[seen_before(view, b) for b in boundaries])
            keys |= {key(hashes[i], group) for i in full if view.window is None or i in visible}
        return keys

    def end(self, seq: Seq, hashes: Sequence[str], computed: int) -> None:
        """A text ends: a query behind its last full block can be found."""
        policy = self.config.prefix_checkpoints
        boundary = computed // self.config.block_size
        if policy is not None and policy.texts and len(hashes) >= boundary:
            for group, view in enumerate(self.views):
                # other blocks were published when they were filled
                visible = seen_before(view, boundary) - set(view.kept) if view.window else ()
                self.keys |= {key(hashes[i], group) for i in visible}

    def schedule(
        self, before: SchedulerState, plan: Plan, after: SchedulerState, running: Iterable[Seq]
    ) -> bool:
        """Checks a plan -> whether cached content was lost.

        Args:
            running: current records before the plan.
        """
        for seq in running:
            if seq.request_id in plan.preempted and seq.request_id not in plan.swapped:
                self.end(seq, seq.hashes, min(seq.computed, seq.length - 1))
        keys_before = set(self.keys)
        lost = self.lose(after)
        empty = after.pool.num_free - len(blocks.idle_ids(after.pool))
        assert not lost or plan.copies or not empty, "content was lost beside empty blocks"
        cached_of = dict(zip(plan.admitted, plan.cached, strict=True))
        for seq in after.running.seqs:
            if seq.request_id in cached_of and seq.request_id not in plan.resumed and not lost:
                self.check_entry(seq, cached_of[seq.request_id], keys_before)
        return bool(lost)

    def lose(self, state: SchedulerState) -> set[str]:
        """Takes the content of the cache over -> what it has no more."""
        contents = set(state.pool.contents)
        assert contents <= self.keys, "something else can be found"
        lost = self.keys - contents
        self.keys = contents
        return lost

    def check_entry(self, seq: Seq, cached: int, keys: set[str]) -> None:
        """A sequence begins behind the longest beginning that is usable, and knows its junction."""
        size = self.config.block_size
        longest = min(len(seq.hashes), (seq.length - 1) // size)
        views = (ALL,) * len(self.views) if seq.request.keeps_blocks else self.views

        def usable(boundary: int, groups: Iterable[int]) -> bool:
            return all(
                key(seq.hashes[i], group) in keys
                for group in groups
                for i in seen_before(views[group], boundary)
            )

        best = max(b for b in range(longest + 1) if usable(b, range(len(views))))
        if not self.config.shares_filling:
            assert cached == best * size, "another beginning is longer"
        assert cached >= best * size
        policy = self.config.prefix_checkpoints
        full_groups = [group for group, view in enumerate(self.views) if view.window is None]
        junction = 0
        if policy is not None and policy.junctions and full_groups:
            junction = max(b for b in range(longest + 1) if usable(b, full_groups))
        assert seq.junction == (junction if junction * size > cached else 0)

    def commit(
        self,
        plan: Plan,
        ends: Mapping[str, int],
        hashes: Mapping[str, Sequence[str]],
        finished: Iterable[str],
        after: SchedulerState,
    ) -> None:
        """Checks what a step made findable.

        Args:
            ends: by sequence id, its computed tokens after the step.
            hashes: by sequence id, the hashes of its full blocks.
        """
        for seq, start in zip(plan.seqs, plan.starts, strict=True):
            name = seq.request_id
            filled = range(start + 1, ends[name] + 1)
            self.keys |= self.keys_of(seq, hashes[name], filled)
            if name in finished:
                self.end(seq, hashes[name], ends[name])
        assert not self.lose(after), "a commit lost content"

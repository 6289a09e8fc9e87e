"""Block tables with holes: every block that a query sees is there with the right content, and no
other is kept.

`Cache` is the oracle: it carries out plans slot by slot, as the device does, and spells the tokens
that lie in a slot. It knows what a query sees from the policy's definition alone, token by token.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import strategies as st

from pagedjax.host import kv_policies, scheduler, views
from pagedjax.host.admission import Rejected
from pagedjax.host.kv_policies import ALL, KVPolicy, View, view
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import (
    HOLE,
    Beamed,
    Choice,
    Finished,
    Forked,
    Plan,
    Request,
    Sampled,
    SchedulerConfig,
    Seq,
)
from pagedjax.options.config import KVPolicyOptions, PrefixCheckpoints
from tests import drawn
from tests.host import drawn_views
from tests.host.findable import Findable
from tests.host.scheduler_steps import step
from tests.host.test_event_log import chosen
from tests.refusals import refused

# --- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sinks", "window", "size", "expected"),
    [
        (4, 1020, 16, View(65, (0,))),
        (16, 16, 16, View(2, (0,))),
        (17, 17, 16, View(2, (0, 1))),
        (0, 1, 16, View(1, ())),
        (1, 2, 1, View(2, (0,))),
    ],
)
def test_sizes_are_rounded_up_to_blocks(sinks: int, window: int, size: int, expected: View):
    assert view(kv_policies.streaming(sinks, window), size, 1000) == expected


def check_sight(sinks: int, window: int, size: int, max_blocks: int) -> None:
    rounded = view(kv_policies.streaming(sinks, window), size, max_blocks)
    for position in range(max_blocks * size):
        block = position // size
        visible_blocks = {*rounded.outside(block), *range(rounded.first(block), block + 1)}
        for token in range(position + 1):
            visible = token // size in visible_blocks
            assert visible or sinks <= token <= position - window
            if rounded != ALL and sinks + size - 1 <= token <= position - window - 2 * size + 1:
                assert not visible


@drawn.examples(30, 100)
def test_a_query_sees_the_sinks_and_its_window_and_less_than_a_block_more_of_each(number: int):
    tokens = {"sinks": st.integers(0, 40), "window": st.integers(1, 40)}
    blocks = {"size": st.integers(1, 9), "max_blocks": st.integers(1, 60)}
    drawn.check(number, check_sight, **tokens, **blocks)


def test_a_policy_under_which_nothing_goes_out_of_sight_is_full():
    assert view(kv_policies.streaming(4, 100), 16, 7) == ALL
    assert view(KVPolicy("every", 1, lambda start: True), 4, 50) == ALL
    assert view(KVPolicy("strided", 4, lambda start: start % 12 == 0), 4, 8) == View(2, (0, 3))


def test_a_policy_of_ones_own_is_found_by_its_place(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from pagedjax.policies import KVPolicy\nMINE = KVPolicy('mine', 32)\nBAD = KVPolicy('bad', 0)\n"
    )
    assert kv_policies.find(KVPolicyOptions(f"{file}:MINE")) == KVPolicy("mine", 32)
    with refused("has window 0; it must be None, or at least 1 token"):
        kv_policies.find(KVPolicyOptions(f"{file}:BAD"))
    with refused(r"OTHER in .* is no KVPolicy; those in it: .*MINE"):
        kv_policies.find(KVPolicyOptions(f"{file}:OTHER"))


# --- the blocks of a sequence ---------------------------------------------------------------------


def run_alone(config: SchedulerConfig, prompt: int, output: int) -> list[tuple[int, ...]]:
    """One request -> its block table in each step."""
    state = scheduler.submit(scheduler.init(config), Request("a", prompt, output))
    tables = []
    while state.ids:
        state, plan, _ = step(state)
        tables += [seq.blocks for seq in plan.seqs]
        scheduler.check(state)
    assert state.pool.num_free == config.num_blocks
    return tables


def test_exact_blocks_of_a_windowed_and_a_full_group():
    """Blocks of 4, a window of 9 tokens: 3 blocks. 40 tokens are 10 blocks of the full group and 3
    of the other.
    """
    config = SchedulerConfig(
        block_size=4,
        num_blocks=40,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        max_model_len=64,
        views=(ALL, View(kv_policies.window_blocks(9, 4))),
    )
    table = run_alone(config, 30, 10)[-1]
    assert (len(table), views.held(table)) == (20, 13)
    assert table[1::2].count(HOLE) == 7
    assert HOLE not in table[::2]


def test_a_long_prompt_runs_in_a_pool_that_is_smaller_than_it():
    config = SchedulerConfig(
        block_size=4,
        num_blocks=7,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        max_model_len=512,
        views=(View(3, (0,)),),
    )
    tables = run_alone(config, 400, 50)
    # block 0, a window of 3, and one more in a chunk of two blocks
    assert max(map(views.held, tables)) == 5
    assert [i for i, block in enumerate(tables[-1]) if block] == [0, 110, 111, 112]


def test_a_smaller_pool_cuts_chunks_and_the_smallest_one_is_named():
    config = SchedulerConfig(
        block_size=4,
        num_blocks=4,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        max_model_len=512,
        views=(View(3, (0,)),),
    )
    assert max(map(views.held, run_alone(config, 400, 50))) == 4
    with pytest.raises(
        Rejected,
        match=r"needs 4 blocks of 4 at one time .*but the pool has 3; raise num_blocks to 4",
    ):
        run_alone(config._replace(num_blocks=3), 400, 50)


def test_a_request_that_keeps_its_blocks_gives_none_back():
    config = SchedulerConfig(
        block_size=4,
        num_blocks=30,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        max_model_len=512,
        views=(View(3, (0,)),),
    )
    state = scheduler.submit(scheduler.init(config), Request("a", 50, 50, keeps_blocks=True))
    while state.ids:
        state, plan, _ = step(state)
        assert all(HOLE not in seq.blocks for seq in plan.seqs)
    with pytest.raises(Rejected, match="needs 128 blocks"):
        scheduler.submit(state, Request("b", 462, 50, keeps_blocks=True))


def test_a_prefix_can_be_used_where_what_its_next_query_sees_is_left():
    """The first request's early blocks were evicted. A second one begins behind the longest usable
    beginning.
    """
    config = SchedulerConfig(
        block_size=4,
        num_blocks=8,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        max_model_len=128,
        views=(View(2, (0,)),),
    )
    keys = tuple(map(str, range(16)))
    state = scheduler.submit(scheduler.init(config), Request("a", 64, 1, hashes=keys))
    while state.ids:
        state, *_ = step(state)
    cached_blocks = {int(key) for key in state.pool.contents}
    assert cached_blocks < set(range(16))
    state = scheduler.submit(state, Request("b", 65, 1, hashes=keys))
    state, plan, _ = step(state)
    best = max(
        n for n in range(17) if {i for i in range(n) if i == 0 or i > n - 2} <= cached_blocks
    )
    assert plan.cached == (4 * best,)
    assert plan.seqs[0].blocks[:best].count(HOLE) == max(0, best - 2)


def test_what_a_chunk_gives_back_is_evicted_block_by_block():
    """A state is of use with all its groups alone, so no more than one is ever cut."""
    states = 3
    config = SchedulerConfig(
        block_size=4,
        num_blocks=44,
        max_num_batched_tokens=32,
        max_num_seqs=1,
        max_model_len=128,
        views=(ALL,) + (View(2),) * states,
    )
    keys = [str(block) for block in range(8)]
    state = scheduler.submit(scheduler.init(config), Request("a", 33, 2, hashes=tuple(keys)))
    while state.ids:
        state, *_ = step(state)
    assert len(state.pool.contents) == 8 * (1 + states)
    for tokens in range(4, 24, 4):
        state = scheduler.submit(state, Request(f"b{tokens}", tokens, 8))
        while state.ids:
            state, *_ = step(state)
        counts = [
            sum(f"{key}.{group + 1}" in state.pool.contents for group in range(states))
            for key in keys
        ]
        assert sum(count not in (0, states) for count in counts) <= 1
    assert 0 < counts.count(0) < len(keys)


def test_views_that_are_none_and_views_beside_a_baseline_are_refused():
    config = SchedulerConfig(
        block_size=4, num_blocks=8, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=128
    )
    for wrong in ((View(0),), (View(2, (3, 1)),), (View(-1),), ((2, ()),)):
        with refused("a view is"):
            scheduler.init(config._replace(views=wrong))
    with refused("a baseline keeps every block"):
        scheduler.init(config._replace(views=(View(2),), mixed_steps=False))


# --- any transitions ------------------------------------------------------------------------------


class Cache:
    """Blocks of the device and of the host: block -> offset -> (group, the tokens up to it)."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.device: dict[int, dict[int, object]] = defaultdict(dict)
        self.host: dict[int, dict[int, object]] = defaultdict(dict)

    def carry_out(self, plan: Plan, tokens: dict[str, list[int]], keeps: set[str]) -> int:
        """Moves, copies, writes, and then reads of every query -> how many slots were read."""
        c = self.config
        size = c.block_size
        reads = 0
        for block, host in plan.swap_out:
            self.host[host] = dict(self.device[block])
        for host, block in plan.swap_in:
            self.device[block] = dict(self.host[host])
        self.device |= {new: dict(self.device[old]) for old, new in plan.copies}
        rows = [
            (seq, tokens[seq.request_id], range(start, start + count))
            for seq, start, count in zip(plan.seqs, plan.starts, plan.counts, strict=True)
        ]
        written: dict[tuple[int, int], object] = {}
        for seq, row_tokens, places in rows:
            for at, group in itertools.product(places, range(c.groups)):
                block = seq.blocks[at // size * c.groups + group]
                assert block != HOLE, "writes into a hole"
                content = (group, tuple(row_tokens[: at + 1]))
                assert written.setdefault((block, at % size), content) == content, (
                    "two rows write different tokens"
                )
                self.device[block][at % size] = content
        for seq, row_tokens, places in rows:
            for at, (group, group_view) in itertools.product(places, enumerate(c.views or (ALL,))):
                last = at // size
                for i in range(last + 1):
                    block = seq.blocks[i * c.groups + group]
                    window = group_view.window
                    if i in group_view.kept or window is None or i > last - window:
                        for t in range(i * size, min((i + 1) * size, at + 1)):
                            content = (group, tuple(row_tokens[: t + 1]))
                            assert self.device[block].get(t % size) == content, "a wrong token"
                            reads += 1
                    elif seq.request_id in keeps:
                        assert block != HOLE, "a block was not kept"
        return reads


def spelled(tokens: list[int], size: int) -> tuple[str, ...]:
    """The hashes of full blocks: their tokens, and all before them."""
    return tuple(" ".join(map(str, tokens[:end])) for end in range(size, len(tokens) + 1, size))


def cancelled(findable: Findable, state: SchedulerState, name: str) -> SchedulerState:
    """The state without a request; its text ends here."""
    before = scheduler.running(state)
    state, _ = scheduler.cancel(state, name, "stop")
    running = {seq.arrival for seq in scheduler.running(state)}
    for seq in before:
        if seq.arrival not in running:
            findable.end(seq, seq.hashes, seq.computed)
    assert not findable.lose(state), "a cancellation lost content"
    return state


def dropped_beams(state: SchedulerState, choices: dict[str, Choice]) -> list[Seq]:
    """The beams that nobody continues; their texts end here."""
    running = scheduler.running(state)
    groups = {seq.request_id: seq.group for seq in running}
    return [
        seq
        for name, choice in choices.items()
        for seq in running
        if seq.group == groups[name] and seq.request_id not in choice.parents
    ]


def drive(config: SchedulerConfig, seed: int, steps: int = 50) -> Counter[str]:
    draw = random.Random(seed)
    size = config.block_size
    findable = Findable(config)
    tally = Counter()
    names = 0
    state = scheduler.init(config)
    cache = Cache(config)
    tokens: dict[str, list[int]] = {}
    keeps: set[str] = set()
    longest = min(config.max_model_len, 60)
    steps_left = steps
    busy = True
    while busy or state.ids:
        busy = steps_left > 0
        steps_left = steps_left - 1
        assert steps_left > -3000, "does not end"
        for _ in range(draw.randrange(3) if busy and len(state.ids) < 9 else 0):
            names += 1
            family = draw.randrange(2)
            prompt = draw.randint(1, longest - 1)
            ids = [f"{names}{end}" for end in ("", *draw.choice(["", "", "", "b", "bc"]))]
            keep = draw.random() < 0.15
            request = Request(
                ids[0],
                prompt,
                draw.randint(1, longest - prompt),
                forks=tuple(ids[1:]),
                hashes=spelled([family] * prompt, size) if draw.random() < 0.8 else (),
                beams=draw.random() < 0.3 and len(ids) > 1,
                keeps_blocks=keep,
            )
            try:
                state = scheduler.submit(state, request)
            except Rejected:
                tally["rejected"] += 1
                continue
            tokens |= {name: [family] * prompt for name in ids}
            keeps |= set(ids) if keep else set()
        if busy and draw.random() < 0.05 and state.ids:
            state = cancelled(findable, state, draw.choice(sorted(state.ids)))
        if busy and draw.random() < 0.02:
            state = scheduler.restart(state)
            findable.keys = set()
        drafts: dict[str, list[int]] = {}
        for seq in scheduler.running(state):
            if seq.length - seq.computed == 1 and draw.random() < 0.3:
                drafts[seq.request_id] = [draw.randrange(50) for _ in range(draw.randint(1, 6))]
        before = state
        state, plan = scheduler.schedule(state, FCFS, {name: len(d) for name, d in drafts.items()})
        scheduler.check(state)
        tally["lost"] += findable.schedule(before, plan, state, scheduler.running(before))
        tally["junctions"] += any(seq.junction for seq in plan.seqs)
        granted = dict(zip([seq.request_id for seq in plan.seqs], plan.drafts, strict=False))
        lengths = {
            seq.request_id: length for seq, length in zip(plan.seqs, plan.lengths, strict=True)
        }
        for name, k in granted.items():
            del tokens[name][lengths[name] :]
            tokens[name] += drafts[name][:k] if k else []
        tally["reads"] += cache.carry_out(plan, tokens, keeps)
        tally += Counter(
            preempted=len(plan.preempted), swapped=len(plan.swapped), copied=len(plan.copies)
        )
        tally["found with holes"] += sum(n > 0 for n in plan.cached) * any(
            HOLE in seq.blocks for seq in plan.seqs
        )
        samples: list[Any] = [draw.randrange(50) for _ in plan.seqs]
        for i, (name, length) in enumerate(lengths.items()):
            if k := granted.get(name, 0):
                samples[i] = (*drafts[name][: draw.randint(0, k)], samples[i])
            del tokens[name][length:]
        ends: dict[str, int] = {}
        hashes: dict[str, tuple[str, ...]] = {}
        for i, seq in enumerate(plan.seqs):
            name = seq.request_id
            accepted = samples[i][:-1] if granted.get(name, 0) else ()
            ends[name] = plan.starts[i] + plan.counts[i] - granted.get(name, 0) + len(accepted)
            hashes[name] = seq.hashes
            if seq.request.hashes:
                text = [*tokens[name], *accepted][: ends[name]]
                hashes[name] += spelled(text, size)[len(seq.hashes) :]
        new_hashes = {
            seq.request_id: hashes[seq.request_id][len(seq.hashes) :] for seq in plan.seqs
        }
        choices, over = chosen(state, plan, draw)
        for seq in dropped_beams(state, choices):
            name = seq.request_id
            findable.end(seq, hashes.get(name, seq.hashes), ends.get(name, seq.computed))
            tally["dropped"] += 1
        state, events = scheduler.commit(state, plan, samples, new_hashes, choices)
        finished = {event.request_id for event in events if isinstance(event, Finished)}
        findable.commit(plan, ends, hashes, finished, state)
        for name in over:
            state = cancelled(findable, state, name)
        scheduler.check(state)
        for event in events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    tokens[name].append(token)
            elif isinstance(event, Beamed):
                pairs = zip(event.request_ids, event.parents, event.token_ids, strict=True)
                tokens |= {name: [*tokens[parent], token] for name, parent, token in list(pairs)}
                tally["beamed"] += 1
            tally["forked"] += isinstance(event, Forked)
            tally["ended"] += isinstance(event, Finished)
        tally["holes"] += any(HOLE in seq.blocks for seq in state.running.seqs)
    assert state.pool.num_free == config.num_blocks
    assert state.host_pool is None or state.host_pool.num_free == config.host_blocks
    return tally


configs = drawn_views.with_checkpoints(
    st.builds(
        SchedulerConfig,
        st.integers(1, 6),
        st.integers(4, 60),
        st.integers(2, 40),
        st.integers(1, 6),
        st.integers(12, 60),
        st.sampled_from([0, 0, 12, 60]),
        *map(st.just, (True, True, "none")),
        drawn_views.any_groups,
        st.booleans(),
        st.none(),
        late_stops=st.booleans(),
        empty_blocks=st.just(0),
    )
)


@drawn.examples(12, 120)
def test_every_query_reads_what_it_sees_and_nothing_else_is_kept(number: int):
    def holds(config: SchedulerConfig, seed: int) -> None:
        drive(config, seed)

    drawn.check(number, holds, config=configs, seed=st.integers(0, 2**32 - 1))


def test_the_driver_reaches_every_kind_of_event():
    tally: Counter[str] = Counter()
    for seed in range(14):
        draw = random.Random(seed)
        views = draw.choice(
            [(View(2, (0,)),), (ALL, View(2)), (View(1), View(3, (0, 2))), (View(1),)]
        )
        config = SchedulerConfig(
            block_size=draw.randint(1, 5),
            num_blocks=draw.randint(9, 18) * len(views),
            max_num_batched_tokens=draw.randint(4, 30),
            max_num_seqs=draw.randint(2, 6),
            max_model_len=60,
            host_blocks=draw.choice([0, 30]),
            views=views,
        )
        if draw.random() < 0.5:
            checkpoints = PrefixCheckpoints(
                config.block_size * draw.randint(2, 4),
                texts=draw.random() < 0.5,
                junctions=draw.random() < 0.7,
            )
            config = config._replace(prefix_checkpoints=checkpoints)
        tally += drive(config, seed, steps=40)
    for kind in (
        "rejected",
        "preempted",
        "swapped",
        "copied",
        "found with holes",
        "beamed",
        "dropped",
        "forked",
        "holes",
        "lost",
        "junctions",
    ):
        assert tally[kind] >= 5, f"{kind}: {tally}"

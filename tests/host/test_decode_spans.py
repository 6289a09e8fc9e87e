"""Several decode steps at once against the steps one by one: the same states, under hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.host import decode_spans, scheduler
from pagedjax.host.policies import FCFS, Policy
from pagedjax.host.scheduler import Rejected, SchedulerConfig, SchedulerState
from pagedjax.host.types import Event, Finished, Plan, Request, Sampled, Seq
from tests.drawn import given as given_sample
from tests.host.scheduler_steps import WITHOUT_MEMORY, start
from tests.refusals import refused

WORD = 7
STOP = 3
Hashes = dict[str, tuple[str, ...]]

configs = st.builds(
    lambda empty_blocks, num_blocks, **options: SchedulerConfig(
        empty_blocks=min(empty_blocks, num_blocks - 1), num_blocks=num_blocks, **options
    ),
    empty_blocks=st.sampled_from([0, 0, 2, 6]),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(1, 40),
    max_num_batched_tokens=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    max_model_len=st.integers(4, 60),
    host_blocks=st.sampled_from([0, 0, 8]),
    mixed_steps=st.booleans(),
    chunked_prefill=st.booleans(),
    reservation=st.sampled_from(["none", "none", "none", "oracle", "max"]),
    views=st.just(()),
    prefix_checkpoints=st.none(),
    late_stops=st.just(False),
)
drawn_requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(0, 2), st.integers(0, 2)),
    min_size=1,
    max_size=6,
)


def content(request_id: str, block: int) -> str:
    """Returns the content of a block. Requests of one letter have one content, so that a block of
    two requests may have one hash.
    """
    return f"{request_id[0]}{block}"


def filled_hashes(
    seqs: Sequence[Seq], before: Sequence[int], after: Sequence[int], size: int
) -> Hashes:
    """Returns the hashes that an engine would give with a commit, or with several. `before` and
    `after`: the computed tokens of each sequence. One that fills no block in these steps gets none.
    """
    return {
        seq.request_id: tuple(
            [content(seq.request_id, block) for block in range(len(seq.hashes), end // size)]
        )
        for seq, start, end in zip(seqs, before, after, strict=True)
        if end // size > start // size
    }


def one_step(
    state: SchedulerState, policy: Policy, shares: bool
) -> tuple[SchedulerState, tuple[Event, ...], Plan]:
    state, plan = scheduler.schedule(state, policy)
    ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
    size = state.config.block_size
    hashes = filled_hashes(plan.seqs, plan.starts, ends, size) if shares else {}
    return *scheduler.commit(state, plan, [WORD] * len(plan.seqs), hashes), plan


def submitted(
    state: SchedulerState,
    name: str,
    drawn: tuple[int, int, int, int],
    shares: bool,
    stops: frozenset[int] = frozenset(),
) -> SchedulerState:
    prompt, output, letter, forks = drawn
    name = f"{'abc'[letter]}{name}"
    size = state.config.block_size
    hashes = tuple([content(name, block) for block in range(prompt // size)]) if shares else ()
    branches = (
        tuple(f"{name}.{i}" for i in range(forks)) if state.config.reservation == "none" else ()
    )
    try:
        request = Request(name, prompt, output, 0, stops, forks=branches, hashes=hashes)
        return scheduler.submit(state, request)
    except Rejected:
        return state


def with_arrivals(
    data: st.DataObject, state: SchedulerState, shares: bool, stops: frozenset[int] = frozenset()
) -> SchedulerState:
    """The state after some requests came, or none; after the first call some have come."""
    arrives = data.draw(st.integers(0, 5)) == 0 or not state.arrivals
    for drawn in data.draw(drawn_requests) if arrives else ():
        state = submitted(state, str(state.arrivals), drawn, shares, stops)
    return state


@given_sample(
    60, 150, st.data(), configs, st.sampled_from([*WITHOUT_MEMORY.values()]), st.booleans()
)
def test_steps_at_once_are_those_one_by_one(data, config, policy, shares):
    shares = shares and config.reservation == "none"
    state = scheduler.init(config)
    for _ in range(40):
        state = with_arrivals(data, state, shares)
        max_steps = decode_spans.steps_ahead(state)
        if not max_steps:
            state, _, plan = one_step(state, policy, shares)
            if not plan.seqs:
                break
            continue
        steps = data.draw(st.integers(1, max_steps))
        active = state.running
        after = [computed + steps for computed in active.computed]
        hashes = filled_hashes(active.seqs, active.computed, after, config.block_size)
        hashes = hashes if shares else {}
        at_once, allocated = decode_spans.after_decodes(state, steps, hashes)
        used = [state.pool.num_blocks - state.pool.num_free]
        counted = []
        for _ in range(steps):
            state, events, plan = one_step(state, policy, shares)
            assert [type(event) for event in events] == [Sampled]
            assert plan.counts == (1,) * len(active.seqs)
            assert not plan.copies
            used.append(plan.blocks_used)
            counted.append(used[-1] - used[-2])
        assert at_once == state
        assert at_once.pool.idle == state.pool.idle
        assert at_once.pool.hashes == state.pool.hashes
        assert list(allocated) == counted
        scheduler.check(at_once)


@given_sample(
    100, 400, st.data(), configs, st.sampled_from([*WITHOUT_MEMORY.values()]), st.booleans()
)
def test_the_next_plan_of_decodes_is_that_of_the_transitions(data, config, policy, shares):
    shares = shares and config.reservation == "none"
    state = scheduler.init(config)
    for _ in range(40):
        state = with_arrivals(data, state, shares)
        planned, plan = scheduler.schedule(state, policy)
        if not plan.seqs:
            break
        following = decode_spans.next_decodes(planned, plan)
        if following is not None:
            committed, _ = scheduler.commit(planned, plan, [WORD] * len(plan.seqs))
            expected, expected_plan = scheduler.schedule(committed, policy)
            assert following.plan == expected_plan
            assert following.state == expected
            assert following.state.pool.hashes == expected.pool.hashes
            new_owners = set(expected.pool.owners) - set(planned.pool.owners)
            assert set(following.allocated) == new_owners
        state, _, _ = one_step(state, policy, shares)


@given_sample(
    100, 400, st.data(), configs, st.sampled_from([*WITHOUT_MEMORY.values()]), st.booleans()
)
def test_a_predicted_plan_is_scheduled_as_any_plan(data, config, policy, shares):
    """Predictions of up to five steps meet real states, in which sequences publish blocks, end,
    stop, arrive and are cancelled. A prediction that is used is the plan that `schedule` gives, and
    its columns are those that `commit` gives.
    """
    shares = shares and config.reservation == "none"
    state = scheduler.init(config)
    predicted: list[decode_spans.DecodeStep] = []
    for _ in range(40):
        state = with_arrivals(data, state, shares, frozenset({STOP}))
        if state.running.seqs and data.draw(st.integers(0, 9)) == 0:
            cancelled = data.draw(st.sampled_from(state.running.seqs))
            state, _ = scheduler.cancel(state, cancelled.request_id)
        planned, plan = scheduler.schedule(state, policy)
        if not plan.seqs:
            break
        for step in predicted:
            fast = decode_spans.schedule_predicted(state, step.plan, step.allocated)
            if fast is None:
                continue
            assert fast == (planned, plan)
            assert fast[0].pool.hashes == planned.pool.hashes
            assert fast[1].lengths is step.plan.lengths
            planned, plan = fast
        if not predicted or data.draw(st.booleans()):
            predicted = chain(planned, plan, 5)
        if data.draw(st.integers(0, 9)) == 0:
            cancelled = data.draw(st.sampled_from(plan.seqs))
            planned, _ = scheduler.cancel(planned, cancelled.request_id)
        ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        hashes = filled_hashes(plan.seqs, plan.starts, ends, config.block_size) if shares else {}
        tokens = [STOP if data.draw(st.integers(0, 30)) == 0 else WORD for _ in plan.seqs]
        state, events = scheduler.commit(planned, plan, tokens, hashes)
        for step in predicted:
            fast = decode_spans.commit_predicted(planned, plan, tokens, hashes, step.plan)
            if fast is not None:
                assert fast == (state, events)
                assert fast[0].pool.hashes == state.pool.hashes
                assert fast[0].running.lengths is step.plan.lengths
                state = fast[0]


def chain(state: SchedulerState, plan: Plan, steps: int) -> list[decode_spans.DecodeStep]:
    """The plans of decodes that follow a plan. What is known of one is used for the next."""
    following: list[decode_spans.DecodeStep] = []
    steps_left = None
    while len(following) < steps:
        step = decode_spans.next_decodes(state, plan, steps_left)
        assert steps_left is None or step == decode_spans.next_decodes(state, plan)
        if step is None:
            break
        following.append(step)
        state, plan, _, steps_left = step
    return following


def test_the_real_steps_are_the_predicted_ones_until_a_sequence_ends():
    """Blocks are published in between, so the records are others, and the block tables are not."""
    requests = [request(name, 4, 12, hashes=(name,)) for name in ("a", "b")]
    state, plan = scheduler.schedule(decoding(*requests, block_size=4), FCFS)
    steps = chain(state, plan, 20)
    assert [step.steps_left for step in steps] == [*reversed(range(10))]
    for step in steps:
        ends = [start + 1 for start in plan.starts]
        hashes = filled_hashes(plan.seqs, plan.starts, ends, 4)
        committed = decode_spans.commit_predicted(state, plan, [WORD] * 2, hashes, step.plan)
        assert committed is not None
        state, _ = committed
        planned = decode_spans.schedule_predicted(state, step.plan, step.allocated)
        assert planned is not None
        state, plan = planned
        tables = [seq.blocks for seq in plan.seqs]
        predicted_tables = [seq.blocks for seq in step.plan.seqs]
        assert all(a is b for a, b in zip(tables, predicted_tables, strict=True))
    assert [len(seq.hashes) for seq in plan.seqs] == [3, 3]


def test_a_plan_of_decodes_follows_another_one_until_a_sequence_ends():
    state = decoding(request("a", 3, 9), request("b", 5, 30))
    state, plan = scheduler.schedule(state, FCFS)
    count = 0
    while (following := decode_spans.next_decodes(state, plan)) is not None:
        state, plan, *_ = following
        count += 1
    assert count == 9 - 2  # the first token is known, and `plan` gives the second


@settings(max_examples=100)
@given(configs, drawn_requests)
def test_what_follows_the_steps_ahead_is_another_step(config, drawn):
    """If nothing waits or forks, the count is the largest: after it a request ends, or blocks do
    not suffice.
    """
    state = scheduler.init(config)
    for name, (prompt, output, letter, _) in enumerate(drawn):
        state = submitted(state, str(name), (prompt, output, letter, 0), shares=False)
    for _ in range(200):
        max_steps = decode_spans.steps_ahead(state)
        decodes = [
            length - computed
            for length, computed in zip(state.running.lengths, state.running.computed, strict=True)
        ]
        outputs = [seq.num_output for seq in scheduler.running(state)]
        state = decode_spans.after_decodes(state, max_steps)[0] if max_steps else state
        waits = bool(state.waiting)
        state, events, plan = one_step(state, FCFS, shares=False)
        if not plan.seqs:
            break
        if decodes and set(decodes) == {1} and min(outputs) > 0 and not waits:
            assert plan.preempted or any(isinstance(event, Finished) for event in events)


def request(name: str, prompt: int, output: int, **options) -> Request:
    return Request(name, prompt, output, **options)


def decoding(*requests: Request, **sizes) -> SchedulerState:
    """After the step that computes all prompts."""
    return one_step(start(*requests, **sizes), FCFS, shares=False)[0]


def test_a_waiting_request_counts_only_if_it_may_enter():
    full = decoding(request("a", 3, 9), request("b", 3, 9), seqs=1)
    assert (len(full.waiting), decode_spans.steps_ahead(full)) == (1, 7)
    free = scheduler.submit(decoding(request("a", 3, 9)), request("b", 3, 9))
    assert decode_spans.steps_ahead(free) == 0


def test_too_many_steps_are_refused():
    state = decoding(request("a", 4, 20), request("b", 4, 20), num_blocks=6)
    with refused(r"the steps need 6 blocks and 4 are free; see `steps_ahead`"):
        decode_spans.after_decodes(state, 9)


def test_blocks_are_evicted_in_the_order_of_the_steps():
    """The pool has few empty blocks, and idle ones whose content one of two sequences publishes
    again.
    """
    first = [request("a0", 8, 1, hashes=("a0", "a1")), request("c0", 8, 1, hashes=("c0", "c1"))]
    state = start(*first, num_blocks=10, block_size=4)
    while state.running.seqs or state.waiting:
        state, *_ = one_step(state, FCFS, shares=True)
    assert len(state.pool.idle) == 4
    for name in ("b0", "b1"):
        state = scheduler.submit(state, request(name, 4, 17, hashes=("b0",)))
    state, *_ = one_step(state, FCFS, shares=True)
    max_steps = decode_spans.steps_ahead(state)
    one_by_one = [state]  # the states after 0, 1, ... steps
    for _ in range(max_steps):
        one_by_one.append(one_step(one_by_one[-1], FCFS, shares=True)[0])
    for steps, expected in enumerate(one_by_one):
        computed = state.running.computed
        after = [number + steps for number in computed]
        hashes = filled_hashes(state.running.seqs, computed, after, 4)
        assert decode_spans.after_decodes(state, steps, hashes)[0] == expected
    assert len(one_by_one[-1].pool.idle) < 4


def test_steps_that_change_no_block_give_up_what_became_idle():
    """After an end fewer blocks are empty than the scheduler keeps, and its next plan mends that."""
    state = scheduler.init(SchedulerConfig(4, 8, 64, 6, 60, empty_blocks=3))
    hashes = tuple([content("a", block) for block in range(4)])
    state = scheduler.submit(state, Request("a", 16, 2, hashes=hashes))
    state = scheduler.submit(state, Request("b", 9, 12))
    for _ in range(2):
        state, _, _ = one_step(state, FCFS, shares=False)
    assert [seq.request_id for seq in state.running.seqs] == ["b"]
    assert state.pool.num_free - len(state.pool.idle) < 3
    expected = state
    for steps in range(1, decode_spans.steps_ahead(state) + 1):
        expected, _, _ = one_step(expected, FCFS, shares=False)
        assert decode_spans.after_decodes(state, steps)[0] == expected, steps

"""Two pools of simulated engines: laws of any run, times by hand, and the plans of a real pair of
engines.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from experiments.core.drive import Recorder
from experiments.core.pools import Link, drive_pools
from experiments.core.records import RequestRecord, Transfer
from experiments.core.workloads import WorkItem
from experiments.simulation.cost import Simulate, StepTime, Work
from experiments.simulation.simulate import Handover, SimulatedEngine
from pagedjax import LLM
from pagedjax.disaggregated import PrefillDecode
from pagedjax.host import blocks, scheduler
from pagedjax.host.types import Plan, StepResult
from pagedjax.options.config import EngineConfig
from pagedjax.routing import LEAST_LOADED, ROUND_ROBIN
from tests import drawn
from tests.experiments.core.summaries import GREEDY


class CheckedEngine(SimulatedEngine):
    """Checks after each transition that every block has the owners that it should have."""

    def reset(self) -> None:
        super().reset()
        self.held: dict[str, Handover] = {}

    def step(self) -> StepResult | None:
        result = super().step()
        self.check_blocks()
        return result

    def release(self, request_id: str) -> Handover:
        handover = super().release(request_id)
        self.held[request_id] = handover
        self.check_blocks()
        return handover

    def free(self, handover: Handover) -> None:
        assert self.held.pop(handover.released.request.request_id) is handover
        super().free(handover)
        self.check_blocks()

    def adopt(self, handover: Handover) -> bool:
        before = self.scheduler_state
        adopted = super().adopt(handover)
        assert adopted or self.scheduler_state is before
        if adopted:
            assert self.scheduler_state.running.computed[-1] == handover.released.computed, (
                "nothing is computed again"
            )
        self.check_blocks()
        return adopted

    def check_blocks(self) -> None:
        running = scheduler.running(self.scheduler_state)
        tables = [seq.blocks for seq in running] + [
            handover.released.blocks for handover in self.held.values()
        ]
        blocks.check(self.scheduler_state.pool, tables)


def engines(count: int, seconds: float | StepTime = 1.0, **options) -> list[CheckedEngine]:
    sizes = {"max_model_len": 96, "num_blocks": 64, "block_size": 4, "token_buckets": (2048,)}
    config = EngineConfig(**{**sizes, **options})
    simulate = Simulate(step_s=1.0, padded=False)
    time: StepTime = seconds if callable(seconds) else lambda _: seconds
    return [CheckedEngine(config, time, vocab_size=1000, simulate=simulate) for _ in range(count)]


class Outcome(NamedTuple):
    requests: list[RequestRecord]
    steps: list[list[tuple[float, float, tuple[str, ...]]]]  # of each engine: begin, end, sequences


def drive(
    prefill, decode, link: Link, work, sampling=GREEDY, router=LEAST_LOADED, split=None
) -> Outcome:
    every = [*prefill, *decode]
    note = Recorder(every, work, sampling.n)
    steps: list[list[tuple[float, float, tuple[str, ...]]]] = [[] for _ in every]
    recorded = note.step

    def step(replica: int, result: StepResult) -> None:
        recorded(replica, result)
        names = tuple(seq.request_id for seq in result.plan.seqs)
        steps[replica].append((result.started, result.finished, names))

    note.step = step  # type: ignore[method-assign]
    placements = drive_pools(
        prefill, decode, (router, router), link, work, sampling, note, split=split
    )
    return Outcome(note.requests.records(placements.prefill, placements.transfers), steps)


GAPS = st.sampled_from([0.0, 0.25, 1.0, 3.7])
REQUESTS = st.lists(
    st.tuples(GAPS, st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12
)
SHARED = st.fixed_dictionaries(
    {
        "enable_prefix_caching": st.booleans(),
        "mixed_steps": st.booleans(),
        "preemption": st.sampled_from(["recompute", "swap"]),
    }
)
SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([11, 20, 64]),  # 11 are those of the longest request
        "max_num_seqs": st.sampled_from([3, 8]),
        "max_num_batched_tokens": st.sampled_from([8, 64]),
    }
)
POOL = st.tuples(st.integers(1, 2), st.sampled_from([0.5, 1.0]), SIZES)
LINK = st.builds(
    Link, st.just(2.0), st.sampled_from([math.inf, 1.0, 10.0]), st.sampled_from([0.0, 0.3])
)


@st.composite
def runs(draw):
    """Engines, a link, requests and the number of branches."""
    work = []
    arrival = 0.0
    for i, (gap, prompt, output) in enumerate(draw(REQUESTS)):
        arrival += gap
        # one prompt begins the other
        work.append(WorkItem(f"r{i}", arrival, tuple(range(20, 20 + prompt)), output))
    n = draw(st.sampled_from([1, 1, 3]))
    shared = draw(SHARED)
    sizes = [
        (count, seconds, {**shared, **options})
        for count, seconds, options in draw(st.tuples(POOL, POOL))
    ]
    return (
        sizes,
        draw(LINK),
        tuple(work),
        dataclasses.replace(GREEDY, n=n, temperature=float(n > 1)),
    )


def engines_of(size) -> list[CheckedEngine]:
    count, seconds, options = size
    return engines(count, seconds, **options)


def check_idle(members: Iterable[CheckedEngine]) -> None:
    """No engine has a request, pages or blocks in use."""
    for engine in members:
        state = engine.scheduler_state
        assert not engine.has_work
        assert not engine.held
        assert not state.ids
        assert state.pool.num_free == state.pool.num_blocks, "a block leaked"


# by sequence, its steps: (engine, begin, end)
StepsBySequence = dict[str, list[tuple[int, float, float]]]


def steps_by_sequence(outcome: Outcome) -> StepsBySequence:
    steps_of: StepsBySequence = defaultdict(list)
    for engine, steps in enumerate(outcome.steps):
        for begin, end, names in steps:
            for name in names:
                steps_of[name].append((engine, begin, end))
    return steps_of


def check_transfer(
    transfer: Transfer,
    request: RequestRecord,
    prompt: int,
    link: Link,
    steps: Sequence[tuple[int, float, float]],
) -> None:
    """A sequence's pages go after its steps in one engine, and before those in the other one."""
    assert transfer.released <= transfer.arrived <= transfer.adopted
    seconds = transfer.bytes / link.bandwidth
    assert transfer.arrived >= transfer.released + seconds + link.latency - 1e-9
    assert transfer.bytes >= link.block_bytes * math.ceil(prompt / 4)
    for engine, begin, end in steps:
        assert engine in (request.replica, transfer.replica)
        assert end <= transfer.released if engine == request.replica else begin >= transfer.adopted


@drawn.given(15, 60, runs())
def test_laws_of_any_run(case):
    sizes, link, work, sampling = case
    prefill, decode = map(engines_of, sizes)
    outcome = drive(prefill, decode, link, work, sampling)

    check_idle((*prefill, *decode))
    steps_of = steps_by_sequence(outcome)
    sent: dict[int, list[tuple[float, float]]] = {}
    for item, request in zip(work, outcome.requests, strict=True):
        assert [len(branch.token_ids) for branch in request.branches] == [
            item.max_tokens
        ] * sampling.n
        assert {branch.finish_reason for branch in request.branches} == {"length"}
        assert len(request.transfers) == (sampling.n if item.max_tokens > 1 else 0)
        assert len({transfer.replica for transfer in request.transfers}) <= 1, (
            "branches were torn apart"
        )
        moved = {transfer.branch_id: transfer for transfer in request.transfers}
        for branch in request.branches:
            assert all(a < b for a, b in pairwise(branch.token_times))
            steps = steps_of[branch.branch_id]
            if branch.branch_id not in moved:
                assert {engine for engine, _, _ in steps} == {request.replica}
                continue
            transfer = moved[branch.branch_id]
            check_transfer(transfer, request, len(item.prompt_token_ids), link, steps)
            assert branch.token_times[0] == transfer.released
            assert transfer.adopted < branch.token_times[1]
            end = transfer.arrived - link.latency
            span = end - transfer.bytes / link.bandwidth, end
            sent.setdefault(request.replica, []).append(span)
    for spans in sent.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans)), "a link sent two at a time"
    for steps in outcome.steps:
        assert all(a[1] <= b[0] for a, b in pairwise(steps))
    assert drive(*map(engines_of, sizes), link, work, sampling) == outcome


@drawn.given(15, 60, runs(), st.floats(0.05, 1.0))
def test_a_split_conserves_tokens(case, split):
    """Each token is computed in one of two engines, the first share in `prefill`."""
    sizes, link, work, sampling = case
    prefill, decode = map(engines_of, sizes)
    computed: dict[tuple[str, str], int] = {}
    preempted: set[str] = set()
    for pool, members in (("prefill", prefill), ("decode", decode)):
        for engine in members:
            note_tokens(engine, pool, computed, preempted)
    outcome = drive(prefill, decode, link, work, sampling, split=split)

    check_idle((*prefill, *decode))
    budget = sizes[0][2]["max_num_batched_tokens"]
    for item, request in zip(work, outcome.requests, strict=True):
        prompt = len(item.prompt_token_ids)
        share = split * (prompt + item.max_tokens)
        for branch in request.branches:
            assert len(branch.token_ids) == item.max_tokens
            assert all(a < b for a, b in pairwise(branch.token_times))
        if sampling.n > 1 or sizes[0][2]["enable_prefix_caching"] or item.request_id in preempted:
            continue
        counts = [computed.get((pool, item.request_id), 0) for pool in ("prefill", "decode")]
        assert sum(counts) == prompt + item.max_tokens - 1
        check_share(counts[0], counts[1], share, budget, request)
    assert drive(*map(engines_of, sizes), link, work, sampling, split=split) == outcome


def check_share(
    prefilled: int, decoded: int, share: float, budget: int, request: RequestRecord
) -> None:
    """A request leaves `prefill` after the step in which its share is computed.

    Args:
        prefilled, decoded: tokens that each pool computed.
        share: the tokens that `prefill` should compute.
        budget: the most tokens of a step.
    """
    if share > prefilled + decoded:
        assert not decoded
        return
    assert prefilled >= share or not decoded
    assert bool(decoded) == bool(request.transfers)
    assert prefilled < share + budget, "it leaves after the step in which it has its share"
    for transfer in request.transfers:
        assert transfer.released <= transfer.arrived <= transfer.adopted


def note_tokens(
    engine: CheckedEngine, pool: str, computed: dict[tuple[str, str], int], preempted: set[str]
) -> None:
    """Count the tokens that an engine computes of each sequence, and which ones it preempts."""
    step = engine.step

    def noted_step() -> StepResult | None:
        result = step()
        if result is not None:
            for seq, count in zip(result.plan.seqs, result.plan.counts, strict=True):
                place = pool, seq.request_id
                computed[place] = computed.get(place, 0) + count
            preempted.update(result.plan.preempted)
        return result

    engine.step = noted_step  # type: ignore[method-assign]


def test_a_request_is_split_in_its_prompt_or_in_its_output():
    """Steps of a second and 8 tokens, pages that move at once."""
    work = [WorkItem("a", 0.0, tuple(range(20, 40)), 5)]
    token_times = {}
    for split in (0.3, 0.6, 0.9, 1.0):
        options = {"max_num_batched_tokens": 8, "enable_prefix_caching": False}
        outcome = drive(engines(1, **options), engines(1, **options), Link(1.0), work, split=split)
        (request,) = outcome.requests
        steps = [len(steps) for steps in outcome.steps]
        token_times[split] = request.branches[0].token_times, steps
    # 8, 16, 20 tokens of the prompt, and 4 that decode
    assert token_times == {
        0.3: ((3.0, 4.0, 5.0, 6.0, 7.0), [1, 6]),
        0.6: ((3.0, 4.0, 5.0, 6.0, 7.0), [2, 5]),
        0.9: ((3.0, 4.0, 5.0, 6.0, 7.0), [6, 1]),
        1.0: ((3.0, 4.0, 5.0, 6.0, 7.0), [7, 0]),
    }


def naive(work, link: Link, prompts: StepTime, decodes: StepTime) -> dict[str, list[float]]:
    """Times of tokens with room for all: whole prompts, all that wait at once; then all decodes at
    once.
    """
    times: dict[str, list[float]] = {item.request_id: [] for item in work}
    waiting = list(work)
    clock = 0.0
    free = 0.0
    moving = []
    while waiting:
        clock = max(clock, waiting[0].arrival)
        batch = [item for item in waiting if item.arrival <= clock]
        waiting = waiting[len(batch) :]
        clock += prompts(
            Work(sum(len(item.prompt_token_ids) for item in batch), len(batch), 0, 0, 0)
        )
        for item in batch:
            times[item.request_id].append(clock)
            if item.max_tokens > 1:
                free = (
                    max(free, clock)
                    + -(-len(item.prompt_token_ids) // 4) * link.block_bytes / link.bandwidth
                )
                moving.append((free + link.latency, item))
    clock = 0.0
    running = []
    while moving or running:
        if not running:
            clock = max(clock, moving[0][0])
        running += [item for arrived, item in moving if arrived <= clock]
        moving = [moved for moved in moving if moved[0] > clock]
        clock += decodes(Work(len(running), len(running), 0, 0, 0))
        for item in running:
            times[item.request_id].append(clock)
        running = [item for item in running if len(times[item.request_id]) < item.max_tokens]
    return times


@drawn.given(15, 60, runs())
def test_with_room_for_all_the_times_are_those_of_a_naive_model(case):
    _, link, work, _ = case
    options = {"mixed_steps": False, "chunked_prefill": False, "enable_prefix_caching": False}
    options |= {"num_blocks": 400, "max_num_seqs": 64, "max_num_batched_tokens": 2048}

    def prompts(work: Work) -> float:
        return 0.123 + 0.01 * work.tokens

    def decodes(work: Work) -> float:
        return 0.0711 + 0.02 * work.sequences

    outcome = drive(engines(1, prompts, **options), engines(1, decodes, **options), link, work)
    for name, times in naive(work, link, prompts, decodes).items():
        (request,) = [r for r in outcome.requests if r.request_id == name]
        assert request.branches[0].token_times == pytest.approx(times)


def test_blocks_in_prefill_are_held_until_the_pages_were_adopted():
    """`prefill` has room for one prompt."""
    work = [WorkItem("a", 0.0, (20,) * 8, 4), WorkItem("b", 0.0, (30,) * 8, 4)]
    prefill = engines(1, num_blocks=3, enable_prefix_caching=False)
    outcome = drive(prefill, engines(1), Link(1.0, 1.0), work)
    a, b = outcome.requests
    assert a.transfers[0].adopted == 3.0  # two blocks, from 1.0 on
    assert b.first_scheduled == 3.0


def test_sequences_wait_for_room_in_their_order():
    """`decode` has one row."""
    work = [WorkItem(name, 0.0, (20 + i,) * 4, 3) for i, name in enumerate("abc")]
    outcome = drive(engines(1), engines(1, max_num_seqs=1), Link(1.0), work)
    assert [request.transfers[0].arrived for request in outcome.requests] == [1.0] * 3
    assert [request.transfers[0].adopted for request in outcome.requests] == [1.0, 3.0, 5.0]


def test_each_pool_has_its_router():
    work = [WorkItem(f"r{i}", 0.0, (20 + i,) * 4, 3) for i in range(6)]
    outcome = drive(engines(2), engines(3), Link(1.0), work, router=ROUND_ROBIN)
    assert [request.replica for request in outcome.requests] == [0, 1, 0, 1, 0, 1]
    assert {request.transfers[0].replica for request in outcome.requests} == {2, 3, 4}


def test_a_request_that_decode_can_never_run_is_refused():
    work = [WorkItem("a", 0.0, (20,) * 30, 20)]
    with pytest.raises(
        ValueError, match=r"an engine of pools.decode refused a: .*but the pool has 4.*Bound"
    ):
        drive(engines(1), engines(1, num_blocks=4), Link(1.0), work)
    with pytest.raises(ValueError, match="the engine refused a"):
        drive(engines(1, num_blocks=4), engines(1), Link(1.0), work)


def plans_of(engine, monkeypatch) -> list[Plan]:
    """The plans of the steps that the engine will make."""
    plans: list[Plan] = []
    step = engine.step

    def noted_step():
        result = step()
        if result is not None:
            plans.append(result.plan)
        return result

    monkeypatch.setattr(engine, "step", noted_step)
    return plans


@pytest.mark.default_cases("apart")
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 24, "mixed_steps": False}], ids=["mixed", "apart"]
)
def test_one_of_each_without_a_link_has_the_plans_of_a_real_pair(tiny, monkeypatch, options):
    """Steps of one length, and pages that move at once: step by step the plans of
    `PrefillDecode`.
    """
    common = {
        "block_size": 4,
        "num_blocks": 64,
        "max_model_len": 96,
        "enable_prefix_caching": False,
    }
    common |= {"max_num_seqs": 16, "max_num_batched_tokens": 16, "token_buckets": (64,), **options}
    lengths = [(5, 4), (22, 7), (17, 1), (11, 12), (40, 3), (3, 9), (22, 2)]
    prompts = [list(range(20 + i, 20 + i + prompt)) for i, (prompt, _) in enumerate(lengths)]
    llms = [LLM(tiny, progress=False, **common) for _ in range(2)]
    real = [plans_of(llm.engine, monkeypatch) for llm in llms]
    params = [dataclasses.replace(GREEDY, max_tokens=output) for _, output in lengths]
    answers = PrefillDecode(*llms).generate(prompts, params)

    work = [
        WorkItem(f"r{i}", 0.0, tuple(prompt), lengths[i][1]) for i, prompt in enumerate(prompts)
    ]
    prefill = engines(1, **common)
    decode = engines(1, **common)
    simulated = [plans_of(engine, monkeypatch) for engine in (*prefill, *decode)]
    outcome = drive(prefill, decode, Link(1.0), work)

    def rows(plans: list[Plan]):
        return [(plan.lengths, plan.starts, plan.counts) for plan in plans]

    assert rows(simulated[0]) == rows(real[0])
    assert rows(simulated[1]) == rows(real[1])
    assert [len(request.outputs[0].token_ids) for request in answers] == [
        len(request.branches[0].token_ids) for request in outcome.requests
    ]

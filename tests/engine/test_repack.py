"""A step or a span that is packed from an earlier one has the arrays that `pack` makes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import chex
import numpy as np
import pytest
from hypothesis import strategies as st

from pagedjax.device.batch import Shapes, StepShape, blank_sampling, joined
from pagedjax.engine.lookahead import SentStep, merged_plans, places_in_span, sampling
from pagedjax.engine.pack import Sources, pack
from pagedjax.engine.repack import Packed, pack_next, packed
from pagedjax.engine.requests import SequenceData
from pagedjax.host import scheduler
from pagedjax.host.decode_spans import DecodeStep, next_decodes
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Plan, Request
from pagedjax.options.params import SamplingParams
from tests import drawn

BLOCK = 4
LIMITS = SchedulerConfig(
    block_size=BLOCK, num_blocks=24, max_num_batched_tokens=16, max_num_seqs=8, max_model_len=40
)
SHAPES = Shapes(
    tokens=(4, 8, 16), max_seqs=8, block_size=BLOCK, table_width=10, max_model_len=40, vocab_size=50
)
BLANKS = {n: blank_sampling(n) for n in (4, 8)}
OPTIONS = (
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(prompt_logprobs=1),
)
FED = np.arange(8, dtype=np.int32)


def data_of(number: int, draw: random.Random) -> SequenceData:
    tokens = np.arange(60, dtype=np.int32) + number
    params = draw.choice(OPTIONS[: 3 + draw.randrange(3)])
    return SequenceData(params, 2**32 - 1 - number, 1 + number % 9, tokens)


def sent(plans: Sequence[Plan]) -> SentStep:
    """The last step of a program."""
    output: Any = SimpleNamespace(fed=FED)
    place = places_in_span(plans)[-1]
    return SentStep(plans[-1], output, 0.0, place=place)


def following(state: SchedulerState, plan: Plan, steps: int) -> list[DecodeStep]:
    """Steps of decodes behind a plan; none if there are fewer than `steps` of them."""
    found: list[DecodeStep] = []
    while len(found) < steps:
        step = next_decodes(state, plan)
        if step is None:
            return []
        found.append(step)
        state, plan, *_ = step
    return found


def check_next(
    past: Packed,
    plan: Plan,
    last: Plan,
    data: dict[str, SequenceData],
    shapes: Shapes,
    sources: Sources,
) -> Packed | None:
    """`pack_next`, compared with `pack`; what was sent stays as it is."""
    before = past.transfer.words.copy()
    step = pack_next(past, plan, data, shapes, BLANKS, sources, last)
    np.testing.assert_array_equal(past.transfer.words, before)
    if step is None:
        return None
    batch = pack(plan, data, shapes, BLANKS, sources=sources)
    assert step.shape.plain == batch.sampling.is_plain
    assert step.shape.logprobs == (batch.sampling.num_top is not None)
    transfer = joined(batch)
    assert (step.transfer.tree, step.transfer.layout) == (transfer.tree, transfer.layout)
    expected = transfer.words.copy()
    if sources.looks_ahead:  # a token that the device feeds is not read
        fed = transfer.words[step.places["feed"]] >= 0
        place = step.places["tokens"]
        expected[place] = np.where(fed, step.transfer.words[place], transfer.words[place])
    np.testing.assert_array_equal(step.transfer.words, expected)
    chex.assert_trees_all_equal(step.transfer.rest, transfer.rest)
    return step


def run(seed: int, *, looks_ahead: bool, programs_for_decodes: bool) -> Counter[int]:
    """Random requests until all have ended, some of their steps in spans of 3 -> how many programs
    were packed from others, by their steps.
    """
    draw = random.Random(seed)
    decode_buckets = (4, 8) if programs_for_decodes else ()
    shapes = SHAPES._replace(span=3, decode_buckets=decode_buckets, plain=draw.random() < 0.5)
    state = scheduler.init(LIMITS)
    data: dict[str, SequenceData] = {}
    previous: SentStep | None = None
    past: Packed | None = None
    counts: Counter[int] = Counter()
    spans = draw.random() < 0.5
    for number in range(60):
        if number < 40 and draw.random() < 0.3:
            name = f"r{number}"
            data[name] = data_of(number, draw)
            forks = (f"{name}/1",) if draw.random() < 0.2 else ()
            data |= dict.fromkeys(forks, data[name])
            stops = frozenset({7})
            request = Request(name, data[name].prompt_len, draw.randint(1, 20), 0, stops)
            state = scheduler.submit(state, request._replace(forks=forks))
        state, plan = scheduler.schedule(state, "fcfs")
        if plan.seqs:
            sources = Sources(looks_ahead=looks_ahead)
            if looks_ahead and previous is not None and draw.random() < 0.7:
                unknown = sampling(previous.plan)
                if draw.random() < 0.3:
                    unknown = [arrival for arrival in unknown if draw.random() < 0.5]
                sources = sources._replace(previous=previous, unknown_arrivals=frozenset(unknown))
            decodes = following(state, plan, shapes.span - 1) if spans else []
            plans = [plan, *[step.plan for step in decodes]]
            whole = plan
            if decodes:
                whole, steps = merged_plans(plans)
                sources = sources._replace(span=steps)
                state, plan, *_ = decodes[-1]
            step = None if past is None else check_next(past, whole, plan, data, shapes, sources)
            counts[len(plans)] += step is not None
            if step is None:
                batch = pack(whole, data, shapes, BLANKS, sources=sources)
                shape = StepShape(
                    len(batch.tokens),
                    len(batch.last),
                    batch.cu_q_lens is None,
                    len(plans),
                    plain=batch.sampling.is_plain,
                    logprobs=batch.sampling.num_top is not None,
                )
                _, step = packed(whole, batch, shape, BLANKS[shape.samples], sources, plan)
            past = step or past
            previous = sent(plans)
        state, _ = scheduler.commit(state, plan, [draw.randrange(30) for _ in plan.seqs])
    return counts


@pytest.mark.parametrize("plain", [False, True])
def test_behind_the_last_row_with_log_probabilities_an_engine_with_plain_programs_packs_anew(plain):
    shapes = SHAPES._replace(plain=plain)
    wanted = SamplingParams(temperature=0.0, logprobs=2)
    tokens = np.arange(60, dtype=np.int32)
    data = {
        "a": SequenceData(wanted, 0, 3, tokens),
        "b": SequenceData(SamplingParams(), 0, 3, tokens),
    }
    state = scheduler.init(LIMITS)
    for name, length in (("a", 2), ("b", 5)):
        state = scheduler.submit(state, Request(name, 3, length))
    plans = []
    for _ in range(5):
        state, plan = scheduler.schedule(state, "fcfs")
        plans.append(plan)
        state, _ = scheduler.commit(state, plan, [9] * len(plan.seqs))
    assert [len(plan.seqs) for plan in plans] == [2, 2, 1, 1, 1]
    batch = pack(plans[1], data, shapes, BLANKS)
    assert batch.sampling.is_plain == plain
    shape = StepShape(4, 4, plain=plain)
    _, both_rows = packed(plans[1], batch, shape, BLANKS[4], Sources())
    assert both_rows is not None
    one_row = pack_next(both_rows, plans[2], data, shapes, BLANKS, Sources())
    assert (one_row is None) == plain


@pytest.mark.parametrize("programs_for_decodes", [False, True])
@pytest.mark.parametrize("looks_ahead", [False, True])
@drawn.examples(4, 300)
def test_random_steps_are_packed_as_whole_ones(looks_ahead, programs_for_decodes, number):
    counts: Counter[int] = Counter()
    seeds = []

    def holds(seed: int) -> None:
        seeds.append(seed)
        counts.update(run(seed, looks_ahead=looks_ahead, programs_for_decodes=programs_for_decodes))

    drawn.check(number, holds, seed=st.integers(0, 2**32 - 1))
    assert counts[1] > 2 * len(seeds), "few steps were packed from others"
    assert counts[3] > len(seeds) / 4, "few spans were packed from others"

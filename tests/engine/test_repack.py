"""A step that is packed from an earlier one has the arrays that `pack` makes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import chex
import numpy as np
import pytest
from hypothesis import strategies as st

from pagedjax.device.batch import Shapes, StepShape, blank_sampling, joined
from pagedjax.engine.lookahead import SentStep, sampling
from pagedjax.engine.pack import Sources, pack
from pagedjax.engine.repack import Packed, pack_next, packed
from pagedjax.engine.requests import SequenceData
from pagedjax.host import scheduler
from pagedjax.host.scheduler import SchedulerConfig
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


def sent(plan: Plan) -> SentStep:
    output: Any = SimpleNamespace(fed=FED)
    return SentStep(plan, output, 0.0)


def check_next(
    past: Packed, plan: Plan, data: dict[str, SequenceData], shapes: Shapes, sources: Sources
) -> Packed | None:
    """`pack_next`, compared with `pack`; what was sent stays as it is."""
    before = past.transfer.words.copy()
    step = pack_next(past, plan, data, shapes, BLANKS, sources)
    np.testing.assert_array_equal(past.transfer.words, before)
    if step is None:
        return None
    transfer = joined(pack(plan, data, shapes, BLANKS, sources=sources))
    assert (step.transfer.tree, step.transfer.layout) == (transfer.tree, transfer.layout)
    expected = transfer.words.copy()
    if sources.looks_ahead:  # a token that the device feeds is not read
        fed = transfer.words[step.places["feed"]] >= 0
        place = step.places["tokens"]
        expected[place] = np.where(fed, step.transfer.words[place], transfer.words[place])
    np.testing.assert_array_equal(step.transfer.words, expected)
    chex.assert_trees_all_equal(step.transfer.rest, transfer.rest)
    return step


def run(seed: int, *, looks_ahead: bool, programs_for_decodes: bool) -> int:
    """Random requests until all have ended -> how many steps were packed from others."""
    draw = random.Random(seed)
    shapes = SHAPES._replace(decode_buckets=(4, 8)) if programs_for_decodes else SHAPES
    state = scheduler.init(LIMITS)
    data: dict[str, SequenceData] = {}
    previous: SentStep | None = None
    past: Packed | None = None
    count = 0
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
            step = None if past is None else check_next(past, plan, data, shapes, sources)
            count += step is not None
            if step is None:
                batch = pack(plan, data, shapes, BLANKS, sources=sources)
                shape = StepShape(len(batch.tokens), len(batch.last), batch.cu_q_lens is None)
                _, step = packed(plan, batch, shape, BLANKS[shape.samples], sources)
            past = step or past
            previous = sent(plan)
        state, _ = scheduler.commit(state, plan, [draw.randrange(30) for _ in plan.seqs])
    return count


@pytest.mark.parametrize("programs_for_decodes", [False, True])
@pytest.mark.parametrize("looks_ahead", [False, True])
@drawn.examples(4, 300)
def test_random_steps_are_packed_as_whole_ones(looks_ahead, programs_for_decodes, number):
    counts = []

    def holds(seed: int) -> None:
        counts.append(run(seed, looks_ahead=looks_ahead, programs_for_decodes=programs_for_decodes))

    drawn.check(number, holds, seed=st.integers(0, 2**32 - 1))
    assert sum(counts) > 3 * len(counts), "few steps were packed from others"

"""How many drafts an engine asks for: which sequences may have some, and what pays by acceptance
and times.
"""

from __future__ import annotations

import random
from typing import Any

import chex
import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.device.batch import Shapes
from pagedjax.engine import drafting
from pagedjax.engine.drafters import Drafter
from pagedjax.engine.drafting import Drafting, paying
from pagedjax.engine.requests import SequenceData
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.types import Request, Running, Seq, StepResult, Verified
from pagedjax.options.config import Speculative
from tests.refusals import refused

BUCKETS = (8, 16, 64)
SHAPES = Shapes(
    BUCKETS, max_seqs=8, block_size=4, table_width=16, max_model_len=64, vocab_size=320, drafts=4
)


ANY = Drafting(Drafter("any", lambda *_: []))


SMALL = Drafting(Drafter("small", None))


PLAN = scheduler.schedule(
    scheduler.init(
        scheduler.SchedulerConfig(
            block_size=4, num_blocks=8, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=16
        )
    ),
    FCFS,
)[1]


def step_of(size: int, seconds: float, *events: Verified) -> StepResult:
    return StepResult(PLAN, events, 0.0, seconds, seconds, size, 0)


@pytest.mark.parametrize(
    ("acceptance", "seconds", "num_decodes", "expected"),
    [
        (0.9, {8: 1.0, 16: 1.0, 64: 1.0}, 2, 4),  # steps cost the same, so all drafts are free
        (0.9, {8: 1.0, 16: 2.0, 64: 8.0}, 2, 3),  # 8 tokens are free and 10 cost twice as much
        # the batch is full: a draft costs as much as a token
        (0.3, {8: 1.0, 16: 4.0, 64: 16.0}, 8, 0),
        (0.5, {}, 2, 0),  # nothing was measured: steps without drafts are first
        (0.5, {64: 8.0}, 2, 0),
        (0.9, {8: 1.0, 64: 8.0}, 2, 3),  # a step of 16 tokens is on the line between them
        # steps above the largest are taken to cost as much, until they are tried
        (0.5, {8: 1.0}, 8, 4),
    ],
)
def test_adaptive_drafts_are_as_many_as_pay(acceptance, seconds, num_decodes, expected):
    learned = ANY._replace(acceptance=acceptance, seconds=seconds)
    assert paying(learned, 4, num_decodes, 0, BUCKETS) == expected


@pytest.mark.parametrize(("seconds", "expected"), [({}, 4), ({8: 0.5}, 3), ({8: 2.0}, 0)])
def test_the_time_of_drafts_on_the_device_counts(seconds, expected):
    learned = SMALL._replace(acceptance=0.9, seconds={8: 1.0, 16: 1.0, 64: 1.0})
    assert paying(learned._replace(draft_seconds=seconds), 4, 2, 0, BUCKETS) == expected


def test_a_draft_is_tried_again_after_some_steps_without():
    learned = ANY._replace(acceptance=0.0, seconds={8: 1.0, 16: 2.0, 64: 8.0})
    assert paying(learned, 4, 8, 0, BUCKETS) == 0
    assert paying(learned._replace(idle=drafting.RETRY), 4, 8, 0, BUCKETS) == 1


def test_the_average_acceptance_approaches_the_true_one():
    learned = ANY
    draw = random.Random(0)
    acceptances = []
    for step in range(2000):
        accepted = 0
        while accepted < 4 and draw.random() < 0.4:
            accepted += 1
        event = Verified(step, ("a",), (4,), (accepted,), (1,))
        learned = drafting.learned(learned, step_of(8, 1.0, event))
        acceptances.append(learned.acceptance)
    # 92 drafts count: a standard deviation of 0.04 for the newest, and less for the mean
    assert abs(np.mean(acceptances[100:]) - 0.4) < 0.02
    assert np.std(acceptances[100:]) < 0.08
    assert learned.seconds == {8: 1.0}


def test_the_time_of_a_draft_is_that_of_the_program_by_its_drafts():
    """The program of drafts runs once for each draft of the row that has most of them."""
    result = step_of(8, 3.0)._replace(
        plan=PLAN._replace(drafts=(2, 4)), draft_seconds=2.0, draft_rows=4
    )
    learned = drafting.learned(SMALL, result)
    assert learned.draft_seconds == {4: 0.5}
    longer = result._replace(draft_seconds=4.0)
    assert drafting.learned(learned, longer).draft_seconds == {4: 0.5 + drafting.WEIGHT * 0.5}
    assert drafting.learned(learned, longer._replace(compilations=1)).draft_seconds == {4: 0.5}


def offered(learned: Drafting, running: Running, sequences: dict[str, SequenceData]) -> Any:
    return drafting.offer(
        learned, *drafting.candidates(learned, running, SHAPES.tokens), sequences, SHAPES.vocab_size
    )


def test_only_decodes_with_a_generated_token_are_offered_drafts():
    """Not a sequence that has generated nothing, that has tokens of its prompt to compute, that is
    a beam, or whose tokens are given.
    """
    options = Speculative(num_tokens=2, adaptive=False)
    always = drafting.start(Drafter("always", lambda memory, name, sequences, k: [5] * k), options)
    kinds = {
        "decode": (7, 6),
        "prompt": (6, 0),
        "last of the prompt": (6, 5),
        "preempted": (9, 4),
        "beam": (7, 6),
        "given": (7, 6),
    }
    params = {"given": SamplingParams(trace_decode_token_ids=(5, 5, 5))}
    seqs = tuple(
        Seq(Request(name, 6, 10, beams=name == "beam"), i, 16, *lengths)
        for i, (name, lengths) in enumerate(kinds.items())
    )
    lengths, computed = zip(*kinds.values(), strict=True)
    sequences = {
        name: SequenceData(params.get(name, SamplingParams()), 0, 6, np.full(16, 9, np.int32))
        for name in kinds
    }
    running = Running(seqs, lengths, computed)
    # a drafter on the device makes its drafts later, when they have slots
    on_device = drafting.start(Drafter("draft", None), options)
    assert offered(on_device, running, sequences) == {"decode": 2}
    chex.assert_trees_all_equal(*(data.tokens for data in sequences.values()))
    assert offered(always, running, sequences) == {"decode": 2}
    chex.assert_trees_all_equal(
        sequences["decode"].tokens, np.array([9] * 7 + [5] * 2 + [9] * 7, np.int32)
    )
    chex.assert_trees_all_equal(*(sequences[name].tokens for name in kinds if name != "decode"))


def test_the_first_step_of_a_size_is_not_timed():
    """It is two to three times as slow. If its time counted, drafts would seem too expensive, and
    without drafts no later step would correct that time.
    """
    learned = ANY
    for size, seconds in ((1, 3.0), (1, 1.0), (4, 3.0)):
        learned = drafting.learned(learned, step_of(size, seconds))
    assert learned.seconds == {1: 1.0}
    drafts = paying(learned._replace(acceptance=0.8), 3, 1, 0, (1, 4))
    assert drafts == 3, "one slow step ended the drafts"
    assert drafting.learned(learned, step_of(4, 1.5)).seconds == {1: 1.0, 4: 1.5}


@pytest.mark.parametrize(
    ("propose", "message"),
    [
        (lambda *_: None, "propose of the drafter 'mine' returned None for 'a'; return at most 2"),
        (lambda *_: [[1, 2]], "propose of the drafter 'mine' returned .*; return at most 2 tokens"),
        (
            lambda m, i, t, k: t[99],
            r"propose of the drafter 'mine' raised IndexError: .*drafting\.py",
        ),
    ],
    ids=["none", "a table", "error"],
)
def test_a_drafter_that_returns_or_raises_something_else_is_told(propose, message):
    learned = drafting.start(Drafter("mine", propose), Speculative(num_tokens=2, adaptive=False))
    sequences = {"a": SequenceData(SamplingParams(), 0, 6, np.full(16, 9, np.int32))}
    with refused(message):
        drafting.offer(learned, [("a", 7)], 2, sequences, SHAPES.vocab_size)

"""Spans change which program computes a step and nothing else: plans, events and tokens are the
same.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.engine import lookahead
from pagedjax.engine import state as engine_state
from pagedjax.host.replay import verify
from pagedjax.host.types import EMPTY_PLAN, Request, Seq
from pagedjax.viewer import read_recording
from tests.engine.runs import greedy, sampled
from tests.engine.test_lookahead import (
    CONFIG,
    OFTEN,
    Observed,
    compare,
    fill_cache,
    make,
    play,
    tokens,
)
from tests.refusals import refused

BUCKETS = (6, 24)  # of CONFIG's sequences, and of its step
# the steps of a span, lookahead; with late stops
QUICK = [(4, 1)]
SLOW = [pytest.param(setting, marks=pytest.mark.slow) for setting in ((8, 0), (2, 2))]
LATE = [(4, 1), pytest.param((1, 1), marks=pytest.mark.slow)]


def span_llm(tiny, span: int, depth: int, **config):
    """Without spans it has the one bucket of test_lookahead.py. It has the programs of users, one
    for each bucket and span, but those of slow settings: there steps have plain programs, too.
    """
    buckets = BUCKETS if span > 1 else CONFIG["token_buckets"]
    if (span, depth) in ((1, 0), *QUICK):
        config = {"compilation": "eager", **config}
    return make(tiny, depth, decode_span=span, token_buckets=buckets, **config)


class LLMs(dict[tuple[int, int], LLM]):
    """By the steps of a span and lookahead, made when a test first needs one."""

    def __init__(self, model: Any, *, late_stops: bool) -> None:
        super().__init__()
        self._model = model
        self._late_stops = late_stops

    def __missing__(self, setting: tuple[int, int]) -> LLM:
        self[setting] = span_llm(self._model, *setting, late_stops=self._late_stops)
        return self[setting]


@pytest.fixture(scope="module")
def llms(tiny):
    return LLMs(tiny, late_stops=False)


@pytest.fixture(scope="module")
def late_llms(tiny):
    return LLMs(tiny, late_stops=True)


@pytest.mark.parametrize("setting", [*QUICK, *SLOW])
def test_recordings_are_byte_identical_with_spans(llms, tmp_path, setting):
    engines = llms[1, 0].engine, llms[setting].engine
    of_prompts = setting not in QUICK  # they have a program of their own
    pairs = [compare(engines, seed, tmp_path, of_prompts=of_prompts) for seed in range(3)]
    for plain, _ in pairs:
        assert plain.programs == plain.sent == plain.steps
    assert sum(run.sent - run.programs for _, run in pairs) > 10, "there was no span"


@pytest.mark.parametrize("setting", LATE)
def test_recordings_with_late_stops_are_byte_identical(late_llms, tmp_path, setting):
    engines = late_llms[1, 0].engine, late_llms[setting].engine
    for seed in range(3):
        compare(engines, seed, tmp_path, of_prompts=setting not in QUICK)
        assert verify(tmp_path / "0.jsonl").identical


def test_parameters_change_between_tokens_of_a_late_run(late_llms, llms):
    """The step on the device is committed first: all tokens before the update are of the old
    parameters.
    """
    engine = late_llms[4, 1].engine
    engine.reset()
    params = engine.runtime.model.params
    engine.add("a", tokens(9, 1), greedy(12))
    first = [engine.step() for _ in range(3)]
    assert engine.scheduler_state.in_flight
    engine.update_params(params, pending="keep")
    assert not engine.scheduler_state.in_flight
    results = [*first, *Observed(engine).finish()]
    plain = llms[1, 0].engine
    plain.reset()
    plain.add("a", tokens(9, 1), greedy(12))
    assert sampled(results) == sampled(Observed(plain).finish())


def test_a_sequence_of_a_late_engine_is_not_handed_over(late_llms):
    engine = late_llms[1, 0].engine
    engine.reset()
    engine.add("a", tokens(9, 1), greedy(12))
    engine.step()
    with refused("late_stops is True, and a sequence goes to another engine"):
        engine.handover("a")


def test_a_late_run_goes_on_after_a_step_that_failed(late_llms, llms):
    engine = late_llms[4, 1].engine
    engine.reset()
    engine.add("a", tokens(9, 1), greedy(12))
    results = [engine.step() for _ in range(3)]
    failing = mock.patch.object(engine_state, "finish", side_effect=RuntimeError("it is lost"))
    with failing, pytest.raises(RuntimeError, match="lost"):
        engine.step()
    assert not engine.scheduler_state.in_flight
    results += Observed(engine).finish()
    plain = llms[1, 0].engine
    plain.reset()
    plain.add("a", tokens(9, 1), greedy(12))
    assert sampled(results) == sampled(Observed(plain).finish())


def test_a_late_recording_is_shown_step_by_step(late_llms, tmp_path):
    engine = late_llms[1, 0].engine
    play(engine, 0, tmp_path / "run.jsonl", of_prompts=False)
    run = read_recording.read(tmp_path / "run.jsonl")
    text = (tmp_path / "run.jsonl").read_text()
    steps = [frame["step"] for frame in run.frames]
    assert steps == sorted(steps)
    assert set(range(text.count('{"commit":'))) <= set(steps)


def test_late_stop_strings_end_at_the_same_token(late_llms, llms):
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, stop=("e", "th"), ignore_eos=True)
        for i in range(8)
    ]
    prompts = [tokens(5 + 3 * i, i) for i in range(8)]
    expected = llms[1, 0].generate(prompts, params)
    assert {output.outputs[0].finish_reason for output in expected} == {"stop", "length"}
    for setting in ((1, 0), (4, 1)):
        outputs = late_llms[setting].generate(prompts, params)
        answers = [output.outputs[0] for output in outputs]
        for answer, plain_answer in zip(answers, expected, strict=True):
            assert answer.token_ids == plain_answer.outputs[0].token_ids
            assert answer.text == plain_answer.outputs[0].text


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 20, "enable_prefix_caching": False},
        {"num_blocks": 20, "preemption": "swap", "swap_space_gib": 0.001},
        {"num_blocks": 10, "block_size": 8, "policy": "shortest"},
        {"mixed_steps": False},
        {"reservation": "pow2", "enable_prefix_caching": False},
    ],
    ids=["recomputed", "swapped", "shortest first", "separate steps", "reserved"],
)
@pytest.mark.parametrize("late", [False, True])
def test_recordings_are_byte_identical_with_spans_in_other_modes(tiny, tmp_path, config, late):
    engines = [
        span_llm(tiny, span, depth, max_model_len=64, late_stops=late, **config).engine
        for span, depth in ((1, 0), (4, 2))
    ]
    kinds = {"kinds": ("plain", "stops", "penalties")} if "reservation" in config else {}
    pairs = [compare(engines, seed, tmp_path, **kinds) for seed in range(3)]
    assert sum(run.sent - run.programs for _, run in pairs) > 0, "there was no span"
    assert verify(tmp_path / "1.jsonl").identical


def test_rows_end_within_a_span_and_the_next_span_follows(llms):
    """The ends are known in advance, so every step but the first is computed in a span or behind
    one.
    """
    outcomes = []
    for setting in ((1, 0), (4, 1)):
        engine = llms[setting].engine
        engine.reset()
        for i in range(6):
            engine.add(str(i), tokens(3 + i, i), greedy(30 + 3 * i))
        run = Observed(engine)
        run.finish()
        outcomes.append(run)
    plain, spans = outcomes
    assert spans.results == plain.results
    assert spans.late == 1
    assert spans.sent == spans.steps
    assert spans.programs <= 2 + spans.steps // 4 + 3


def test_spans_go_on_beside_a_full_cache_with_empty_blocks(tiny):
    """Six rows take 12 blocks of four tokens in two spans of 4, and no cached one."""
    outcomes = []
    for setting, kept in (((1, 0), 12), ((4, 1), 12), ((4, 1), 0)):
        engine = span_llm(tiny, *setting, empty_blocks=kept).engine
        fill_cache(engine)
        for i in range(6):
            engine.add(str(i), tokens(3, 50 + i), greedy(30))
        run = Observed(engine)
        run.finish()
        outcomes.append(run)
    plain, spans, without = outcomes
    assert spans.results == plain.results
    assert spans.late == 1
    assert without.late > 3
    assert spans.programs <= 2 + spans.steps // 4


def test_a_stop_within_a_span_costs_no_other_row_a_step(llms):
    """The steps of a span behind a stop are used: the row of the sequence that ended is ignored."""
    engine = llms[4, 1].engine
    engine.reset()
    # one block is enough for each, so that no allocation differs after a stop
    for i in range(6):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=40, stop_token_ids=OFTEN)
        engine.add(str(i), tokens(4, i), params)
    run = Observed(engine)
    stops = sum(
        any(getattr(event, "reason", None) == "stop" for event in result.events)
        for result in run.finish()
    )
    assert stops >= 4
    assert run.programs < run.steps


def test_merged_plans_have_last_tables_and_the_steps_of_each_row():
    seqs = tuple([Seq(Request(f"r{i}", 3, 9), i, 20, 4, 3, (i + 1,)) for i in range(3)])
    first = EMPTY_PLAN._replace(seqs=seqs, lengths=(4,) * 3, starts=(3,) * 3, counts=(1,) * 3)
    grown = seqs[2]._replace(blocks=(0, 9))
    second = first._replace(seqs=(seqs[0], grown), lengths=(5, 5), starts=(4, 4), counts=(1, 1))
    merged, steps = lookahead.merged_plans([first, second])
    assert steps == [2, 1, 2]
    assert [seq.blocks for seq in merged.seqs] == [(1,), (2,), (3, 9)]
    assert merged.lengths == first.lengths
    places = lookahead.places_in_span([first, second])
    assert [list(place.rows) for place in places] == [[0, 1, 2], [0, 2]]


@pytest.mark.parametrize("value", [0, True, 1.5])
def test_an_invalid_span_is_refused(value):
    with refused(r"decode_span is .*; it must be an integer of at least 1"):
        EngineConfig(decode_span=value)


def test_a_span_needs_a_bucket_of_decodes(tiny):
    with refused(
        r"decode_span is 4, .*\(24,\) has more tokens than max_num_seqs 6.*add the bucket 6"
    ):
        make(tiny, 0, **CONFIG | {"decode_span": 4})

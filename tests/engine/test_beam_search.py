"""Beam search: the choice of beams against one that looks at everything, and against transformers;
blocks as forks.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.searches import Offer, beams
from pagedjax.host.types import Beamed, Choice, Forked, Hypothesis, Preempted, Request
from tests.engine.runs import answers, check_idle, greedy, small_llm
from tests.refusals import refused

PROMPTS = {n: np.random.default_rng(n).integers(3, 320, n).tolist() for n in (1, 8, 21, 40)}
BEAMS = BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True)


def make(tiny, **config) -> LLM:
    return small_llm(tiny, **{"block_size": 8, "max_num_seqs": 16} | config)


@pytest.fixture(scope="module")
def llm(tiny):
    return make(tiny)


def search(llm, prompts, params) -> list[list[Hypothesis]]:
    """By prompt, the sequences that `generate` gives."""
    outputs = llm.generate(prompts, params)
    check_idle(llm.engine)
    return [
        [
            Hypothesis(o.token_ids, o.cumulative_logprob, o.score, o.finish_reason)
            for o in out.outputs
        ]
        for out in outputs
    ]


# --- the fold -------------------------------------------------------------------------------------


def table(seed: int, vocab: int, length: int):
    """A made-up language model: the log-probabilities after every sequence of fewer than `length`
    tokens.
    """
    rng = np.random.default_rng(seed)
    rows = {}
    for tokens in sequences_to(vocab, length):
        logits = rng.standard_normal(vocab) * 2
        rows[tokens] = (logits - math.log(np.exp(logits).sum())).tolist()
    return rows


def sequences_to(vocab: int, length: int):
    """Every sequence of fewer than `length` tokens."""
    for m in range(length):
        yield from itertools.product(range(vocab), repeat=m)


def best(row: list[float], number: int):
    order = sorted(range(len(row)), key=lambda token: -row[token])[:number]
    return tuple(order), tuple(row[token] for token in order)


def run(params: BeamSearchParams, stops: frozenset[int], rows) -> tuple[Hypothesis, ...]:
    search = beams.start(params, stops)
    count = beams.candidates(params, len(stops))
    continues = True
    while continues:
        offers = [Offer(*best(rows[beam.token_ids], count)) for beam in search.beams]
        search, continuations = search.advance(offers)
        continues = bool(continuations)
    return search.finished


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1000),
    stops=st.sets(st.integers(0, 3), max_size=2),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]),
    length=st.integers(1, 4),
)
def test_a_wide_beam_finds_the_best_of_all_sequences(seed, stops, penalty, length):
    rows = table(seed, 4, length)
    expected = []
    for tokens in sequences_to(4, length + 1):
        if not tokens or set(tokens[:-1]) & stops:  # no sequence, or one that would end before
            continue
        if len(tokens) == length or tokens[-1] in stops:
            total = sum(rows[tokens[:i]][token] for i, token in enumerate(tokens))
            expected.append((total / len(tokens) ** penalty, tokens))
    expected.sort(reverse=True)
    sequences = run(
        BeamSearchParams(
            beam_width=4**length, max_tokens=length, length_penalty=penalty, early_stopping="never"
        ),
        frozenset(stops),
        rows,
    )
    if penalty < 0:  # then the rule of "never" guesses, as transformers' does
        assert sequences[0].score <= expected[0][0] + 1e-9
        return
    assert sequences[0].token_ids == expected[0][1]
    scores = [score for score, _ in expected[: 4**length]]
    assert [sequence.score for sequence in sequences] == pytest.approx(scores[: len(sequences)])


@pytest.mark.parametrize(("tokens", "finished"), [((3, 9, 4), [(9,)]), ((3, 4, 9), [])])
def test_an_end_behind_the_best_continuations_is_dropped(tokens, finished):
    """Token 9 stops. Two beams."""
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    search, continuations = beams.start(params, frozenset({9})).advance(
        [Offer(tokens, (-1.0, -2.0, -3.0))]
    )
    assert [sequence.token_ids for sequence in search.finished] == finished
    assert [continuation.token_id for continuation in continuations] == [3, 4]


def test_early_stopping_decides_when_the_search_ends():
    """Token 0 stops. Two beams; the second finished sequence is poor, and a running beam would beat
    it later.
    """
    rows = {tokens: np.log([0.3, 0.6, 0.1]).tolist() for tokens in sequences_to(3, 5)}
    rows[()] = np.log([0.5, 0.4, 0.1]).tolist()

    def lengths(early):
        sequences = run(
            BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=1.0, early_stopping=early),
            frozenset({0}),
            rows,
        )
        assert sequences == tuple(sorted(sequences, key=lambda sequence: -sequence.score))
        return [len(sequence.token_ids) for sequence in sequences]

    assert sorted(lengths(True)) == [1, 2]  # as soon as there are two
    assert max(lengths("never")) == 5  # the long ones have the better mean
    assert max(lengths(False)) >= 2


def assert_as_transformers(reference, prompt, sequences, params, eos: list[int]) -> None:
    import torch

    out = reference.generate(
        torch.tensor([prompt]),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = [sequence.score for sequence in sequences]
    assert scores == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
    for sequence, row in zip(sequences, out.sequences[:, len(prompt) :].tolist(), strict=True):
        assert list(sequence.token_ids) == row[: len(sequence.token_ids)]
        assert set(row[len(sequence.token_ids) :]) <= {0}


# --- against transformers -------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("early", [False, True, "never"])
def test_sequences_and_scores_equal_transformers(tiny_folder, llm, early):
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    rng = np.random.default_rng(7)
    prompts = []
    params = []
    for _ in range(12):
        prompts.append(rng.integers(3, 320, int(rng.integers(1, 40))).tolist())
        width = int(rng.integers(2, 7))
        stops = tuple({*rng.integers(0, 320, int(rng.integers(0, 12))).tolist()})
        penalty = float(rng.choice([0.0, 1.0, 2.0, -0.5]))
        length = int(rng.integers(1, 24))
        params.append(
            BeamSearchParams(
                beam_width=width,
                max_tokens=length,
                length_penalty=penalty,
                early_stopping=early,
                stop_token_ids=stops,
            )
        )
    results = search(llm, prompts, params)  # all in the same steps
    for prompt, case, sequences in zip(prompts, params, results, strict=True):
        eos = list(dict.fromkeys((*llm.model.eos_token_ids, *case.stop_token_ids)))
        assert_as_transformers(reference, prompt, sequences, case, eos)
    assert {sequence.reason for result in results for sequence in result} == {"stop", "length"}


# --- the engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(llm):
    return {n: search(llm, [prompt], BEAMS)[0] for n, prompt in PROMPTS.items()}


def test_one_beam_is_greedy_decoding(llm):
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    for prompt in PROMPTS.values():
        (answer,) = answers(llm, [prompt], params)
        ((sequence,),) = search(llm, [prompt], BeamSearchParams(beam_width=1, max_tokens=12))
        assert sequence.token_ids == answer.token_ids
        total = pytest.approx(answer.cumulative_logprob, abs=1e-5)
        assert sequence.cumulative_logprob == total


@pytest.mark.default_cases("num_blocks=28 preemption=swap swap_space_gib=0.01")
@pytest.mark.parametrize(
    "config",
    [
        {"block_size": 1, "num_blocks": 512},
        {"block_size": 32, "num_blocks": 64},
        {"enable_prefix_caching": False},
        {"num_blocks": 28},  # beams are preempted and computed again
        {"num_blocks": 28, "enable_prefix_caching": False},
        {"num_blocks": 28, "preemption": "swap", "swap_space_gib": 0.01},
        # they catch up at different times
        {"num_blocks": 28, "max_num_batched_tokens": 24},
    ],
    ids=lambda config: " ".join(f"{name}={value}" for name, value in config.items()),
)
def test_batch_block_size_caching_and_preemption_change_no_beam(tiny, golden, config):
    """Beams beside greedy, sampled and parallel requests, in the same steps."""
    llm = make(tiny, **config)
    prompts = [PROMPTS[n] for n in (21, 40, 8, 21, 40, 1)]
    params = [
        BEAMS,
        BEAMS,
        greedy(16, logprobs=0),  # the programs of beams
        SamplingParams(n=3, seed=3, max_tokens=20, ignore_eos=True, logprobs=0),
        SamplingParams(seed=5, max_tokens=20, ignore_eos=True, logprobs=0),
        BEAMS,
    ]
    events = []
    step = llm.engine.step

    def watched():
        result = step()
        scheduler.check(llm.engine.scheduler_state)
        events.extend(result.events)
        return result

    llm.engine.step = watched  # type: ignore[method-assign]
    outputs = [output.outputs for output in llm.generate(prompts, params)]
    for i, n in ((0, 21), (1, 40), (5, 1)):
        for branch, sequence in zip(outputs[i], golden[n], strict=True):
            assert branch.token_ids == sequence.token_ids
            assert branch.score == pytest.approx(sequence.score, abs=1e-5)
    alone = make(tiny)
    for i in (2, 3, 4):
        (out,) = alone.generate(prompts[i : i + 1], params[i])
        assert [o.token_ids for o in out.outputs] == [o.token_ids for o in outputs[i]]
    assert any(isinstance(event, Beamed) for event in events)
    assert not any(isinstance(event, Forked) and "0" in event.request_ids for event in events)
    if config.get("num_blocks") == 28:
        assert any(isinstance(event, Preempted) for event in events)
    check_idle(llm.engine)
    assert not llm.engine._state.sequences
    assert not llm.engine._state.readers


def test_n_returns_the_best_beams_with_their_text(llm, golden):
    (out,) = llm.generate(
        [PROMPTS[21]], BeamSearchParams(beam_width=4, max_tokens=16, n=2, ignore_eos=True)
    )
    for i, (branch, sequence) in enumerate(zip(out.outputs, golden[21][:2], strict=True)):
        assert branch.token_ids == sequence.token_ids
        assert branch.index == i
        assert branch.text == llm.tokenizer.decode(list(branch.token_ids))


def test_a_stop_token_ends_a_beam_and_is_hidden(llm, golden):
    stops = {sequence.token_ids[i] for sequence in golden[21] for i in (2, 3, 4)}
    # short ones are better
    params = BeamSearchParams(
        beam_width=4, max_tokens=16, length_penalty=0.0, stop_token_ids=tuple(stops)
    )
    (out,) = llm.generate([PROMPTS[21]], params)
    ended = [branch for branch in out.outputs if branch.finish_reason == "stop"]
    assert ended
    for branch in ended:
        assert branch.token_ids[-1] in {*stops, *llm.model.eos_token_ids}
        assert stops.isdisjoint(branch.token_ids[:-1])
        assert branch.stop_reason in {*stops, None}
        assert branch.text == llm.tokenizer.decode(list(branch.token_ids[:-1]))


def test_any_beam_id_cancels_the_search(tiny):
    llm = make(tiny)
    for count in (0, 1, 5):
        llm.engine.add(
            "a", PROMPTS[8], BeamSearchParams(beam_width=3, max_tokens=16), forks=["b", "c"]
        )
        for _ in range(count):
            llm.engine.step()
        events = llm.engine.cancel("b")
        assert {event.request_id for event in events} == {"a", "b", "c"}
        assert not llm.engine._state.readers
        check_idle(llm.engine)


# --- what is refused ------------------------------------------------------------------------------


def test_an_impossible_search_is_refused_with_its_limits(tiny, llm):
    for options, message in (
        ({"beam_width": 0}, "beam_width is 0; it must be an integer of at least 1"),
        ({"n": 3}, r"n is 3; it must be None, or an integer from 1 to beam_width \(2\)"),
        (
            {"length_penalty": float("nan")},
            "length_penalty is nan; it must be a finite number",
        ),
        ({"length_penalty": 2000.0}, r"length_penalty is 2000.0; it must be between -10 and 10"),
        (
            {"early_stopping": 1},
            "early_stopping is 1; it must be False, True or 'never'",
        ),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1"),
    ):
        with refused(message):
            BeamSearchParams(**{"beam_width": 2} | options)
    small = make(tiny, num_blocks=28)
    for engine, width, message in (
        (llm, 19, "has beam_width 19 and 2 stop tokens; .*at most 20; lower beam_width to 18"),
        (llm, 17, "has 17 branches, but at most 16 sequences run at a time; lower n or beam_"),
        (
            small,
            5,
            "can grow to 56 tokens in each of 5 beams, which is 35 blocks of 8, but the",
        ),
    ):
        with refused(message):
            engine.generate([PROMPTS[40]], BeamSearchParams(width))
    assert len(small.generate([PROMPTS[40]], BeamSearchParams(4))[0].outputs) == 4
    with refused("beam_width 3 and 1 forks; each beam beside the first needs an id"):
        llm.engine.add("a", [5], BeamSearchParams(3), forks=["b"])
    with refused("beam search; a stream has one branch, use generate"):
        next(llm.stream([5], BeamSearchParams(3)))  # type: ignore[arg-type]


def test_an_invalid_beam_choice_is_refused():
    config = scheduler.SchedulerConfig(
        block_size=4, num_blocks=20, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20
    )
    two_beams = Request("a", 5, 9, forks=("b",), beams=True)
    one_beam = Request("a", 5, 9, beams=True)
    last_token = Request("a", 5, 1, beams=True)
    one_goes_on = {"a": Choice(("a",), (1,))}
    two_go_on = {"a": Choice(("a", "b"), (1, 2))}
    for request, choices, budget, message in (
        (
            two_beams,
            {"x": Choice(("a", "a"), (1, 2))},
            16,
            "'x' is not the first beam of a running request",
        ),
        (two_beams, one_goes_on, 16, "2 beams of 'a' cannot continue"),
        (two_beams, two_go_on, 16, "2 beams of 'a' cannot continue"),
        (
            one_beam,
            one_goes_on,
            4,
            "a beam of 'a' has tokens left to compute; all beams advance together",
        ),
        (
            last_token,
            one_goes_on,
            16,
            "the beams of 'a' would reach their limit of 6 tokens; they end instead",
        ),
    ):
        start = scheduler.init(config._replace(max_num_batched_tokens=budget))
        state, plan = scheduler.schedule(scheduler.submit(start, request), FCFS)
        with refused(message):
            scheduler.commit(state, plan, [0], {}, choices)

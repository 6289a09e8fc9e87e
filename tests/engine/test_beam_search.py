"""Beam search: the choice of beams against one that looks at everything, and against transformers;
blocks as forks.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax import LLM, BeamSearchParams, SamplingParams
from pagedjax.host import replay, scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.searches import Offer, beams
from pagedjax.host.types import Beamed, Choice, Finished, Forked, Hypothesis, Preempted, Request

PROMPTS = {n: np.random.default_rng(n).integers(3, 320, n).tolist() for n in (1, 8, 21, 40)}


def make(tiny, **config) -> LLM:
    sizes = {
        "block_size": 8,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "token_buckets": (64,),
    }
    return LLM(tiny, progress=False, **(sizes | {"num_blocks": 256} | config))


@pytest.fixture(scope="module")
def llm(tiny):
    return make(tiny)


def search(llm, prompts, params) -> list[list[Hypothesis]]:
    """By prompt, the sequences that `generate` gives."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.scheduler_state.pool.num_free == llm.engine.config.num_blocks
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
    for m in range(length):
        for tokens in itertools.product(range(vocab), repeat=m):
            logits = rng.standard_normal(vocab) * 2
            rows[tokens] = (logits - math.log(np.exp(logits).sum())).tolist()
    return rows


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


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 1000),
    stops=st.sets(st.integers(0, 3), max_size=2),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]),
    length=st.integers(1, 4),
)
def test_a_wide_beam_finds_the_best_of_all_sequences(seed, stops, penalty, length):
    rows = table(seed, 4, length)
    every = []
    for m in range(1, length + 1):
        for tokens in itertools.product(range(4), repeat=m):
            if set(tokens[:-1]) & stops or not (m == length or tokens[-1] in stops):
                continue
            total = sum(rows[tokens[:i]][token] for i, token in enumerate(tokens))
            every.append((total / m**penalty, tokens))
    sequences = run(BeamSearchParams(4**length, length, penalty, "never"), frozenset(stops), rows)
    expected = sorted(every, reverse=True)[: 4**length]
    if penalty < 0:  # then the rule of "never" guesses, as transformers' does
        assert sequences[0].score <= expected[0][0] + 1e-9
        return
    assert sequences[0].token_ids == expected[0][1]
    assert [sequence.score for sequence in sequences] == pytest.approx(
        [score for score, _ in expected][: len(sequences)]
    )


def test_early_stopping_decides_when_the_search_ends():
    """Token 0 stops. Two beams; the second finished sequence is poor, and a running beam would beat
    it later.
    """
    logs = lambda *p: [math.log(x) for x in p]  # noqa: E731
    rows = {(): logs(0.5, 0.4, 0.1)}
    for m in range(1, 5):
        for tokens in itertools.product((1, 2), repeat=m):
            rows[tokens] = logs(0.3, 0.6, 0.1)
    stops = frozenset({0})

    def lengths(early):
        sequences = run(BeamSearchParams(2, 5, 1.0, early), stops, rows)
        assert sequences == tuple(sorted(sequences, key=lambda sequence: -sequence.score))
        return [len(sequence.token_ids) for sequence in sequences]

    assert lengths(True) == [1, 2] or lengths(True) == [2, 1]  # as soon as there are two
    assert max(lengths("never")) == 5  # the long ones have the better mean
    assert max(lengths(False)) >= 2


# --- against transformers -------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("early", [False, True, "never"])
def test_sequences_and_scores_equal_transformers(tiny_folder, llm, early):
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    rng = np.random.default_rng(7)
    cases = []
    for _ in range(12):
        prompt = rng.integers(3, 320, int(rng.integers(1, 40))).tolist()
        width = int(rng.integers(2, 7))
        stops = tuple({*rng.integers(0, 320, int(rng.integers(0, 12))).tolist()})
        penalty = float(rng.choice([0.0, 1.0, 2.0, -0.5]))
        length = int(rng.integers(1, 24))
        params = BeamSearchParams(width, length, penalty, early, stop_token_ids=stops)
        cases.append((prompt, params))
    # all in the same steps
    results = search(llm, [prompt for prompt, _ in cases], [params for _, params in cases])
    reasons = set()
    for (prompt, case_params), sequences in zip(cases, results, strict=True):
        eos = list(dict.fromkeys((*llm.model.eos_token_ids, *case_params.stop_token_ids)))
        out = reference.generate(
            torch.tensor([prompt]),
            num_beams=case_params.beam_width,
            num_return_sequences=case_params.beam_width,
            max_new_tokens=case_params.max_tokens,
            length_penalty=case_params.length_penalty,
            early_stopping=case_params.early_stopping,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [sequence.score for sequence in sequences] == pytest.approx(
            out.sequences_scores.tolist(), abs=1e-4
        )
        for sequence, row in zip(sequences, out.sequences[:, len(prompt) :].tolist(), strict=True):
            assert list(sequence.token_ids) == row[: len(sequence.token_ids)]
            assert set(row[len(sequence.token_ids) :]) <= {0}
            reasons.add(sequence.reason)
    assert reasons == {"stop", "length"}


@pytest.mark.oracle
def test_smollm2_beams_equal_transformers(smollm2):
    import torch
    from transformers import AutoModelForCausalLM

    from pagedjax.weights.locate import open_checkpoint

    path = Path(open_checkpoint("smollm2-135m").path)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    llm = LLM(
        smollm2,
        progress=False,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        token_buckets=(64,),
        num_blocks=256,
    )
    for text in ("The capital of France is", "Once upon a time", "def fibonacci(n):"):
        ids = llm.tokenizer.encode(text)
        (sequences,) = search(llm, [ids], BeamSearchParams(4, 24))
        out = reference.generate(
            torch.tensor([ids]),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=list(llm.model.eos_token_ids),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [sequence.score for sequence in sequences] == pytest.approx(
            out.sequences_scores.tolist(), abs=1e-4
        )
        assert (
            list(sequences[0].token_ids)
            == out.sequences[0, len(ids) :].tolist()[: len(sequences[0].token_ids)]
        )


# --- the engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(llm):
    params = BeamSearchParams(4, 16, ignore_eos=True)
    return {n: search(llm, [prompt], params)[0] for n, prompt in PROMPTS.items()}


def test_sequences_are_sorted_and_mostly_beat_greedy_decoding(llm, golden):
    better = 0
    for n, prompt in PROMPTS.items():
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
        (out,) = llm.generate([prompt], greedy, use_tqdm=False)
        better += golden[n][0].cumulative_logprob > out.outputs[0].cumulative_logprob + 1e-4
        assert [sequence.score for sequence in golden[n]] == sorted(
            (sequence.score for sequence in golden[n]), reverse=True
        )
    assert better >= 3


def test_one_beam_is_greedy_decoding(llm):
    for prompt in PROMPTS.values():
        greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
        (out,) = llm.generate([prompt], greedy, use_tqdm=False)
        ((sequence,),) = search(llm, [prompt], BeamSearchParams(1, 12))
        assert sequence.token_ids == out.outputs[0].token_ids
        assert sequence.cumulative_logprob == pytest.approx(
            out.outputs[0].cumulative_logprob, abs=1e-5
        )


@pytest.mark.default_cases("num_blocks=28", "num_blocks=28 preemption=swap swap_space_gib=0.01")
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
        {"num_blocks": 28, "max_num_batched_tokens": 24, "token_buckets": (24,)},
    ],
    ids=lambda config: " ".join(f"{name}={value}" for name, value in config.items()),
)
def test_batch_block_size_caching_and_preemption_change_no_beam(tiny, golden, config):
    """Beams beside greedy, sampled and parallel requests, in the same steps."""
    llm = make(tiny, **config)
    prompts = [PROMPTS[n] for n in (21, 40, 8, 21, 40, 1)]
    params = [
        BeamSearchParams(4, 16, ignore_eos=True),
        BeamSearchParams(4, 16, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
        SamplingParams(n=3, seed=3, max_tokens=20, ignore_eos=True),
        SamplingParams(seed=5, max_tokens=20, ignore_eos=True),
        BeamSearchParams(4, 16, ignore_eos=True),
    ]
    events = []
    step = llm.engine.step

    def watched():
        result = step()
        scheduler.check(llm.engine.scheduler_state)
        events.extend(result.events)
        return result

    llm.engine.step = watched  # type: ignore[method-assign]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for i, n in ((0, 21), (1, 40), (5, 1)):
        branches = outputs[i].outputs
        assert [sequence.token_ids for sequence in branches] == [
            sequence.token_ids for sequence in golden[n]
        ]
        assert [sequence.score for sequence in branches] == pytest.approx(
            [sequence.score for sequence in golden[n]], abs=1e-5
        )
    alone = make(tiny)
    for i in (2, 3, 4):
        (out,) = alone.generate(prompts[i : i + 1], params[i], use_tqdm=False)
        assert [o.token_ids for o in out.outputs] == [o.token_ids for o in outputs[i].outputs]
    assert any(isinstance(event, Beamed) for event in events)
    assert not any(isinstance(event, Forked) and "0" in event.request_ids for event in events)
    if config.get("num_blocks") == 28:
        assert any(isinstance(event, Preempted) for event in events)
    assert llm.engine.scheduler_state.pool.num_free == llm.engine.config.num_blocks
    assert not llm.engine._state.sequences
    assert not llm.engine._state.readers


def test_beams_share_prompt_blocks_and_copy_on_write(tiny):
    llm = make(tiny, enable_prefix_caching=False)
    llm.engine.add(
        "a", PROMPTS[40], BeamSearchParams(4, 16, ignore_eos=True), forks=["b", "c", "d"]
    )
    while llm.engine.has_work:
        result = llm.engine.step()
        tables = [seq.blocks for seq in scheduler.running(llm.engine.scheduler_state)]
        if tables:
            assert len({table[:5] for table in tables}) == 1, "40 tokens are 5 full blocks"
            assert result.plan.blocks_used <= 5 + 4 * 3
        assert len(result.plan.copies) <= 4
    ends = [event for event in result.events if isinstance(event, Finished)]
    assert [(event.request_id, event.reason) for event in ends] == [
        (name, "length") for name in "abcd"
    ]
    assert [name for name, _ in result.beams] == ["a"]
    assert len(result.beams[0].sequences) == 4


def test_n_returns_the_best_beams_with_their_text(llm, golden):
    (out,) = llm.generate(
        [PROMPTS[21]], BeamSearchParams(4, 16, n=2, ignore_eos=True), use_tqdm=False
    )
    assert [sequence.token_ids for sequence in out.outputs] == [
        sequence.token_ids for sequence in golden[21][:2]
    ]
    assert [sequence.index for sequence in out.outputs] == [0, 1]
    assert out.outputs[0].text == llm.tokenizer.decode(list(out.outputs[0].token_ids))


def test_a_stop_token_ends_a_beam_and_is_hidden(llm, golden):
    stops = {sequence.token_ids[i] for sequence in golden[21] for i in (2, 3, 4)}
    # short ones are better
    params = BeamSearchParams(4, 16, length_penalty=0.0, stop_token_ids=tuple(stops))
    (out,) = llm.generate([PROMPTS[21]], params, use_tqdm=False)
    ended = [branch for branch in out.outputs if branch.finish_reason == "stop"]
    assert ended
    for branch in ended:
        assert branch.token_ids[-1] in {*stops, *llm.model.eos_token_ids}
        assert stops.isdisjoint(branch.token_ids[:-1])
        assert branch.stop_reason in {*stops, None}
        assert branch.text == llm.tokenizer.decode(list(branch.token_ids[:-1]))


def test_a_recording_with_beams_replays(tiny, tmp_path):
    llm = make(tiny, num_blocks=28)
    llm.engine.record(tmp_path / "run.jsonl")
    params = [
        BeamSearchParams(4, 16, ignore_eos=True),
        SamplingParams(n=2, seed=1, ignore_eos=True),
    ] * 2
    llm.generate([PROMPTS[n] for n in (21, 40, 8, 40)], params, use_tqdm=False)
    llm.engine.record(None)
    report = replay.verify(tmp_path / "run.jsonl")
    assert report.identical
    assert report.preemptions


def test_any_beam_id_cancels_the_search(tiny):
    llm = make(tiny)
    for steps in (0, 1, 5):
        llm.engine.add("a", PROMPTS[8], BeamSearchParams(3, 16), forks=["b", "c"])
        for _ in range(steps):
            llm.engine.step()
        events = llm.engine.cancel("b")
        assert {event.request_id for event in events} == {"a", "b", "c"}
        assert not llm.engine.has_work
        assert not llm.engine._state.readers
        assert llm.engine.scheduler_state.pool.num_free == llm.engine.config.num_blocks


# --- what is refused ------------------------------------------------------------------------------


def test_an_impossible_search_is_refused_with_its_limits(tiny, llm):
    for bad, message in (
        ({"beam_width": 0}, "beam_width is 0; it must be an integer of at least 1"),
        (
            {"beam_width": 2, "n": 3},
            r"n is 3; it must be None, or an integer from 1 to beam_width \(2\)",
        ),
        (
            {"beam_width": 2, "length_penalty": float("nan")},
            "length_penalty is nan; it must be a finite number",
        ),
        (
            {"beam_width": 2, "length_penalty": 2000.0},
            r"length_penalty is 2000.0; it must be between -10 and 10",
        ),
        (
            {"beam_width": 2, "length_penalty": -1e308},
            r"length_penalty is -1e\+308; it must be between -10 and 10",
        ),
        (
            {"beam_width": 2, "early_stopping": "ever"},
            "early_stopping is 'ever'; it must be False, True or 'never'",
        ),
        (
            {"beam_width": 2, "early_stopping": 1},
            "early_stopping is 1; it must be False, True or 'never'",
        ),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0"),
        ({"beam_width": 2, "stop_token_ids": (-1,)}, "stop_token_ids holds -1"),
    ):
        with pytest.raises(ValueError, match=message):
            BeamSearchParams(**bad)
    with pytest.raises(
        ValueError,
        match=r"has beam_width 19 and 2 stop tokens; .*at most 20; lower beam_width to 18",
    ):
        llm.generate([[5]], BeamSearchParams(19), use_tqdm=False)
    with pytest.raises(
        ValueError,
        match="has 17 branches, but at most 16 sequences run at a time; lower n or beam_",
    ):
        llm.generate([[5]], BeamSearchParams(17), use_tqdm=False)
    with pytest.raises(
        ValueError, match="beam_width 3 and 1 forks; each beam beside the first needs an id"
    ):
        llm.engine.add("a", [5], BeamSearchParams(3), forks=["b"])
    with pytest.raises(ValueError, match="beam search; a stream has one branch, use generate"):
        next(llm.stream([5], BeamSearchParams(3)))  # type: ignore[arg-type]
    small = make(tiny, num_blocks=28)
    with pytest.raises(
        ValueError,
        match=r"can grow to 56 tokens in each of 5 beams, which is 35 blocks of 8, but the",
    ):
        small.generate([PROMPTS[40]], BeamSearchParams(5), use_tqdm=False)
    assert len(small.generate([PROMPTS[40]], BeamSearchParams(4), use_tqdm=False)[0].outputs) == 4


def test_an_invalid_beam_choice_is_refused():
    config = scheduler.SchedulerConfig(4, 20, 16, 4, 20)
    start = scheduler.submit(scheduler.init(config), Request("a", 5, 9, forks=("b",), beams=True))
    state, plan = scheduler.schedule(start, FCFS)
    for choices, message in (
        ({"x": Choice(("a", "a"), (1, 2))}, "'x' is not the first beam of a running request"),
        ({"a": Choice(("a",), (1,))}, "2 beams of 'a' cannot continue"),
        ({"a": Choice(("a", "b"), (1, 2))}, "2 beams of 'a' cannot continue"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.commit(state, plan, [0], {}, choices)
    small = scheduler.submit(
        scheduler.init(config._replace(max_num_batched_tokens=4)), Request("a", 5, 9, beams=True)
    )
    state, plan = scheduler.schedule(small, FCFS)
    with pytest.raises(
        ValueError, match="a beam of 'a' has tokens left to compute; all beams advance together"
    ):
        scheduler.commit(state, plan, [0], {}, {"a": Choice(("a",), (1,))})
    short = scheduler.submit(scheduler.init(config), Request("a", 5, 1, beams=True))
    state, plan = scheduler.schedule(short, FCFS)
    with pytest.raises(
        ValueError, match="the beams of 'a' would reach their limit of 6 tokens; they end instead"
    ):
        scheduler.commit(state, plan, [0], {}, {"a": Choice(("a",), (1,))})

"""Given tokens (`trace_decode_token_ids`): the output is these tokens, a step each, and their
log-probabilities are those of the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import jax
import numpy as np
import pytest

from pagedjax import BeamSearchParams, SamplingParams, StructuredOutputsParams
from pagedjax.device.row_features.chain import chain
from pagedjax.device.row_features.feature import RowFeature
from pagedjax.engine.requests import EngineRequest, RequestRules, prepare
from pagedjax.host import scheduler
from pagedjax.host.types import SchedulerConfig
from pagedjax.options import exclusions
from tests.engine.runs import answers, greedy, logprobs_of, sampled, steps, token_ids
from tests.engine.whole_text import chosen_logprobs, padded, text_logits
from tests.refusals import refused

VOCAB = 320
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (1, 9, 30, 70)]
OTHER_TOKENS = [
    np.random.default_rng(100 + n).integers(0, VOCAB, n).tolist() for n in (3, 17, 8, 12)
]


def given(tokens: Any, **options: Any) -> SamplingParams:
    return SamplingParams(trace_decode_token_ids=tuple(tokens), logprobs=3, **options)


def places_of(answer: Any) -> list[list[tuple[int, int]]]:
    """Of each token, the candidates with their ranks."""
    return [
        sorted((token, entry.rank) for token, entry in entries.items())
        for entries in answer.logprobs
    ]


def test_tokens_of_an_earlier_run_have_its_log_probabilities(tiny_llm):
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=20, logprobs=3, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    expected = answers(tiny_llm, PROMPTS, params)
    stops = tuple({token for answer in expected for token in answer.token_ids})
    # what would end the outputs before, or draw other tokens, does neither
    options = {"stop": ["a", "e"], "stop_token_ids": stops, "max_tokens": 12, "min_tokens": 11}
    drawn = {"temperature": 0.7, "top_p": 0.5, "top_k": 4, "seed": 9, "frequency_penalty": 1.5}
    for other_options in ({}, options, drawn, {"logit_bias": {expected[0].token_ids[0]: -100.0}}):
        repeated = answers(
            tiny_llm, PROMPTS, [given(answer.token_ids, **other_options) for answer in expected]
        )
        for answer, before in zip(repeated, expected, strict=True):
            assert answer.token_ids == before.token_ids
            assert answer.text == before.text
            assert answer.finish_reason == "length"
            assert places_of(answer) == places_of(before)
            chex.assert_trees_all_close(logprobs_of(answer), logprobs_of(before), atol=1e-5)


@partial(jax.jit, static_argnums=(0, 2))
def whole_text_logits(graphdef: Any, params: Any, c: Any, tokens: jax.Array) -> jax.Array:
    def attend(q, k, v):
        keys, values = (pages.transpose(1, 0, 2)[None] for pages in (k, v))
        return jax.nn.dot_product_attention(
            q[None], keys, values, is_causal=True, scale=c.attn_scale
        )[0]

    return text_logits(graphdef, params, c, tokens, attend)


def test_other_tokens_have_those_of_a_model_without_a_cache(tiny, tiny_llm):
    """Also those that prompts which end with these tokens have."""
    as_given = answers(tiny_llm, PROMPTS, [given(tokens) for tokens in OTHER_TOKENS])
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, OTHER_TOKENS, strict=True)]
    scored = tiny_llm.generate(texts, greedy(1, prompt_logprobs=3), use_tqdm=False)
    model = tiny.model
    for answer, tokens, text, output in zip(as_given, OTHER_TOKENS, texts, scored, strict=True):
        assert list(answer.token_ids) == tokens
        logits = whole_text_logits(model.graphdef, model.params, model.config, padded(text))
        before = np.asarray(logits)[len(text) - len(tokens) - 1 : len(text) - 1]
        chex.assert_trees_all_close(
            logprobs_of(answer), chosen_logprobs(before, tokens).astype(float), atol=1e-4
        )
        of_prompt = output.prompt_logprobs[-len(tokens) :]
        ranks = [
            entries[token].rank for entries, token in zip(answer.logprobs, tokens, strict=True)
        ]
        assert ranks == [
            entries[token].rank for entries, token in zip(of_prompt, tokens, strict=True)
        ]


def test_free_requests_beside_them_sample_what_they_would(tiny_llm):
    free = [SamplingParams(temperature=1.0, seed=i, max_tokens=15) for i in range(4)]
    expected = token_ids(tiny_llm, PROMPTS, free)
    mixed = [params for pair in zip(free, map(given, OTHER_TOKENS), strict=True) for params in pair]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    outputs = token_ids(tiny_llm, prompts, mixed)
    assert outputs[::2] == expected
    assert [list(tokens) for tokens in outputs[1::2]] == OTHER_TOKENS


def test_each_token_takes_a_decode_step(tiny_llm):
    """And an engine that gets the request itself samples on behind the given tokens."""
    engine = tiny_llm.engine
    engine.add(
        "a", PROMPTS[2], SamplingParams(trace_decode_token_ids=OTHER_TOKENS[0], max_tokens=5)
    )
    results = list(steps(engine))
    assert [result.plan.counts for result in results] == [(30,), *[(1,)] * 4]
    tokens = sampled(results)["a"]
    assert tokens[:3] == OTHER_TOKENS[0]
    assert len(tokens) == 5


def test_branches_have_given_tokens_of_their_own_and_stop_tokens_count(tiny_llm):
    """What `Engine.add` gets as `given` changes neither limits nor stop tokens."""
    engine = tiny_llm.engine
    params = SamplingParams(temperature=1.0, max_tokens=9, min_tokens=1, stop_token_ids=(50,), n=3)
    given_ids = {"a": [60, 50, 61], "a/1": OTHER_TOKENS[3], "a/2": [70, 71]}
    assert not {50} & {*OTHER_TOKENS[3]}
    engine.add("a", PROMPTS[1], params, forks=("a/1", "a/2"), given=given_ids)
    engine.add("b", PROMPTS[2], SamplingParams(max_tokens=4, seed=1), given={"b": [80, 81]})
    results = list(steps(engine))
    tokens = sampled(results)
    assert tokens["a"] == [60, 50]  # its stop token is given
    assert tokens["a/1"] == OTHER_TOKENS[3][:9]  # more are given than its limit
    assert tokens["a/2"][:2] == [70, 71]
    assert len(tokens["a/2"]) <= 9
    assert tokens["b"][:2] == [80, 81]
    assert len(tokens["b"]) == 4
    engine.add("b", [*PROMPTS[2], 80, 81], SamplingParams(temperature=0, max_tokens=1))
    (expected,) = sampled(steps(engine))["b"]
    engine.add("c", PROMPTS[2], SamplingParams(temperature=0, max_tokens=3), given={"c": [80, 81]})
    assert sampled(steps(engine))["c"] == [80, 81, expected]  # it goes on behind them


def test_a_sequence_that_was_given_tokens_stays_in_its_engine(tiny_llm):
    engine = tiny_llm.engine
    engine.add("a", PROMPTS[1], SamplingParams(max_tokens=4), given={"a": [5, 6]})
    engine.step()
    with refused("'a' has tokens that `Engine.add` got as `given`, .*as trace_decode_token_ids"):
        engine.handover("a")
    engine.cancel("a")


def test_it_ends_at_max_model_len_if_its_tokens_are_more(tiny_llm):
    (answer,) = answers(tiny_llm, [[5] * 500], given([7] * 40))
    assert (answer.token_ids, answer.finish_reason) == ((7,) * 12, "length")


def test_prompt_log_probabilities_come_too(tiny_llm):
    (expected,) = tiny_llm.generate([PROMPTS[1]], greedy(1, prompt_logprobs=0), use_tqdm=False)
    (output,) = tiny_llm.generate(
        [PROMPTS[1]], given(OTHER_TOKENS[0], prompt_logprobs=0), use_tqdm=False
    )
    assert [*output.outputs[0].token_ids] == OTHER_TOKENS[0]
    pairs = zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True)
    for entries, expected_entries in pairs:
        assert entries.keys() == expected_entries.keys()


VALUES: dict[str, Any] = {
    "n": 2,
    "best_of": 2,
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "allowed_token_ids": (5,),
    "bad_words": ("a",),
    "bad_words_token_ids": ((5, 6),),
}


@pytest.mark.parametrize("exclusion", exclusions.SAMPLING, ids=lambda value: value.options[1])
def test_options_that_do_not_go_with_given_tokens_are_refused(exclusion):
    name, excluded = exclusion.options
    options = {excluded: VALUES[excluded]}
    SamplingParams(**options)
    with refused(rf"^trace_decode_token_ids is given and {excluded} is .*; leave one of them out$"):
        SamplingParams(**options, **{name: [5]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((), r"trace_decode_token_ids is \(\); it must be None or non-empty"),
        ((-1,), "trace_decode_token_ids holds -1; token ids are integers of at least 0"),
        ((True,), "trace_decode_token_ids holds True"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(value, message):
    with refused(message):
        SamplingParams(trace_decode_token_ids=value)


def test_a_beam_search_has_none():
    with pytest.raises(TypeError, match="has no argument 'trace_decode_token_ids'"):
        BeamSearchParams(2, trace_decode_token_ids=[5])  # type: ignore


MINE = RowFeature(
    name="mine",
    stage="logits",
    off={"x": np.float32(0)},
    read=lambda params, stop_ids: {"x": 1.0},
    apply=lambda logits, rows, context: logits,
    params=("mine",),
)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (given([5, 400]), "trace_decode_token_ids has token id 400; the vocabulary is 0 to 319"),
        (given([5], extra_args={"mine": 1}), "'a': trace_decode.* the row feature 'mine' is used"),
    ],
)
def test_what_an_engine_cannot_give_is_refused(params, message):
    check_refused(EngineRequest(("a",), [5], params), message)


def check_refused(request: EngineRequest, message: str) -> None:
    state = scheduler.init(SchedulerConfig(16, 8, 2, 16, 64))
    rules = RequestRules(VOCAB, caching=True, chain=chain((MINE,), VOCAB))
    with refused(message):
        prepare(state, request, rules)


@pytest.mark.parametrize(
    ("params", "given_ids", "message"),
    [
        (SamplingParams(), {"b": [5]}, r"'a' is given tokens of \['b'\]; give those of its own"),
        (BeamSearchParams(1), {"a": [5]}, r"'a' is given tokens of \['a'\]; .*SamplingParams"),
        (SamplingParams(), {"a": [400]}, "'a' has token id 400; the vocabulary is 0 to 319"),
        (SamplingParams(bad_words="a"), {"a": [5]}, "'a': trace_decode.*bad_words is"),
        (SamplingParams(extra_args={"mine": 1}), {"a": [5]}, "'a': .*row feature 'mine' is used"),
    ],
)
def test_what_cannot_be_given_to_an_engine_is_refused(params, given_ids, message):
    check_refused(EngineRequest(("a",), [5], params, given=given_ids), message)

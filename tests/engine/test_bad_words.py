"""Bad words in an engine, against a plain search of every output, and as a function against numpy."""

from __future__ import annotations

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax import LLM, SamplingParams
from pagedjax.device.row_features import RowContext
from pagedjax.device.row_features.bad_words import BAD_WORDS, MAX_LENGTH, MAX_TOKENS
from pagedjax.engine.session import spellings
from tests.engine.runs import answers, greedy, small_llm, token_ids
from tests.refusals import refused

VOCAB, BLOCK, WIDTH, ROWS = 7, 4, 6, 3
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21]]


PLAIN = greedy(20)


def oracle(logits: np.ndarray, outputs: list[int], words: list[list[int]]) -> np.ndarray:
    """The logits of one row, word by word."""
    expected = logits.copy()
    for *before, last in words:
        if outputs[len(outputs) - len(before) :] == before and len(before) <= len(outputs):
            expected[last] = -np.inf
    return expected


token = st.integers(0, VOCAB - 1)
row = st.tuples(
    st.lists(token, min_size=1, max_size=9),  # prompt
    st.lists(token, max_size=9),  # output
    st.lists(st.lists(token, min_size=1, max_size=4), max_size=6),  # words
)


apply = jax.jit(BAD_WORDS.apply)


@settings(max_examples=60)
@given(st.lists(row, min_size=ROWS, max_size=ROWS), st.integers(0, 99))
def test_the_last_token_of_a_word_is_forbidden_where_the_others_were_sampled(rows, seed):
    random = np.random.default_rng(seed)
    tables = random.permutation(np.arange(1, 1 + ROWS * WIDTH)).reshape(ROWS, WIDTH)
    # unwritten slots are never read
    tokens = random.integers(0, VOCAB, (1 + ROWS * WIDTH, BLOCK)).astype(np.int32)
    for blocks, (prompt, output, _) in zip(tables, rows, strict=True):
        for position, token in enumerate(prompt + output):
            tokens[blocks[position // BLOCK], position % BLOCK] = token
    params = [SamplingParams(bad_words_token_ids=words) for _, _, words in rows]
    values = [BAD_WORDS.read(row_params, ()) or BAD_WORDS.off for row_params in params]
    fields = {name: np.array([value[name] for value in values]) for name in BAD_WORDS.off}
    starts = np.array([len(prompt) for prompt, *_ in rows], np.int32)
    outputs = np.array([len(output) for _, output, _ in rows], np.int32)
    context = RowContext(tokens, tables.astype(np.int32), starts + outputs, starts, outputs)
    logits = random.normal(size=(ROWS, VOCAB)).astype(np.float32)
    expected = [
        oracle(row_logits, output, words)
        for row_logits, (_, output, words) in zip(logits, rows, strict=True)
    ]
    chex.assert_trees_all_equal(np.asarray(apply(logits, fields, context)), np.stack(expected))


def contains(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


def step_by_step(llm: LLM, prompt: list[int], words: list[tuple[int, ...]]) -> tuple[int, ...]:
    """20 greedy tokens, one request a token: the best one that no word forbids, by the engine's own
    log-probabilities.
    """
    out: list[int] = []
    for _ in range(20):
        (answer,) = answers(llm, [prompt + out], greedy(1, logprobs=20))
        banned = oracle(np.zeros(320), out, [list(word) for word in words]) < 0
        out.append(next(token for token in answer.logprobs[0] if not banned[token]))
    return tuple(out)


@pytest.fixture(scope="module")
def words(tiny_llm) -> list[tuple[int, ...]]:
    """Of one, two and four tokens, each of them in an output without bad words."""
    first, second, third = token_ids(tiny_llm, PROMPTS, PLAIN)
    return [first[3:5], second[2:3], third[4:8]]


def test_no_output_has_a_bad_word_and_the_other_rows_are_unchanged(tiny_llm, words):
    params = [greedy(20, bad_words_token_ids=row_words) for row_words in (words, (), words[2:])]
    outputs = token_ids(tiny_llm, PROMPTS, params)
    assert outputs[1] == token_ids(tiny_llm, PROMPTS, PLAIN)[1]
    for i, row_words in ((0, words), (2, words[2:])):
        assert not any(contains(outputs[i], word) for word in row_words)
        assert outputs[i] == step_by_step(tiny_llm, PROMPTS[i], row_words)


@pytest.mark.slow
@pytest.mark.default_cases("lookahead")
@pytest.mark.parametrize(
    "config",
    [
        {"speculative": {"method": "ngram", "num_tokens": 3, "ngram_min": 1}},
        {"lookahead": 2},
        {
            "num_blocks": 12,
            "block_size": 4,
            "max_model_len": 40,
            "preemption": "swap",
            "swap_space_gib": 0.01,
        },
        {"mesh": {"tensor": 2}},
    ],
    ids=["speculation", "lookahead", "swap", "mesh"],
)
def test_tokens_do_not_depend_on_how_steps_are_made(tiny, tiny_llm, words, config):
    drawn = SamplingParams(seed=3, max_tokens=20, ignore_eos=True, bad_words_token_ids=words)
    params = [greedy(20, bad_words_token_ids=words), PLAIN, drawn]
    llm = small_llm(tiny, token_buckets=(8, 64), **config)
    assert token_ids(llm, PROMPTS, params) == token_ids(tiny_llm, PROMPTS, params)


def test_words_are_forbidden_with_and_without_a_space(tiny_llm):
    tokenizer = tiny_llm.tokenizer
    spelled = spellings(["the", " cat", "the"], tokenizer)
    assert [tokenizer.decode(ids) for ids in spelled] == ["the", " the", "cat", " cat"]
    liked = {"logit_bias": {ids[0]: 50.0 for ids in spelled[:2]}, "max_tokens": 6, "temperature": 0}
    params = [SamplingParams(**liked), SamplingParams(**liked, bad_words="the")]
    free, bound = answers(tiny_llm, ["cat"] * 2, params)
    assert "the" in free.text
    assert "the" not in bound.text


def test_bad_words_go_with_other_options(tiny_llm):
    params = greedy(
        20,
        bad_words_token_ids=[[30], [31, 32]],
        allowed_token_ids=[30, 31, 32],
        frequency_penalty=2.0,
    )
    (tokens,) = token_ids(tiny_llm, PROMPTS[:1], params)
    assert set(tokens) <= {31, 32}
    assert not contains(tokens, (31, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bad_words": [""]}, r"bad_words is \('',\); it must be a word or several"),
        ({"bad_words": [5]}, r"bad_words is \(5,\); it must be a word or several"),
        ({"bad_words_token_ids": [5]}, r"bad_words_token_ids is \[5\]; it must be lists of token ids"),
        ({"bad_words_token_ids": [[]]}, r"bad_words_token_ids is \[\[\]\]; it must be lists of token ids"),
        ({"bad_words_token_ids": [[-1]]}, "bad_words_token_ids holds -1; token ids are integers of at least 0"),
        ({"bad_words_token_ids": [[320]]}, "bad_words_token_ids has token id 320; the vocabulary is 0 to 319"),
        ({"bad_words_token_ids": [[1] * (MAX_LENGTH + 1)]}, f"a bad word has 33 tokens; the limit is {MAX_LENGTH}"),
        ({"bad_words_token_ids": [[i % 300, i // 300] for i in range(600)]}, "1200 tokens in all; the limit is 1024"),
        ({"bad_words_token_ids": [[4]], "allowed_token_ids": [4]}, "allowed_token_ids has only bad words of one token"),
    ],
)  # fmt: skip
def test_a_bad_list_is_refused_with_the_limit(tiny_llm, options, message):
    with refused(message):
        tiny_llm.generate([[5]], SamplingParams(**options))
    assert not tiny_llm.engine.has_work


def test_text_needs_a_tokenizer(tiny, tiny_llm):
    params = SamplingParams(bad_words="the")
    with refused("an engine knows no text; use LLM or a Session, or give bad_words_token_ids"):
        tiny_llm.engine.add("a", [5], params)
    bare = LLM(params=tiny.model.params, config=tiny.model.config, progress=False, num_blocks=64)
    with refused(r"bad_words is \('the',\), but this model has no tokenizer.*use bad_words_tok"):
        bare.generate([[5]], params)


def test_the_limits_hold_at_their_ends(tiny_llm):
    num_words = (MAX_TOKENS - MAX_LENGTH) // 3
    words = [[1] * MAX_LENGTH, *([2, i % 300, i // 300] for i in range(num_words))]
    (tokens,) = token_ids(tiny_llm, PROMPTS[:1], greedy(20, bad_words_token_ids=words))
    assert len(tokens) == 20

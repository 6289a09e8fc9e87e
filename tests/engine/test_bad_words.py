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
from pagedjax.engine.engine import Engine
from pagedjax.engine.session import spellings

VOCAB, BLOCK, WIDTH, ROWS = 7, 4, 6, 3
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16, 17], [20, 21]]
SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (8, 64),
    "num_blocks": 256,
}


def oracle(logits: np.ndarray, outputs: list[int], words: list[list[int]]) -> np.ndarray:
    """The logits of one row, word by word."""
    found = logits.copy()
    for *before, last in words:
        if outputs[len(outputs) - len(before) :] == before and len(before) <= len(outputs):
            found[last] = -np.inf
    return found


token = st.integers(0, VOCAB - 1)
row = st.tuples(
    st.lists(token, min_size=1, max_size=9),  # prompt
    st.lists(token, max_size=9),  # output
    st.lists(st.lists(token, min_size=1, max_size=4), max_size=6),  # words
)


apply = jax.jit(BAD_WORDS.apply)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(st.lists(row, min_size=ROWS, max_size=ROWS), st.integers(0, 99))
def test_the_last_token_of_a_word_is_forbidden_where_the_others_were_sampled(rows, seed):
    random, b = np.random.default_rng(seed), len(rows)
    tables = random.permutation(np.arange(1, 1 + b * WIDTH)).reshape(b, WIDTH).astype(np.int32)
    # unwritten slots are never read
    tokens = random.integers(0, VOCAB, (1 + b * WIDTH, BLOCK)).astype(np.int32)
    for i, (prompt, output, _) in enumerate(rows):
        for position, one in enumerate(prompt + output):
            tokens[tables[i, position // BLOCK], position % BLOCK] = one
    values = [BAD_WORDS.off] * b
    for i, (_, _, words) in enumerate(rows):
        params = SamplingParams(bad_words_token_ids=words)
        values[i] = BAD_WORDS.read(params, ()) or BAD_WORDS.off
    fields = {name: np.array([value[name] for value in values]) for name in BAD_WORDS.off}
    lens = np.array([len(prompt) + len(output) for prompt, output, _ in rows], np.int32)
    starts = np.array([len(prompt) for prompt, *_ in rows], np.int32)
    context = RowContext(tokens, tables, lens, starts, lens - starts)
    logits = random.normal(size=(b, VOCAB)).astype(np.float32)
    found = apply(logits, fields, context)
    expected = np.stack(
        [oracle(one, output, words) for one, (_, output, words) in zip(logits, rows, strict=True)]
    )
    chex.assert_trees_all_equal(np.asarray(found), expected)


def outputs(llm: LLM, *params: SamplingParams) -> list[tuple[int, ...]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, list(params), use_tqdm=False)]


def greedy(**options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **options)


def contains(tokens: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


def step_by_step(
    llm: LLM, prompt: list[int], words: list[tuple[int, ...]], count: int
) -> tuple[int, ...]:
    """Greedy tokens, one request a token: the best one that no word forbids, by the engine's own
    log-probabilities.
    """
    out: list[int] = []
    for _ in range(count):
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
        (position,) = llm.generate([prompt + out], params, use_tqdm=False)[0].outputs[0].logprobs
        banned = oracle(np.zeros(320), out, [list(word) for word in words]) < 0
        out.append(next(one for one in position if not banned[one]))
    return tuple(out)


@pytest.fixture(scope="module")
def words(tiny_llm) -> list[tuple[int, ...]]:
    """Of one, two and four tokens, each of them in an output without bad words."""
    first, second, third = outputs(tiny_llm, greedy(), greedy(), greedy())
    return [first[3:5], second[2:3], third[4:8]]


def test_no_output_has_a_bad_word_and_the_other_rows_are_unchanged(tiny_llm, words):
    plain = outputs(tiny_llm, greedy(), greedy(), greedy())
    found = outputs(
        tiny_llm, greedy(bad_words_token_ids=words), greedy(), greedy(bad_words_token_ids=words[2:])
    )
    assert found[1] == plain[1]
    assert not any(contains(found[0], word) for word in words)
    assert not contains(found[2], words[2])
    assert found[0] == step_by_step(tiny_llm, PROMPTS[0], words, 20)
    assert found[2] == step_by_step(tiny_llm, PROMPTS[2], words[2:], 20)


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
    params = [greedy(bad_words_token_ids=words), greedy(), SamplingParams(seed=3, max_tokens=20, ignore_eos=True,
              bad_words_token_ids=words)]  # fmt: skip
    llm = LLM(tiny, progress=False, **SIZES | config)
    assert outputs(llm, *params) == outputs(tiny_llm, *params)


def test_words_are_forbidden_with_and_without_a_space(tiny_llm):
    tokenizer = tiny_llm.tokenizer
    spelled = spellings(["the", " cat", "the"], tokenizer)
    texts = [tokenizer.decode(ids) for ids in spelled]
    assert texts == ["the", " the", "cat", " cat"]
    liked = {"logit_bias": {ids[0]: 50.0 for ids in spelled[:2]}, "max_tokens": 6, "temperature": 0}
    params = [SamplingParams(**liked), SamplingParams(**liked, bad_words="the")]
    free, bound = (
        out.outputs[0].text for out in tiny_llm.generate(["cat"] * 2, params, use_tqdm=False)
    )
    assert "the" in free
    assert "the" not in bound


def test_bad_words_go_with_other_options(tiny_llm):
    params = greedy(
        bad_words_token_ids=[[30], [31, 32]], allowed_token_ids=[30, 31, 32], frequency_penalty=2.0
    )
    found = outputs(tiny_llm, params, greedy(), greedy())[0]
    assert set(found) <= {31, 32}
    assert not contains(found, (31, 32))


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
    with pytest.raises(ValueError, match=message):
        tiny_llm.generate([[5]], SamplingParams(**options), use_tqdm=False)
    assert not tiny_llm.engine.has_work


def test_text_needs_a_tokenizer(tiny, tiny_llm):
    engine: Engine = tiny_llm.engine
    with pytest.raises(
        ValueError,
        match="an engine knows no text; use LLM or a Session, or give bad_words_token_ids",
    ):
        engine.add("a", [5], SamplingParams(bad_words="the"))
    bare = LLM(params=tiny.model.params, config=tiny.model.config, progress=False, **SIZES)
    with pytest.raises(
        ValueError,
        match=r"bad_words is \('the',\), but this model has no tokenizer.*use bad_words_tok",
    ):
        bare.generate([[5]], SamplingParams(bad_words="the"), use_tqdm=False)


def test_the_limits_hold_at_their_ends(tiny_llm):
    longest = [[1] * MAX_LENGTH] + [
        [2, i % 300, i // 300] for i in range((MAX_TOKENS - MAX_LENGTH) // 3)
    ]
    assert len(outputs(tiny_llm, greedy(bad_words_token_ids=longest), greedy(), greedy())[0]) == 20

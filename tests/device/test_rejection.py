"""Rejection sampling keeps the model's distribution, whatever the drafter's is: chi-square tests of
many draws.

Expected distributions come from `distribution` of test_sampling.py, which sorts in numpy and
float64. The same test must refuse three faults of other engines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pagedjax.device import draws, rejection
from pagedjax.device.batch import SamplingBatch
from pagedjax.device.extras import Drafted
from pagedjax.device.row_features.chain import DEFAULT
from pagedjax.device.row_features.feature import RowContext
from pagedjax.device.sampling import History, sample
from tests.device.test_sampling import Row, batch, distribution
from tests.quick_compiler import all_quickly, quick_options

# Compiles sooner; level 0 draws several times as slowly.
LESS = quick_options() | {"xla_backend_optimization_level": 1}
V = 10
ROWS = 1024
POSITIONS = 16  # of each row in one call: 16,384 draws
MANY_CALLS = 8  # calls for 131,072 draws
SLOW_CALLS = 16  # calls for 262,144 draws
SEED = np.uint32(11)
MIN_PVALUE = 1e-4  # the p-value of a distribution that is kept is above
FAULTY = 1e-12  # the p-value of a fault is below
MODEL = np.array([2.0, 1.5, 1.1, 0.8, 0.4, 0.0, -0.5, -1.0, -2.0, -6.0], np.float32)
DRAFTER = np.array([0.1, 2.4, -0.5, 0.9, -3.0, 1.3, 0.6, -6.0, 1.0, -0.2], np.float32)
RULES: dict[str, Row] = {
    "temperature": {"temperature": 0.9},
    "all of truncation": {"temperature": 1.3, "top_k": 7, "top_p": 0.93, "min_p": 0.04},
    "penalties and bias": {
        "temperature": 0.8,
        "history": [1, 1, 3, 0, 0, 5, 2],
        "prompt_len": 2,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {4: 1.5, 6: -0.7},
        "top_p": 0.97,
    },
}
Rows = tuple[SamplingBatch, History]


class Drawn(NamedTuple):
    """Of each position and row."""

    drafts: Any  # [P, B] int32
    probs: Any  # [P, B, V] what they were drawn from
    tokens: Any  # [P, B] int32


# (drafts [P, B], probs [P, B, V]) -> what the model's step is told
Change = Callable[[jax.Array, jax.Array], Drafted]


def same(row: Row, rows: int) -> Rows:
    """Rows with equal options and tokens, and seeds 0, 1, 2 ..."""
    s, history = batch([row], V)
    repeated = jax.tree.map(
        lambda x: np.repeat(x, rows, axis=0), (s, history.block_tables, history.seq_lens)
    )
    s, tables, lens = repeated
    return s._replace(seed=np.arange(rows, dtype=np.uint32)), History(history.tokens, tables, lens)


def each_row(logits: jax.Array, s: SamplingBatch) -> jax.Array:
    """[B, V] from [V]."""
    return jnp.broadcast_to(logits, (len(s.temperature), *logits.shape))


def at(position: jax.Array, s: SamplingBatch) -> SamplingBatch:
    return s._replace(position=jnp.full_like(s.position, position))


@partial(jax.jit, compiler_options=LESS)
def draft(
    logits: jax.Array, s: SamplingBatch, history: History, first: int
) -> tuple[jax.Array, jax.Array]:
    """(drafts [P, B], probs [P, B, V]) of the positions from `first`."""

    def draft_at(position: jax.Array) -> tuple[jax.Array, jax.Array]:
        at_position = at(position, s)
        context = RowContext(*history, at_position.prompt_len, at_position.position)
        return rejection.draw_drafts(each_row(logits, s), at_position, context, SEED, DEFAULT)

    return jax.lax.map(draft_at, first + jnp.arange(POSITIONS))


def _verify(
    logits: jax.Array, s: SamplingBatch, history: History, first: int, drafted: Drafted | None
) -> jax.Array:
    """[P, B] tokens of the positions from `first`."""

    def verify_at(inputs: tuple[jax.Array, Drafted | None]) -> jax.Array:
        return sample(
            each_row(logits, s), at(inputs[0], s), history, SEED, drafted=inputs[1]
        ).tokens

    return jax.lax.map(verify_at, (first + jnp.arange(POSITIONS), drafted))


verify = jax.jit(_verify, compiler_options=LESS)


def draft_and_verify(
    model: np.ndarray,
    drafter: np.ndarray,
    rows: Rows,
    change: Change = Drafted,
    *,
    calls: int = 1,
    verify: Callable[..., jax.Array] = verify,
) -> Drawn:
    """Returns drafts from the drafter's logits [V], and the tokens that the model's logits [V]
    make of them.

    Args:
        verify: another one where a test has changed the module `rejection`: a compiled function
            does not see it.
    """
    parts = []
    shape = (POSITIONS, len(rows[0].seed))
    for first in range(0, calls * POSITIONS, POSITIONS):
        drafts, probs = draft(drafter, *rows, first)
        part = Drawn(drafts, probs, verify(model, *rows, first, change(drafts, probs)))
        chex.assert_shape(part, [shape, (*shape, V), shape])
        chex.assert_type(part, [jnp.int32, jnp.float32, jnp.int32])
        parts.append(part)
    drafts, probs, tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
    assert 0 <= tokens.min() <= tokens.max() < V
    return Drawn(drafts, probs, tokens)


def each_token() -> np.ndarray:
    """Returns drafts [P, B]: each token in turn."""
    return np.tile(np.arange(ROWS, dtype=np.int32) % V, (POSITIONS, 1))


def verify_traced_again() -> Callable[..., jax.Array]:
    return jax.jit(lambda *arguments: _verify(*arguments))


def pvalue(tokens: np.ndarray, p: np.ndarray) -> float:
    """Of the chi-square test that tokens are drawn from p; 0 if one of them cannot be."""
    counts = np.bincount(tokens.reshape(-1), minlength=len(p))
    if counts[p == 0].any():
        return 0.0
    return float(stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue)


def assert_share(hits: np.ndarray, share: float) -> None:
    """Within four standard errors, of independent draws."""
    error = np.sqrt(share * (1 - share) / hits.size)
    assert abs(float(hits.mean()) - share) <= 4 * error


def assert_kept(outcome: Drawn, p: np.ndarray, q: np.ndarray) -> None:
    """Drafts are drawn from q and tokens from p."""
    chex.assert_tree_all_finite(outcome)
    assert pvalue(outcome.drafts, q) > MIN_PVALUE
    assert pvalue(outcome.tokens, p) > MIN_PVALUE
    # a rejected draft has q > p, so it is not drawn again
    assert_share(outcome.tokens == outcome.drafts, np.minimum(p, q).sum())


# --- the distribution is kept ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("all of truncation", MANY_CALLS),
        *(pytest.param(name, SLOW_CALLS, marks=pytest.mark.slow) for name in RULES),
    ],
)
def test_drawn_and_accepted_tokens_have_the_models_distribution(name, calls):
    row = RULES[name]
    p = distribution(MODEL, row)
    q = distribution(DRAFTER, row)
    outcome = draft_and_verify(MODEL, DRAFTER, same(row, ROWS), calls=calls)
    assert_kept(outcome, p, q)
    drawn = np.asarray(outcome.probs[0, 0], np.float64)
    chex.assert_trees_all_close(drawn / drawn.sum(), q, rtol=1e-7, atol=1e-6)


def test_the_tokens_of_neighbouring_positions_and_of_neighbouring_seeds_are_independent():
    row = RULES["all of truncation"]
    p = distribution(MODEL, row)
    tokens = draft_and_verify(MODEL, DRAFTER, same(row, ROWS)).tokens
    pairs = np.outer(p, p).reshape(-1)
    assert pvalue(tokens[::2] * V + tokens[1::2], pairs) > MIN_PVALUE
    assert pvalue(tokens[:, ::2] * V + tokens[:, 1::2], pairs) > MIN_PVALUE


def test_draws_behind_drafts_without_probabilities_keep_the_distribution():
    """The rule alone, without options. Drafts of a drafter on the host have no probabilities."""
    s, _ = same(RULES["temperature"], 1 << 14)
    drafts = np.arange(len(s.seed), dtype=np.int32) % V
    p = distribution(MODEL, RULES["temperature"])
    weights = np.broadcast_to(p.astype(np.float32), (len(drafts), V))
    draws_of = jax.jit(rejection.draw_or_accept, compiler_options=LESS)
    tokens = np.asarray(draws_of(weights, s, SEED, Drafted(drafts)))
    chex.assert_shape(tokens, drafts.shape)
    for draft_token in range(V):
        tokens_of_draft = tokens[draft_token::V]
        assert pvalue(tokens_of_draft, p) > MIN_PVALUE, draft_token
        assert_share(tokens_of_draft == draft_token, p[draft_token])


@pytest.mark.slow
def test_a_drafter_that_is_sure_of_its_drafts_keeps_the_distribution():
    """As drafters on the host."""
    row = RULES["all of truncation"]
    p = distribution(MODEL, row)
    drafts = each_token()
    outcome = draft_and_verify(MODEL, DRAFTER, same(row, ROWS), lambda *_: Drafted(drafts))
    assert (p == 0).any()
    for token in range(V):
        tokens = outcome.tokens[:, token::V]
        assert pvalue(tokens, p) > MIN_PVALUE, token
        assert_share(tokens == token, p[token])


def test_a_drafter_of_few_tokens_keeps_the_distribution():
    """As a draft head, whose other logits are -inf."""
    row = RULES["temperature"]
    logits = np.where(np.isin(np.arange(V), [1, 4, 9]), DRAFTER, -np.inf).astype(np.float32)
    outcome = draft_and_verify(MODEL, logits, same(row, ROWS))
    assert_kept(outcome, distribution(MODEL, row), distribution(logits, row))


@pytest.mark.parametrize(
    "row", [{"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.9, "top_k": 5, "min_p": 0.01}]
)
def test_a_drafter_that_knows_no_allowed_token_keeps_the_distribution(row):
    """All its logits are -inf, so it has no probs, and its draft is one and the same."""
    row = row | {"allowed_token_ids": (0, 2, 3, 5, 6, 9)}
    logits = np.where(np.isin(np.arange(V), [1, 4, 7]), DRAFTER, -np.inf).astype(np.float32)
    outcome = draft_and_verify(MODEL, logits, same(row, ROWS))
    assert len(set(outcome.drafts.reshape(-1).tolist())) == 1
    assert pvalue(outcome.tokens, distribution(MODEL, row)) > MIN_PVALUE


def test_weights_that_are_all_zero_keep_the_distribution():
    row = RULES["all of truncation"]
    weightless = lambda drafts, probs: Drafted(np.zeros_like(drafts), np.zeros_like(probs))  # noqa: E731
    outcome = draft_and_verify(MODEL, DRAFTER, same(row, ROWS), weightless)
    p = distribution(MODEL, row)
    assert pvalue(outcome.tokens, p) > MIN_PVALUE
    assert_share(outcome.tokens == 0, p[0])


def test_the_scale_of_weights_does_not_matter():
    """They are unnormalised. The factors are powers of two, so that nothing is rounded in another
    way.
    """
    rows = same(RULES["all of truncation"], ROWS)
    unscaled = draft_and_verify(MODEL, DRAFTER, rows)
    for factor in (2.0**-20, 2.0**20):
        scaled = draft_and_verify(
            MODEL,
            DRAFTER,
            rows,
            lambda drafts, probs, f=factor: Drafted(drafts, np.float32(f) * np.asarray(probs)),
        )
        chex.assert_trees_all_equal(scaled.tokens, unscaled.tokens)


@pytest.mark.parametrize("name", RULES)
def test_a_drafter_that_equals_the_model_has_all_drafts_accepted(name):
    outcome = draft_and_verify(MODEL, MODEL, same(RULES[name], ROWS))
    chex.assert_trees_all_equal(outcome.tokens, outcome.drafts)


# --- faults that the test must find ---------------------------------------------------------------
# Those inside the program are slow: each needs a program of its own.


def test_unprocessed_probabilities_of_the_drafter_are_found():
    """As in transformers#47932: drafts are drawn after temperature and truncation, and accepted
    with q before them.
    """
    row = RULES["all of truncation"]
    raw = np.exp(DRAFTER) / np.exp(DRAFTER).sum()
    faulty = lambda drafts, probs: Drafted(drafts, np.broadcast_to(raw, probs.shape))  # noqa: E731
    outcome = draft_and_verify(MODEL, DRAFTER, same(row, ROWS), faulty)
    assert pvalue(outcome.drafts, distribution(DRAFTER, row)) > MIN_PVALUE
    assert pvalue(outcome.tokens, distribution(MODEL, row)) < FAULTY


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["ACCEPT", "REPLACE"])
def test_a_number_that_is_used_twice_is_found(monkeypatch, stream):
    """As in vllm#47386: one number draws a draft, and accepts it (or replaces it)."""
    row = RULES["all of truncation"]
    monkeypatch.setattr(rejection, stream, rejection.DRAFT)
    outcome = draft_and_verify(MODEL, DRAFTER, same(row, ROWS), verify=verify_traced_again())
    assert pvalue(outcome.drafts, distribution(DRAFTER, row)) > MIN_PVALUE
    assert pvalue(outcome.tokens, distribution(MODEL, row)) < FAULTY


@pytest.mark.slow
def test_a_replacement_from_the_whole_distribution_is_found(monkeypatch):
    """q is not subtracted from p."""

    def faulty(
        weights: jax.Array, s: SamplingBatch, seed: jax.Array, drafted: Drafted
    ) -> jax.Array:
        p = rejection.normalised(weights)
        q = rejection.normalised(drafted.probs)
        of = lambda x: jnp.take_along_axis(x, drafted.tokens[:, None], axis=-1)[:, 0]  # noqa: E731
        accepted = draws.uniform(s, seed, rejection.ACCEPT) * of(q) < of(p)
        return jnp.where(
            accepted,
            drafted.tokens,
            draws.at_quantile(p, draws.uniform(s, seed, rejection.REPLACE)),
        )

    row = RULES["all of truncation"]
    monkeypatch.setattr(rejection, "draw_or_accept", faulty)
    outcome = draft_and_verify(MODEL, DRAFTER, same(row, ROWS), verify=verify_traced_again())
    assert pvalue(outcome.tokens, distribution(MODEL, row)) < FAULTY


# --- rows side by side ----------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_without_a_draft_draw_the_token_of_a_plain_step():
    rows = same(RULES["all of truncation"], ROWS)
    every_third = np.arange(ROWS) % 3 == 0
    partly = lambda drafts, probs: Drafted(  # noqa: E731
        np.where(every_third, np.int32(-1), drafts), probs
    )
    no_row = lambda drafts, probs: Drafted(np.full_like(drafts, -1))  # noqa: E731
    partly_drafted, without = (
        draft_and_verify(MODEL, DRAFTER, rows, change) for change in (partly, no_row)
    )
    expected = np.asarray(verify(MODEL, *rows, 0, None))
    chex.assert_trees_all_equal(partly_drafted.tokens[:, ::3], expected[:, ::3])
    chex.assert_trees_all_equal(without.tokens, expected)
    assert (partly_drafted.tokens != expected)[:, ~every_third].any()


# without them it is a program of its own, as in all tests of engines whose drafter is on the host
@pytest.mark.parametrize("with_probs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_greedy_rows_among_drawn_rows_are_strict(with_probs):
    """They take the model's best token, whatever their draft is, and their draft is the drafter's
    best token.
    """
    greedy = np.arange(ROWS) % 2 == 0
    rule = RULES["temperature"]
    s, history = same(rule, ROWS)
    s = s._replace(temperature=np.where(greedy, 0, s.temperature).astype(np.float32))
    outcome = draft_and_verify(MODEL, DRAFTER, (s, history))
    chex.assert_trees_all_equal(
        np.unique(outcome.drafts[:, greedy]), DRAFTER.argmax(keepdims=True).astype(np.int32)
    )
    chex.assert_trees_all_equal(
        np.unique(outcome.tokens[:, greedy]), MODEL.argmax(keepdims=True).astype(np.int32)
    )
    assert pvalue(outcome.tokens[:, ~greedy], distribution(MODEL, rule)) > MIN_PVALUE
    drafts = each_token()
    change = (lambda _, probs: Drafted(drafts, probs)) if with_probs else lambda *_: Drafted(drafts)
    tokens = draft_and_verify(MODEL, DRAFTER, (s, history), change).tokens[:, greedy]
    chex.assert_trees_all_equal(np.unique(tokens), MODEL.argmax(keepdims=True).astype(np.int32))


def test_penalties_and_bias_reach_greedy_drafts_and_greedy_tokens():
    row = {
        "temperature": 0.0,
        "history": [0, 1, 1],
        "prompt_len": 1,
        "presence_penalty": 1.5,
        "logit_bias": {2: 0.5},
    }
    outcome = draft_and_verify(MODEL, DRAFTER, same(row, ROWS))
    assert (DRAFTER.argmax(), MODEL.argmax()) == (1, 0)
    assert set(outcome.drafts.reshape(-1).tolist()) == {5}  # 1.3, before 2.4 - 1.5 of token 1
    assert set(outcome.tokens.reshape(-1).tolist()) == {0}  # the prompt has it, the output not


def test_a_row_with_a_draft_does_not_depend_on_the_other_rows():
    s, history = same(RULES["penalties and bias"], ROWS)
    first_rows = np.arange(ROWS) < 3
    changed = s._replace(
        seed=np.where(first_rows, s.seed, s.seed + ROWS).astype(np.uint32),
        temperature=np.where(first_rows, s.temperature, 0).astype(np.float32),
    )
    drawn, beside_others = (
        draft_and_verify(MODEL, DRAFTER, (batch, history)) for batch in (s, changed)
    )
    chex.assert_trees_all_equal(beside_others.tokens[:, :3], drawn.tokens[:, :3])
    chex.assert_trees_all_equal(beside_others.drafts[:, :3], drawn.drafts[:, :3])
    assert (beside_others.tokens != drawn.tokens)[:, 3:].any()


@pytest.mark.slow
def test_a_few_rows_at_a_time_are_as_all_rows_at_once():
    s, history = same(RULES["penalties and bias"], 13)
    drafted = Drafted(
        np.arange(13, dtype=np.int32) % V - 1, np.repeat(np.exp(DRAFTER)[None], 13, axis=0)
    )
    tiled = jax.jit(
        lambda tile: sample(each_row(MODEL, s), s, history, SEED, tile, drafted=drafted).tokens,
        static_argnums=0,
    )
    with all_quickly():
        chex.assert_trees_all_equal(tiled(5), tiled(None))


def test_the_numbers_of_a_row_and_position_are_independent():
    s, _ = same(RULES["temperature"], ROWS)
    streams = [0, rejection.DRAFT, rejection.ACCEPT, rejection.REPLACE]
    assert len(set(streams)) == 4
    draw_all = jax.jit(
        lambda s: jnp.stack([draws.uniform(s, SEED, stream) for stream in streams]),
        compiler_options=LESS,
    )
    numbers = draw_all(s)
    off_diagonal = np.corrcoef(numbers) - np.eye(4)
    assert np.abs(off_diagonal).max() < 4 / np.sqrt(ROWS)

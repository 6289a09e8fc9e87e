"""From logits to tokens: every rule against its published definition, in plain numpy and
float64.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core.primitives import cond_p, dot_general_p

from pagedjax.device import draws
from pagedjax.device.batch import MAX_TOP, SamplingBatch
from pagedjax.device.row_features import (
    RowChain,
    RowContext,
    RowFeature,
    RowOptions,
    chain,
    penalties,
)
from pagedjax.device.row_features.chain import DEFAULT
from pagedjax.device.row_features.listed_tokens import MAX_LISTED
from pagedjax.device.row_features.penalties import PENALTIES
from pagedjax.device.row_features.truncation import MIN_P, TOP_K, TOP_P
from pagedjax.device.sampling import (
    WAYS_WITHOUT_OPTIONS,
    History,
    by_maxima,
    prompt_logprobs,
    sample,
)
from pagedjax.options.params import SamplingParams
from tests.refusals import refused

B = 16  # rows
V = 300  # tokens of the vocabulary, no multiple of anything
HISTORY = 24  # known tokens of a row at most
LARGE_V = 2 * MAX_LISTED
ENGINE_SEED = 11
TILE = 5  # no divisor of B
TRACES: Counter[tuple[int, ...]] = Counter()  # of `sampled`, by the shape of the logits
Row = dict[
    str, Any
    # options of a row by their names in SamplingParams; "history", "prompt_len", "position",
    # "suppressed"
]
PARAMS = {field.name for field in dataclasses.fields(SamplingParams)}

pytestmark = pytest.mark.few_optimisations


@jax.jit
def sampled(logits: jax.Array, s: SamplingBatch, history: History, seed: jax.Array) -> Any:
    TRACES[logits.shape] += 1
    return sample(logits, s, history, seed, TILE)


at_once = jax.jit(sample)
in_tiles = jax.jit(partial(sample, tile=TILE))


def history_of(rows: list[Row]) -> History:
    """The rows' tokens in blocks of a cache, in any order, among blocks that are full of other
    tokens.
    """
    rng = np.random.default_rng(len(rows))
    b = len(rows)
    size = 4
    width = HISTORY // size
    tables = 1 + rng.permutation(b * width).reshape(b, width).astype(np.int32)
    tokens = rng.integers(0, 40, (1 + b * width, size)).astype(np.int32)
    lens = np.zeros(b, np.int32)
    for i, row in enumerate(rows):
        ids = np.array(row.get("history", ()), np.int32)
        at = np.arange(len(ids))
        lens[i] = len(ids)
        tokens[tables[i, at // size], at % size] = ids
    return History(tokens, tables, lens)


def batch(
    rows: list[Row], vocab: int = V, options: RowChain = DEFAULT
) -> tuple[SamplingBatch, History]:
    """The arrays of rows whose options are read and packed by a chain; what a row leaves out is
    off.
    """
    b = len(rows)
    row_options = [read(row, options) for row in rows]
    records = np.frombuffer(
        b"".join([read_options.record for read_options in row_options]), options.record
    )
    packed = options.pack(records, lambda row, name: row_options[row].large[name], b)
    columns = {
        "temperature": np.float32,
        "seed": np.uint32,
        "position": np.int32,
        "prompt_len": np.int32,
    }
    arrays = {
        name: np.array([row.get(name, 0) for row in rows], dtype) for name, dtype in columns.items()
    }
    num_top = np.array([row.get("logprobs", -1) for row in rows], np.int32)
    return SamplingBatch(**arrays, num_top=num_top, features=options.blank(b) | packed), history_of(
        rows
    )


def read(row: Row, options: RowChain) -> RowOptions:
    """Suppressed tokens are stop tokens under min_tokens."""
    position = row.get("position", 0)
    suppressed = row.get("suppressed", ())
    length_limits = {"min_tokens": position + 1, "max_tokens": position + 9} if suppressed else {}
    values = {name: value for name, value in row.items() if name in PARAMS}
    return options.read(
        SamplingParams(**{"temperature": 0.0, **values, **length_limits}), suppressed
    )


def draw(logits: np.ndarray, rows: list[Row], seed: int = ENGINE_SEED) -> np.ndarray:
    """The tokens of any number of rows. A program takes two seconds, so there is one for all small
    shapes.

    Some rows are drawn at a time, before rows without options; tokens past those of `logits` are
    impossible.
    """
    size, vocab = logits.shape
    shape = -(-size // B) * B, V if vocab <= V else LARGE_V
    padded = np.full(shape, -np.inf, np.float32)
    padded[:size, :vocab] = logits
    padded[size:] = 0
    rows = [*rows, *[{}] * (shape[0] - size)]
    calls = [
        sampled(padded[first : first + B], *batch(rows[first : first + B]), np.uint32(seed))
        for first in range(0, shape[0], B)
    ]
    return np.concatenate([call.tokens for call in calls])[:size]


def adjusted(logits: np.ndarray, row: Row) -> np.ndarray:
    """The logits of one row after allowed tokens, bias, suppressed stops and penalties."""
    x = logits.astype(np.float64)
    if "allowed_token_ids" in row:
        x[np.setdiff1d(np.arange(len(x)), row["allowed_token_ids"])] = -np.inf
    for token, bias in row.get("logit_bias", {}).items():
        x[token] += bias
    x[list(row.get("suppressed", ()))] = -np.inf
    history = np.array(row.get("history", ()), int)
    factor = row.get("repetition_penalty", 1.0)
    for token in set(history.tolist()):  # Keskar et al. 2019, prompt and output
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    # OpenAI: once for each time a token was generated ...
    for token in history[row.get("prompt_len", 0) :]:
        x[token] -= row.get("frequency_penalty", 0.0)
    # ... and once for having been generated
    for token in set(history[row.get("prompt_len", 0) :].tolist()):
        x[token] -= row.get("presence_penalty", 0.0)
    return x


def distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    """The probabilities one row samples from: temperature, then min_p, then top_k, then top_p, by
    sorting.
    """
    x = adjusted(logits, row) / row["temperature"]
    p = np.exp(x - x.max())
    p /= p.sum()
    p = np.where(p >= row.get("min_p", 0.0) * p.max(), p, 0.0)
    if row.get("top_k", 0) > 0:
        p = np.where(p >= np.sort(p)[::-1][min(row["top_k"], len(p)) - 1], p, 0.0)
    p /= p.sum()
    if row.get("top_p", 1.0) < 1.0:
        best = np.sort(p)[::-1]
        p = np.where(p >= best[np.searchsorted(np.cumsum(best), row["top_p"])], p, 0.0)
    return p / p.sum()


@jax.jit
def _uniform(seed: jax.Array, request_seeds: jax.Array, positions: jax.Array) -> jax.Array:
    def uniform_at(request_seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), request_seed), position)
        return jax.random.uniform(key)

    return jax.vmap(uniform_at)(request_seeds, positions)


def uniforms(rows: list[Row], seed: int = ENGINE_SEED) -> np.ndarray:
    """The number in [0, 1) of each row."""
    seeds = np.array([row.get("seed", 0) for row in rows], np.uint32)
    positions = np.array([row.get("position", 0) for row in rows], np.int32)
    return np.asarray(_uniform(np.uint32(seed), seeds, positions))


def assert_draws(logits: np.ndarray, rows: list[Row], positions: int = 24) -> None:
    """Every row at several positions takes the token at which its cumulative distribution passes
    its uniform number.
    """
    checked = 0
    expected = [distribution(x, row) for x, row in zip(logits, rows, strict=True)]
    for position in range(positions):
        rows = [row | {"position": position} for row in rows]
        tokens = draw(logits, rows)
        for p, row, token, u in zip(expected, rows, tokens, uniforms(rows), strict=True):
            ends = np.cumsum(p)
            assert p[token] > 0, f"token {token} cannot be drawn with {row}"
            # float32 sums may fall on the other side of a border so near
            if np.abs(ends - u).min() > 1e-5:
                assert token == np.searchsorted(ends, u), row
                checked += 1
    assert checked > 0.9 * positions * len(rows)


def random_logits(seed: int, b: int = B, v: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((b, v)) * 3).astype(np.float32)


def random_history(rng: np.random.Generator) -> Row:
    """Some 20 known tokens, many of them repeated."""
    length = int(rng.integers(2, HISTORY + 1))
    return {
        "history": rng.integers(0, 12, length).tolist(),
        "prompt_len": int(rng.integers(1, length + 1)),
    }


# --- one rule at a time ---------------------------------------------------------------------------


def test_a_plain_program_draws_the_same_tokens_and_has_fewer_operations():
    """Some rows are greedy."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(B, V)).astype(np.float32)
    rows = [{"temperature": 0.7 * (i % 3), "seed": i, "position": 2 * i} for i in range(B)]
    s, history = batch(rows)
    plain = s.plain()
    smallest = plain.without_logprobs()
    assert plain.is_plain
    assert not s.is_plain
    seed = np.uint32(ENGINE_SEED)
    expected = sampled(logits, s, history, seed)
    for small in (plain, smallest):
        chex.assert_trees_all_equal(at_once(logits, small, history, seed), expected)
        chex.assert_trees_all_equal(in_tiles(logits, small, history, seed), expected)
    arrays = s, plain, smallest
    texts = [str(jax.make_jaxpr(sample)(logits, x, history, np.uint32(0))) for x in arrays]
    whole, without_options, without_both = map(len, texts)
    assert without_both < without_options < whole / 2
    assert 5 * without_both < whole


def test_without_log_probabilities_a_program_has_none():
    rows = [{"temperature": 0.0, "logprobs": 2}, {"temperature": 0.8, "top_k": 3}] * (B // 2)
    s, history = batch(rows)
    logits = random_logits(5)
    expected = sampled(logits, s, history, np.uint32(0))
    without = in_tiles(logits, s._replace(num_top=None), history, np.uint32(0))
    chex.assert_trees_all_equal(without.tokens, expected.tokens)
    chex.assert_trees_all_equal(without[1:], jax.tree.map(jnp.zeros_like, expected[1:]))


def test_temperature_zero_is_the_best_token_and_the_first_of_equals():
    logits = random_logits(0)
    logits[3] = 0.0
    logits[4, [50, 60]] = 99.0
    tokens = draw(logits, [{"seed": i} for i in range(B)])
    assert tokens.tolist() == logits.argmax(-1).tolist()
    chex.assert_type(tokens, np.int32)
    mixed = draw(logits, [{"seed": i, "temperature": float(i % 2)} for i in range(B)])
    assert mixed[::2].tolist() == logits.argmax(-1)[::2].tolist()
    assert mixed[1::2].tolist() != logits.argmax(-1)[1::2].tolist()


@pytest.mark.parametrize("v", [1, 127, 128, 129, 1000])
def test_the_best_of_any_vocabulary_is_numpys_argmax(v):
    rng = np.random.default_rng(v)
    logits = rng.integers(-3, 3, (5, v)).astype(np.float32)  # many equals
    logits[3] = -np.inf
    logits[4, : v // 2] = -np.inf
    chex.assert_trees_all_equal(
        jax.jit(draws.best_tokens)(logits), logits.argmax(-1).astype(np.int32)
    )


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"top_k": V + 50},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"logit_bias": {5: 4.0, 299: 6.5, 0: -100.0}},
    ],
)
def test_a_rule_alone_draws_from_its_definition(rule):
    assert_draws(random_logits(1), [{"temperature": 1.0, "seed": i} | rule for i in range(B)])


# --- rules together -------------------------------------------------------------------------------


def test_all_rules_together_draw_from_the_published_order():
    for seed in range(6):
        rng = np.random.default_rng(seed)
        rows = []
        for i in range(B):
            row = {
                "temperature": float(rng.uniform(0.3, 2)),
                "seed": int(rng.integers(2**32)),
            } | random_history(rng)
            candidates = {
                "top_k": int(rng.integers(1, 30)),
                "top_p": float(rng.uniform(0.3, 1)),
                "min_p": float(rng.uniform(0, 0.2)),
                "presence_penalty": float(rng.uniform(-2, 2)),
                "frequency_penalty": float(rng.uniform(-2, 2)),
                "repetition_penalty": float(rng.uniform(0.5, 2)),
                "logit_bias": {int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, 40, 6)},
                "allowed_token_ids": tuple(rng.permutation(40)[:25].tolist()),
                "suppressed": (int(rng.integers(40)),),
            }
            rows.append(
                row
                | {
                    name: value
                    for name, value in candidates.items()
                    if rng.random() < 0.5 or i == 0
                }
            )
        assert_draws(random_logits(seed)[:, :40], rows, positions=12)


@pytest.mark.parametrize(
    ("row", "logits", "possible"),
    [
        # bias first: it makes the logit negative, so that the repetition penalty multiplies
        (
            {"logit_bias": {0: -2.0}, "repetition_penalty": 2.0, "history": [0], "top_k": 2},
            [1, -1.5, -3, -9],
            {1, 0},
        ),
        # temperature before min_p: at temperature 2 the second token has 0.37 of the best one's
        # probability, not 0.14
        ({"temperature": 2.0, "min_p": 0.3}, [2, 0, -9, -9], {0, 1}),
        # top_k before top_p: among the two that stay, the first holds 0.62, enough for 0.6; of all
        # three it is 0.45
        ({"top_k": 2, "top_p": 0.6}, [1.0, 0.5, 0.3, -9], {0}),
        # a bias cannot bring back a stop token that min_tokens forbids
        ({"logit_bias": {0: 100.0}, "suppressed": (0,), "top_k": 1}, [5, 1, 0, -1], {1}),
        # nor a token that is not allowed
        ({"logit_bias": {0: 100.0}, "allowed_token_ids": (2, 3), "top_k": 1}, [5, 1, 0, -1], {2}),
    ],
)
def test_the_order_of_the_rules_shows(row, logits, possible):
    rows = [{"temperature": 1.0, "seed": i} | row for i in range(64)]
    assert set(draw(np.array([logits] * 64, np.float32), rows).tolist()) == possible
    assert {
        int(t) for t in np.flatnonzero(distribution(np.array(logits, np.float32), rows[0]))
    } == possible


# --- precision ------------------------------------------------------------------------------------


def products(jaxpr: Any) -> Iterator[Any]:
    """The precision of every product in a jaxpr, also in its loops and branches."""
    for equation in jaxpr.eqns:
        if equation.primitive is dot_general_p:
            yield equation.params["precision"]
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.parametrize("tile", [None, TILE])
def test_no_sum_of_sampling_is_a_product(tile):
    """At the default precision a TPU rounds the arguments of a product to bfloat16 and a GPU to
    TF32: 0.9982 becomes 1, a piece looks larger than the running sum of its tokens, and its last
    token is drawn too often."""
    arguments = jnp.zeros((B, V)), *batch([{}] * B), np.uint32(0)
    assert not list(products(jax.make_jaxpr(lambda *a: sample(*a, tile))(*arguments)))


# --- conditionals -------------------------------------------------------------------------------


def conditionals(jaxpr: Any) -> Iterator[Any]:
    """The conditionals of a jaxpr, also in its loops and branches. Of the ways to choose a token,
    the last one is left out, which is for rows with options. A choice by platform is none.
    """
    platforms = [x for e in jaxpr.eqns if e.primitive.name == "platform_index" for x in e.outvars]
    for equation in jaxpr.eqns:
        inner = [x for x in jax.tree.leaves(list(equation.params.values())) if is_jaxpr(x)]
        if equation.primitive is cond_p and equation.invars[0] not in platforms:
            yield equation
            inner = inner[:WAYS_WITHOUT_OPTIONS]
        for x in inner:
            yield from conditionals(x)


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


@pytest.mark.parametrize("tile", [None, TILE])
def test_no_conditional_hands_logits_on_unless_a_row_has_options(tile):
    """What a branch returns as it came, a GPU copies in every step."""
    arguments = jnp.zeros((B, V)), *batch([{}] * B), np.uint32(0)
    jaxpr = jax.make_jaxpr(lambda *a: sample(*a, tile))(*arguments)
    found = list(conditionals(jaxpr))
    assert max(len(equation.params["branches"]) for equation in found) == WAYS_WITHOUT_OPTIONS + 1
    results = [x.aval.shape for equation in found for x in equation.outvars]
    assert results
    assert not [shape for shape in results if V in shape]


@pytest.mark.default_cases("0.8")
@pytest.mark.parametrize("temperature", [0.8, 1e-6])
def test_rows_without_options_draw_the_same_beside_rows_with_them(temperature):
    """They are computed by another branch then."""
    logits = random_logits(22)
    rows: list[Row] = [{"seed": i, "temperature": temperature * (i % 3)} for i in range(B)]
    for position in range(20):
        rows = [row | {"position": position} for row in rows]
        for option in ({"temperature": 1.0, "top_p": 0.5}, {"logit_bias": {3: 9.0}}):
            beside = draw(logits, [*rows[:-1], option])
            assert beside[:-1].tolist() == draw(logits, rows)[:-1].tolist()


# --- what a token depends on ----------------------------------------------------------------------


def test_the_random_number_is_a_function_of_engine_seed_request_seed_and_position():
    rows = [
        {"temperature": 1.0, "seed": s, "position": p}
        for s in (0, 1, 2**32 - 1)
        for p in (0, 1, 4095)
    ]
    tokens = {seed: draw(np.zeros((9, LARGE_V), np.float32), rows, seed) for seed in (0, 1)}
    for seed, drawn in tokens.items():
        assert drawn.tolist() == [int(u * LARGE_V) for u in uniforms(rows, seed)]
    assert len({*tokens[0].tolist(), *tokens[1].tolist()}) == 18


def test_a_row_does_not_depend_on_the_other_rows_nor_on_how_many_there_are():
    rng = np.random.default_rng(7)
    logits = random_logits(7)
    observed_row = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "position": 5}
    busy = {
        "temperature": 1.5,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
        "logit_bias": {1: 9.0},
        "allowed_token_ids": (1, 2, 3),
        "logprobs": 5,
        **random_history(rng),
    }
    single = lambda row: sampled(logits[:1], *batch([row]), np.uint32(ENGINE_SEED)).tokens[0]  # noqa: E731
    alone = single(observed_row)
    assert draw(logits, [observed_row, *[{}] * 15])[0] == alone  # among padding rows
    assert draw(logits, [observed_row, *[busy] * 15])[0] == alone
    assert draw(np.roll(logits, 4, axis=0), [*[busy] * 4, observed_row, *[{}] * 11])[4] == alone
    # when no other row switches a feature on either
    plain = {"temperature": 0.9, "seed": 3, "position": 5}
    assert (
        draw(logits, [plain, *[busy] * 15])[0]
        == draw(logits, [plain, *[{}] * 15])[0]
        == single(plain)
    )


# --- extremes -------------------------------------------------------------------------------------

EXTREMES = {
    "one far ahead": np.r_[0.0, np.full(V - 1, -1e30)],
    "all but one forbidden": np.r_[np.full(V - 1, -np.inf), 0.0],
    "half forbidden": np.where(np.arange(V) % 2, -np.inf, np.linspace(-3, 3, V)),
    "all equal": np.full(V, 7.0),
    "all equal and huge": np.full(V, 1e30),
    "huge range": np.linspace(-1e30, 1e30, V),
    "steps below float32's smallest weight": np.linspace(-300, 0, V),
    "pieces of zeros": np.where((np.arange(V) // 128) % 2, 0.0, -np.inf),
    "two equal": np.r_[np.full(V - 2, -50.0), 3.0, 3.0],
}


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.5, 2.0])
def test_extreme_logits_never_give_a_token_without_probability(temperature):
    logits = np.array([*EXTREMES.values()], np.float32)
    for rule in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 5, "top_p": 1e-9}):
        for position in range(5):
            row = {"temperature": temperature, "position": position} | rule
            tokens = draw(logits, [row] * len(logits))
            for name, x, token in zip(EXTREMES, logits, tokens, strict=True):
                assert 0 <= token < V
                assert distribution(x, row)[token] > 0, f"{name}: {token} with {row}"


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38])
def test_a_temperature_that_float32_hardly_holds_is_greedy(temperature):
    logits = random_logits(8) * 10
    assert draw(logits, [{"temperature": temperature}] * B).tolist() == logits.argmax(-1).tolist()


def test_rounding_of_running_sums_leads_to_no_weightless_token():
    """Running sums of pieces and of tokens are rounded apart, so a target may lie before or behind
    its piece.
    """
    weights = np.array([[0.0, 0.0, 0.5, 0.0, 0.25, 0.0]] * 6, np.float32)
    target = np.array([-1e-6, 0.0, 0.49, 0.5, 0.7499, 0.7500001], np.float32)
    ends = np.cumsum(weights, axis=-1)
    first_above = jax.jit(draws._first_above)
    assert first_above(ends, target, weights).tolist() == [2, 2, 2, 4, 4, 4]
    ends[:, 3] += 1e-3  # a sum that is no running sum by the last bit, at a token without weight
    assert first_above(ends, np.full(6, 0.5005, np.float32), weights).tolist() == [4] * 6


@jax.jit
def _cuts(weights: jax.Array, k: jax.Array, p: jax.Array) -> jax.Array:
    no_context = RowContext(*[jnp.zeros(())] * 5)
    return TOP_P.apply(TOP_K.apply(weights, {"top_k": k}, no_context), {"top_p": p}, no_context)


def cuts(weights: np.ndarray, k: int = 0, p: float = 1.0) -> np.ndarray:
    b = len(weights)
    return np.asarray(_cuts(weights, np.full(b, k, np.int32), np.full(b, p, np.float32)))


def hard_weights() -> np.ndarray:
    rng = np.random.default_rng(9)
    rows = [
        rng.random(V),
        rng.random(V) ** 40,
        np.ones(V),
        np.where(np.arange(V) < 150, 1.0, 0.5),  # ties on both sides of most thresholds
        np.round(rng.random(V), 1),
        np.geomspace(1, 1e-37, V),
        np.where(np.arange(V) < 3, 1.0, 0.0),
        np.r_[1.0, np.full(V - 1, 1e-7)],
        1.0 - np.arange(V) * 2.0**-24,  # neighbouring floats
    ]
    return np.array([row / row.max() for row in rows], np.float32)


def truncated(weights: jax.Array, fields: dict[str, jax.Array]) -> jax.Array:
    """The weights after the truncations of each row, as a chain computes them."""
    context = RowContext(*[jnp.zeros(())] * 5)
    off = DEFAULT.blank(len(weights))
    rows = {
        f.name: off[f.name]._replace(
            on=fields[f.name] != f.off[f.name], fields={f.name: fields[f.name]}
        )
        for f in (MIN_P, TOP_K, TOP_P)
    }
    return DEFAULT.apply("probs", weights, off | rows, context)


@pytest.mark.parametrize("used", [("top_p",), ("top_k", "min_p"), ("min_p", "top_k", "top_p")])
def test_thresholds_of_a_chain_keep_what_each_truncation_in_turn_keeps(used):
    """The same bits, beside rows that are not truncated."""
    rng = np.random.default_rng(3)
    weights = np.repeat(hard_weights(), 12, axis=0)
    b = len(weights)
    values = {
        "min_p": rng.choice(np.float32([0, 1e-6, 0.2, 0.5, 1]), b),
        "top_k": rng.choice(np.int32([0, 1, 40, 150, 301]), b),
        "top_p": rng.choice(np.float32([0.01, 0.3, 0.9, 0.9999, 1]), b),
    }
    features = (MIN_P, TOP_K, TOP_P)
    fields = {
        f.name: values[f.name] if f.name in used else np.full(b, f.off[f.name]) for f in features
    }
    expected = jnp.asarray(weights)
    context = RowContext(*[jnp.zeros(())] * 5)
    for f in features:
        expected = jax.jit(f.apply)(expected, {f.name: fields[f.name]}, context)
    chex.assert_trees_all_equal(jax.jit(truncated)(weights, fields), expected)


def test_no_conditional_of_truncations_returns_weights():
    """A compiler would copy them where an option is not used."""
    weights = jnp.ones((B, V))
    fields = {f.name: np.full(B, f.off[f.name]) for f in (MIN_P, TOP_K, TOP_P)}
    found = list(conditionals(jax.make_jaxpr(truncated)(weights, fields)))
    assert len(found) == 4  # one around those of the three options
    assert {x.aval.shape for equation in found for x in equation.outvars} == {(B,)}


@pytest.mark.parametrize("k", [1, 2, 3, 10, 149, 150, 151, 299, 300, 301])
def test_top_k_keeps_what_sorting_keeps_and_all_that_tie_with_it(k):
    weights = hard_weights()
    threshold = np.sort(weights, axis=-1)[:, ::-1][:, [min(k, V) - 1]]
    chex.assert_trees_all_equal(
        cuts(weights, k=k), np.where(weights >= threshold, weights, np.float32(0))
    )


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999999])
def test_top_p_keeps_the_smallest_set_of_the_best_that_holds_p(p):
    for row, cut_weights in zip(hard_weights(), cuts(hard_weights(), p=p), strict=True):
        threshold = cut_weights[cut_weights > 0].min()
        total = row.sum(dtype=np.float64)
        chex.assert_trees_all_equal(cut_weights, np.where(row >= threshold, row, np.float32(0)))
        sum_of = lambda keep: row[keep].sum(dtype=np.float64) / total  # noqa: B023, E731
        assert sum_of(row >= threshold) >= p - 1e-6
        assert sum_of(row > threshold) < p + 1e-6


def test_exactly_top_p_is_enough():
    weights = np.array([[1.0, 0.5, 0.25, 0.125, 0.125]], np.float32)
    assert [(cuts(weights, p=p) > 0).sum() for p in (0.5, 0.75, 0.875, 0.876)] == [1, 2, 3, 5]


# --- log-probabilities ----------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_logprobs(logits, tokens, logprobs, ranks, top_ids, top_logprobs) -> None:
    log_probs = log_softmax(logits)
    rows = np.arange(len(logits))
    chosen = log_probs[rows, tokens]
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :MAX_TOP]
    width = order.shape[1]
    observed = np.asarray(logprobs), np.asarray(top_logprobs)[:, :width]
    expected = chosen, np.take_along_axis(log_probs, order, axis=-1)
    chex.assert_trees_all_close(
        observed, tuple(x.astype(np.float32) for x in expected), rtol=1e-7, atol=2e-5
    )
    chex.assert_trees_all_equal(ranks, 1 + (logits > logits[rows, tokens][:, None]).sum(-1))
    chex.assert_trees_all_equal(np.asarray(top_ids)[:, :width], order)


def test_log_probabilities_are_the_models_own_whatever_the_rules():
    logits = random_logits(10)
    rng = np.random.default_rng(10)
    rule = {
        "temperature": 1.7,
        "top_k": 40,
        "logit_bias": {5: 20.0},
        "presence_penalty": 2.0,
        "logprobs": 20,
    }
    rows = [rule | {"seed": i} | random_history(rng) for i in range(B)]
    out = sampled(logits, *batch(rows), np.uint32(0))
    assert_logprobs(logits, np.asarray(out.tokens), *out[1:])
    assert 5 in out.tokens


def test_log_probabilities_come_for_all_rows_or_for_none():
    logits = random_logits(11)
    without = sampled(logits, *batch([{}] * B), np.uint32(0))
    chex.assert_trees_all_equal(without[1:], jax.tree.map(np.zeros_like, without[1:]))
    out = sampled(logits, *batch([{}] * (B - 1) + [{"logprobs": 0}]), np.uint32(0))
    assert_logprobs(logits, np.asarray(out.tokens), *out[1:])


def test_no_token_past_the_vocabulary_is_drawn_also_from_nan():
    logits = random_logits(13)
    logits[2] = np.nan
    tokens = draw(logits, [{"temperature": 1.0, "seed": i} for i in range(B)])
    assert (tokens < V).all()
    assert (tokens >= 0).all()


# the shapes of other tests, and a last tile that begins before its own samples
@pytest.mark.default_cases("16")
@pytest.mark.parametrize("b", [1, TILE, TILE + 1, 2 * TILE, B])
def test_rows_sampled_a_few_at_a_time_are_as_if_sampled_together(b):
    rules = ({"temperature": 0.9}, {}, {"temperature": 1.0, "top_p": 0.7}, {"logit_bias": {3: 9.0}})
    rows = [
        {"seed": i, "position": i, "logprobs": i % 4, **rules[i % 4], "history": [1, 2]}
        for i in range(b)
    ]
    arguments = random_logits(21, b=b), *batch(rows), np.uint32(ENGINE_SEED)
    tiled = sampled(*arguments)
    all_rows = at_once(*arguments)
    exact = lambda out: (out.tokens, out.ranks, out.top_ids)  # noqa: E731
    near = lambda out: (out.logprobs, out.top_logprobs)  # noqa: E731
    chex.assert_trees_all_equal(exact(tiled), exact(all_rows))
    chex.assert_trees_all_close(near(tiled), near(all_rows), rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize("tile", [pytest.param(None, marks=pytest.mark.slow), 8])
def test_a_few_rows_at_a_time_take_a_few_rows_of_memory(tile):
    """And no copy of the logits on the way: what one hands on as it came, XLA copies. Nor do
    penalties of 131,072
    tokens a row take memory: the ids of 8 rows alone are 4 MiB, and the step reads 512 a row at a
    time."""
    b = 64
    v = 4096
    size = 16
    width = 131_072 // 16
    s = batch([{}] * b, v)[0]
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    history = History(int32(1000, size), int32(b, width), int32(b))
    logits = jax.ShapeDtypeStruct((b, v), jnp.float32)
    compiled = (
        jax.jit(sample, static_argnums=4).lower(logits, s, history, np.uint32(0), tile).compile()
    )
    temp_bytes = compiled.memory_analysis().temp_size_in_bytes
    if tile is None:
        assert temp_bytes > 3 * b * v * 4
    else:
        assert temp_bytes < b * v * 4


@pytest.mark.default_cases("5-12", "64-300", "130-300")
@pytest.mark.parametrize(("t", "v"), [(5, 12), *((t, V) for t in (1, 5, 63, 64, 65, 130))])
def test_prompt_log_probabilities_of_any_number_of_tokens(t, v):
    """And in a vocabulary below twenty, which has fewer best tokens."""
    rng = np.random.default_rng(t)
    head = rng.standard_normal((v, 8), np.float32)
    hidden = rng.standard_normal((t, 8), np.float32)
    targets = rng.integers(0, v, t).astype(np.int32)
    targets[rng.random(t) < 0.3] = -1
    targets[-1] = 7
    run = jax.jit(lambda h, x: prompt_logprobs(lambda y: y @ head.T, h, x, TILE))
    out = jax.tree.map(np.asarray, run(hidden, targets))
    logits = hidden @ head.T
    has_target = targets >= 0
    assert_logprobs(logits[has_target], targets[has_target], *(a[has_target] for a in out))
    chex.assert_shape(list(out), [(t,), (t,), (t, MAX_TOP), (t, MAX_TOP)])
    missing = MAX_TOP - min(v, MAX_TOP)
    no_ids = np.full((has_target.sum(), missing), -1, np.int32)
    chex.assert_trees_all_equal(out.top_ids[has_target, MAX_TOP - missing :], no_ids)
    no_logprobs = np.full(no_ids.shape, -np.inf, np.float32)
    chex.assert_trees_all_equal(out.top_logprobs[has_target, MAX_TOP - missing :], no_logprobs)


# --- against the reference implementations --------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 7),
        ("top_p", 0.8),
        ("min_p", 0.1),
        ("repetition_penalty", 1.7),
        ("temperature", 0.6),
    ],
)
def test_the_definitions_in_numpy_are_transformers(name, value):
    import torch
    from transformers.generation import logits_process as hf

    processors = {
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
        "repetition_penalty": hf.RepetitionPenaltyLogitsProcessor,
        "temperature": hf.TemperatureLogitsWarper,
    }
    logits = random_logits(13)
    history = np.random.default_rng(13).integers(0, V, (B, HISTORY))
    theirs = (
        processors[name](value)(torch.from_numpy(history), torch.from_numpy(logits.copy()))
        .softmax(-1)
        .numpy()
    )
    for x, ids, expected in zip(logits, history, theirs, strict=True):
        row = {"temperature": 1.0, "history": ids.tolist(), "prompt_len": HISTORY, name: value}
        np.testing.assert_allclose(distribution(x, row), expected, atol=1e-6)


def test_the_list_of_a_row_holds_as_many_tokens_as_it_may():
    allowed = tuple(range(0, 2 * MAX_LISTED, 2))
    logits = random_logits(14, b=2, v=LARGE_V)
    tokens = draw(logits, [{"allowed_token_ids": allowed}, {}])
    chex.assert_trees_all_equal(
        tokens, np.array([2 * logits[0, ::2].argmax(), logits[1].argmax()], np.int32)
    )


# --- features of a user ---------------------------------------------------------------------------

NEAR = RowFeature(  # an option of one file: favour the token whose id is the row's position
    name="near",
    stage="logits",
    off={"near": np.float32(0)},
    read=lambda params, stop_ids: {"near": params.extra_args["near"]},
    apply=lambda x, rows, context: (
        x + rows["near"][:, None] * (jnp.arange(x.shape[1]) == context.position[:, None])
    ),
    params=("near",),
)
ODD = RowFeature(
    name="odd",
    stage="probs",
    off={"odd": np.bool_(False)},
    read=lambda params, stop_ids: {"odd": params.extra_args["odd"]},
    apply=lambda w, rows, context: jnp.where(
        rows["odd"][:, None] & (jnp.arange(w.shape[1]) % 2 == 0), 0.0, w
    ),
    params=("odd",),
)


@pytest.mark.parametrize("tile", [pytest.param(None, marks=pytest.mark.slow), TILE])
def test_a_feature_of_a_user_changes_the_rows_that_use_it_and_no_other(tile):
    options = chain((NEAR, ODD))
    logits = random_logits(30)
    rows: list[Row] = [{"seed": i, "temperature": 1.0} for i in range(B)]
    without = draw(logits, rows)
    rows[3] = {"position": 99, "extra_args": {"near": 100.0}}
    rows[4]["extra_args"] = {"odd": True}
    rows[5] |= {"position": 101, "extra_args": {"near": 100.0, "odd": True}}
    rows[6]["extra_args"] = {"odd": False}
    run = jax.jit(lambda *a: sample(*a, np.uint32(ENGINE_SEED), tile, options))
    tokens = np.asarray(run(logits, *batch(rows, options=options)).tokens)
    unchanged = np.r_[0:3, 6:B]
    chex.assert_trees_all_equal(tokens[unchanged], without[unchanged])
    assert (tokens[3], tokens[4] % 2, tokens[5]) == (99, 1, 101)


def test_a_batch_of_another_chain_is_refused_when_traced():
    arguments = jnp.zeros((2, V)), *batch([{}] * 2), np.uint32(0)
    with refused(r"the batch has the row features \[.*\]; the step has \[.*'near'"):
        jax.jit(lambda *a: sample(*a, None, chain((NEAR,))))(*arguments)


def test_arrays_that_do_not_fit_are_refused_when_traced():
    s, history = batch([{}] * 3)
    seed = np.uint32(0)
    with refused(r"logits has shape \[2, 300\]; it must be \[3, any\]"):
        jax.jit(sample)(jnp.zeros((2, V)), s, history, seed)
    with refused(r"\.seed has shape \[1\]; it must be \[3\]"):
        jax.jit(sample)(jnp.zeros((3, V)), s._replace(seed=np.zeros(1, np.uint32)), history, seed)


# --- shapes, types and traces ---------------------------------------------------------------------


def mixed_rows() -> list[Row]:
    rng = np.random.default_rng(31)
    rules: list[Row] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.2, "top_k": 9, "min_p": 0.01},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 1.0, "frequency_penalty": 0.3, "logit_bias": {3: 2.0}},
        {"allowed_token_ids": (5, 6, 7), "suppressed": (6,)},
    ]
    return [rules[i % 6] | {"seed": i, "position": i} | random_history(rng) for i in range(B)]


def test_penalties_are_those_of_a_plain_computation():
    """Of the logits themselves, for histories of any length up to a whole block table."""
    rng = np.random.default_rng(32)
    logits = random_logits(32)[:, :40]
    names = "presence_penalty", "frequency_penalty", "repetition_penalty"
    rows = [
        {name: float(rng.uniform(-1.5, 1.5)) for name in names[:2]}
        | {"repetition_penalty": float(rng.uniform(0.5, 2))}
        | random_history(rng)
        for _ in range(B)
    ]
    rows[0]["history"] = []
    rows[1]["history"] = rng.integers(0, 12, HISTORY).tolist()
    s, history = batch(rows)
    context = RowContext(*history, s.prompt_len, s.position)
    penalised = jax.jit(PENALTIES.apply)(logits, s.features["penalties"].fields, context)
    expected = np.array([adjusted(x, row) for x, row in zip(logits, rows, strict=True)], np.float32)
    chex.assert_trees_all_close(penalised, expected, rtol=1e-5, atol=1e-5)


def test_spans_of_any_length_read_the_same_history():
    rng = np.random.default_rng(33)
    rows = [{"frequency_penalty": 0.5} | random_history(rng) for _ in range(B)]
    s, history = batch(rows)
    context = RowContext(*history, s.prompt_len, s.position)
    logits = np.zeros((B, 40), np.float32)
    results = []
    for span in (4, 12, 20, 512):  # 1, 3 and 5 blocks of 6, and the whole table
        with mock.patch.object(penalties, "SPAN", span):
            run = jax.jit(lambda *a: PENALTIES.apply(*a))
            results.append(run(logits, s.features["penalties"].fields, context))
    for result in results[1:]:
        chex.assert_trees_all_equal(results[0], result)
    assert np.asarray(results[0]).any()


def test_options_of_the_rows_are_arguments_of_one_program():
    logits = random_logits(34)
    seed = np.uint32(ENGINE_SEED)
    tokens = {
        sampled(logits, *batch(rows), seed).tokens.tobytes() for rows in ([{}] * B, mixed_rows())
    }
    assert len(tokens) == 2
    assert TRACES[logits.shape] == 1


@pytest.mark.parametrize("shape", [(1, 5), (3, 40), (4, 1000)])
def test_maxima_are_those_of_a_sort(shape):
    """On a GPU, log-probabilities are found by maxima; equal numbers come in the order of their
    ids.
    """
    x = np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32) / 4
    k = min(20, shape[-1])
    maxima = jax.jit(partial(by_maxima, k=k))(x)
    expected = tuple(jax.lax.top_k(x, k))
    chex.assert_shape(maxima, (shape[0], k))
    chex.assert_trees_all_equal(maxima, expected)

"""Prefix caching through the engine: what is found is what was computed, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.engine import block_hashes
from tests.engine.poison import poisoned
from tests.engine.runs import greedy, sampled, small_llm, steps
from tests.refusals import refused

GREEDY = greedy(12)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
SYSTEM = np.random.default_rng(0).integers(3, 320, 48).tolist()
TAILS = [
    np.random.default_rng(i + 1).integers(3, 320, n).tolist()
    for i, n in enumerate((1, 7, 8, 9, 20, 30))
]
PROMPTS = [SYSTEM + tail for tail in TAILS]


def make(tiny, **config):
    """Its blocks have 16 tokens, as those of `tiny_llm`."""
    return small_llm(tiny, **config).engine


def run(engine, requests):
    """Requests {id: (prompt, params)} to their end -> (tokens by id, cached tokens by id)."""
    for request_id, (prompt, params) in requests.items():
        engine.add(request_id, prompt, params)
    results = list(steps(engine))
    cached: dict[str, int] = {}
    for plan in [result.plan for result in reversed(results)]:
        cached |= dict(zip(plan.admitted, plan.cached, strict=True))
    return sampled(results), cached


def everyone(params=GREEDY) -> dict:
    return {f"r{i}": (prompt, params) for i, prompt in enumerate(PROMPTS)}


@pytest.fixture(scope="module")
def cold(tiny):
    return make(tiny, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def expected(cold):
    """Each request alone and without any sharing."""
    alone = {}
    for params in (GREEDY, DRAWN):
        requests = everyone(params)
        alone[params.temperature] = {
            name: run(cold, {name: request})[0][name] for name, request in requests.items()
        }
        assert len(set(map(tuple, alone[params.temperature].values()))) == len(requests)
    return alone


@pytest.mark.default_cases("config2-drawn")
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"block_size": 1, "num_blocks": 800},
        {"num_blocks": 9},
        {"block_size": 8, "num_blocks": 128},
    ],
)
def test_prefix_caching_changes_no_token(tiny, expected, params, config):
    engine = make(tiny, **config)
    for _ in range(3):
        assert run(engine, everyone(params))[0] == expected[params.temperature]


def test_a_fully_cached_prompt_computes_one_token_of_its_last_block(tiny):
    engine = make(tiny)
    # 48 tokens are 3 blocks of 16, but one token must be computed
    assert [run(engine, {"a": (SYSTEM, GREEDY)})[1]["a"] for _ in range(2)] == [0, 32]
    engine.reset_prefix_cache()
    assert run(engine, {"a": (SYSTEM, GREEDY)})[1] == {"a": 0}


def test_generated_blocks_are_found_by_the_next_turn(tiny, cold):
    engine = make(tiny)
    (answer,) = run(engine, {"a": (SYSTEM, GREEDY)})[0].values()
    turn = [*SYSTEM, *answer, *TAILS[1]]
    tokens, cached = run(engine, {"b": (turn, GREEDY)})
    # the last answered token was never computed
    assert cached == {"b": (len(SYSTEM) + len(answer) - 1) // 16 * 16}
    assert tokens == run(cold, {"b": (turn, GREEDY)})[0]


def test_salted_and_uncached_requests_share_nothing(tiny):
    engine = make(tiny)
    private = {"enable_prefix_caching": False}
    for request_id, options, hit in (
        ("private leaves nothing", private, 0),
        ("plain", {}, 0),
        ("plain, the second time", {}, 32),
        ("private finds nothing", private, 0),
        ("x", {"cache_salt": "x"}, 0),
        ("x, the second time", {"cache_salt": "x"}, 32),
        ("y", {"cache_salt": "y"}, 0),
        ("prompt log-probabilities need every token", {"prompt_logprobs": 0}, 0),
    ):
        params = SamplingParams(temperature=0, max_tokens=2, **options)
        assert run(engine, {request_id: (SYSTEM, params)})[1] == {request_id: hit}, request_id


def test_freed_blocks_are_never_read(tiny, expected):
    """Every block without content holds NaN, in keys and values, whoever had it before."""
    engine = make(tiny, num_blocks=9)
    poisoned(engine)
    for params in (GREEDY, DRAWN):
        assert run(engine, everyone(params))[0] == expected[params.temperature]


@pytest.mark.parametrize("salt", ["", 7])
def test_an_empty_salt_is_refused(salt):
    with refused(r"cache_salt is .*; it must be None or a non-empty string"):
        SamplingParams(cache_salt=salt)


def test_a_hash_depends_on_every_token_before():
    def chain(tokens, salt=None, size=4):
        return block_hashes.chain(block_hashes.root(salt, size), tokens, size)

    tokens = np.arange(20, dtype=np.int32)
    hashes = chain(tokens)
    assert len(hashes) == len(set(hashes)) == 5
    assert chain(tokens[:11]) == hashes[:2]
    assert block_hashes.chain(hashes[1], tokens[8:], 4) == hashes[2:]
    assert chain(tokens.astype(np.int64)[::1]) == hashes
    changed = tokens.copy()
    changed[5] = 99
    assert chain(changed)[0] == hashes[0]
    assert set(hashes).isdisjoint(
        [*chain(changed)[1:], *chain(tokens, salt="salt"), *chain(tokens, size=5)]
    )

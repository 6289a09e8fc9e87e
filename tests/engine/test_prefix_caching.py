"""Prefix caching through the engine: what is found is what was computed, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.engine import block_hashes
from pagedjax.host import scheduler
from pagedjax.host.blocks import idle_ids
from pagedjax.host.types import Admitted, Sampled
from tests.engine.poison import poisoned

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=12, ignore_eos=True)
SYSTEM = np.random.default_rng(0).integers(3, 320, 40).tolist()
TAILS = [
    np.random.default_rng(i + 1).integers(3, 320, n).tolist()
    for i, n in enumerate((1, 7, 8, 9, 20, 30))
]
PROMPTS = [SYSTEM + tail for tail in TAILS]


def make(tiny, **config):
    config = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": (64,),
        "num_blocks": 128,
    } | config
    return LLM(tiny, progress=False, **({"block_size": 8} | config)).engine


def run(engine, requests):
    """Requests {id: (prompt, params)} to their end -> (tokens by id, cached tokens by id, tokens
    computed).
    """
    for request_id, (prompt, params) in requests.items():
        engine.add(request_id, prompt, params)
    tokens: dict[str, list[int]] = {request_id: [] for request_id in requests}
    cached: dict[str, int] = {}
    computed = 0
    while engine.has_work:
        result = engine.step()
        scheduler.check(engine.scheduler_state)
        computed += result.plan.num_tokens
        for event in result.events:
            if isinstance(event, Sampled):
                for request_id, token in zip(event.request_ids, event.token_ids, strict=True):
                    tokens[request_id].append(token)
            elif isinstance(event, Admitted):
                cached.setdefault(event.request_id, event.num_cached)
    return tokens, cached, computed


def everyone(params=GREEDY) -> dict:
    return {f"r{i}": (prompt, params) for i, prompt in enumerate(PROMPTS)}


@pytest.fixture(scope="module")
def cold(tiny):
    return make(tiny, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def expected(cold):
    """Each request alone and without any sharing."""
    alone = {}
    for name, params in (("greedy", GREEDY), ("drawn", DRAWN)):
        for request_id, request in everyone(params).items():
            alone[name, request_id] = run(cold, {request_id: request})[0][request_id]
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    return alone


@pytest.mark.default_cases(
    "config0-drawn-params1", "config1-greedy-params0", "config2-drawn-params1"
)
@pytest.mark.parametrize(("name", "params"), [("greedy", GREEDY), ("drawn", DRAWN)])
@pytest.mark.parametrize(
    "config", [{}, {"block_size": 1, "num_blocks": 800}, {"block_size": 16, "num_blocks": 9}]
)
def test_prefix_caching_changes_no_token(tiny, expected, name, params, config):
    engine = make(tiny, **config)
    wanted = {request_id: expected[name, request_id] for request_id in everyone()}
    for _ in range(3):
        tokens, _, _ = run(engine, everyone(params))
        assert tokens == wanted


def test_a_common_prefix_is_computed_once_for_requests_in_one_step(tiny):
    """The second and later ones share blocks that the first computes in the very same step."""
    # 40 tokens and 16 of tails, where a step has room for 64
    together = dict(list(everyone().items())[:3])
    _, cached, computed = run(make(tiny), together)
    assert cached == {"r0": 0, "r1": 40, "r2": 40}
    outputs = len(together) * (GREEDY.max_tokens - 1)
    assert computed == len(SYSTEM) + sum(map(len, TAILS[:3])) + outputs


def test_a_fully_cached_prompt_computes_one_token_of_its_last_block(tiny):
    engine = make(tiny)
    one = {"a": (SYSTEM, GREEDY)}
    assert run(engine, one)[1] == {"a": 0}
    # 40 tokens are 5 blocks of 8, but one token must be computed
    assert run(engine, one)[1] == {"a": 32}
    engine.reset_prefix_cache()
    assert run(engine, one)[1] == {"a": 0}


def test_generated_blocks_are_found_by_the_next_turn(tiny, cold):
    engine = make(tiny)
    (answer,) = run(engine, {"a": (SYSTEM, GREEDY)})[0].values()
    turn = [*SYSTEM, *answer, *TAILS[1]]
    tokens, cached, _ = run(engine, {"b": (turn, GREEDY)})
    # the last answered token was never computed
    assert cached == {"b": (len(SYSTEM) + len(answer) - 1) // 8 * 8}
    assert tokens == run(cold, {"b": (turn, GREEDY)})[0]


def test_salted_and_uncached_requests_share_nothing(tiny):
    engine = make(tiny)
    salted = {
        salt: SamplingParams(temperature=0, max_tokens=2, cache_salt=salt) for salt in ("x", "y")
    }
    private = SamplingParams(temperature=0, max_tokens=2, enable_prefix_caching=False)
    plain = SamplingParams(temperature=0, max_tokens=2)
    shown = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    for request_id, params, hit in (
        ("private leaves nothing", private, 0),
        ("plain", plain, 0),
        ("plain again", plain, 32),
        ("private finds nothing", private, 0),
        ("x", salted["x"], 0),
        ("x again", salted["x"], 32),
        ("y", salted["y"], 0),
        ("prompt log-probabilities need every token", shown, 0),
    ):
        assert run(engine, {request_id: (SYSTEM, params)})[1] == {request_id: hit}, request_id


def test_the_least_recently_used_block_is_evicted_first(tiny):
    # a request of 72 + 12 tokens takes 6 and leaves 5 full ones
    engine = make(tiny, block_size=16, num_blocks=9)
    first, second = ({name: ([5 + i] * 72, GREEDY)} for i, name in enumerate("ab"))
    run(engine, first)
    assert len(idle_ids(engine.scheduler_state.pool)) == 5
    run(engine, second)  # takes the 4 that are empty and the first one's last 2
    assert run(engine, first)[1] == {"a": 3 * 16}


def test_freed_blocks_are_never_read(tiny, expected):
    """Every block without content holds NaN, in keys and values, whoever had it before."""
    engine = make(tiny, block_size=16, num_blocks=9)

    poisoned(engine)
    for name, params in (("greedy", GREEDY), ("drawn", DRAWN)):
        tokens, _, _ = run(engine, everyone(params))
        assert tokens == {request_id: expected[name, request_id] for request_id in everyone()}


def test_cached_tokens_are_reported_in_the_output(tiny):
    sizes = {"block_size": 8, "num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    llm = LLM(tiny, progress=False, token_buckets=(64,), **sizes)
    assert [
        out.num_cached_tokens for out in llm.generate([SYSTEM, SYSTEM], GREEDY, use_tqdm=False)
    ] == [0, 32]
    llm.reset_prefix_cache()
    assert llm.generate([SYSTEM], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize("salt", ["", 7])
def test_an_empty_salt_is_refused(salt):
    with pytest.raises(
        ValueError, match=r"cache_salt is .*; it must be None or a non-empty string"
    ):
        SamplingParams(cache_salt=salt)


def test_a_hash_depends_on_every_token_before():
    tokens = np.arange(20, dtype=np.int32)
    root = block_hashes.root(None, 4)
    whole = block_hashes.chain(root, tokens, 4)
    assert len(whole) == len(set(whole)) == 5
    assert block_hashes.chain(root, tokens[:11], 4) == whole[:2]
    assert block_hashes.chain(whole[1], tokens[8:], 4) == whole[2:]
    changed = tokens.copy()
    changed[5] = 99
    assert block_hashes.chain(root, changed, 4)[0] == whole[0]
    assert not set(block_hashes.chain(root, changed, 4)[1:]) & set(whole)
    assert not set(block_hashes.chain(block_hashes.root("salt", 4), tokens, 4)) & set(whole)
    assert not set(block_hashes.chain(block_hashes.root(None, 5), tokens, 5)) & set(whole)
    assert block_hashes.chain(root, tokens.astype(np.int64)[::1], 4) == whole

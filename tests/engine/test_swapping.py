"""Preemption by swapping: content leaves for host memory and comes back as it was, and no token
changes.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.device import cache
from pagedjax.device.host_swap import SwapPrograms, host_cache
from pagedjax.engine import runtime
from pagedjax.host import replay, scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.types import Admitted, Preempted, Request, Resumed, Sampled
from pagedjax.options.config import EngineConfig

PROMPTS = {
    str(n): np.random.default_rng(n).integers(3, 320, n).tolist() for n in (3, 9, 17, 24, 40)
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24, ignore_eos=True)


def make(tiny, **config):
    sizes = {
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": (64,),
    }
    swap = {"num_blocks": 10, "preemption": "swap", "swap_space_gib": 0.001}
    return LLM(tiny, progress=False, **(sizes | swap | config))


def run(llm, params, forks=()):
    """Every prompt to its end -> (tokens by id, events, tokens computed)."""
    for name, prompt in PROMPTS.items():
        llm.engine.add(name, prompt, params, forks=[f"{name}{fork}" for fork in forks])
    tokens: dict[str, list[int]] = {}
    events, computed = [], 0
    while llm.engine.has_work:
        result = llm.engine.step()
        scheduler.check(llm.engine.scheduler_state)
        events += result.events
        computed += result.plan.num_tokens
        for event in result.events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    tokens.setdefault(name, []).append(token)
    assert llm.engine.scheduler_state.pool.num_free == llm.engine.config.num_blocks
    return tokens, events, computed


@pytest.mark.default_cases("cold-in groups-greedy", "caching-in groups-drawn")
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("forks", [(), ("b", "c")], ids=["alone", "in groups"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "cold"])
def test_swapping_changes_no_token(tiny, params, forks, caching):
    roomy = run(make(tiny, num_blocks=128, enable_prefix_caching=caching), params, forks)
    again = run(make(tiny, preemption="recompute", enable_prefix_caching=caching), params, forks)
    swapping = make(tiny, enable_prefix_caching=caching)
    swapped = run(swapping, params, forks)
    assert roomy[0] == again[0] == swapped[0]
    assert not any(isinstance(event, Preempted) for event in roomy[1])
    gone = [event.request_id for event in swapped[1] if isinstance(event, Preempted)]
    assert len(gone) >= 3
    assert all(event.swapped for event in swapped[1] if isinstance(event, Preempted))
    assert sorted(gone) == sorted(
        event.request_id for event in swapped[1] if isinstance(event, Resumed)
    )
    assert len([event for event in swapped[1] if isinstance(event, Admitted)]) == len(PROMPTS)
    assert (
        swapping.engine.scheduler_state.host_pool.num_free
        == swapping.engine.scheduler_state.config.host_blocks
    )


def test_a_swapped_request_recomputes_no_token(tiny):
    once = sum(map(len, PROMPTS.values())) + 23 * len(PROMPTS)
    assert run(make(tiny, enable_prefix_caching=False), GREEDY)[2] == once
    assert run(make(tiny, preemption="recompute", enable_prefix_caching=False), GREEDY)[2] > once


def test_a_full_swap_space_falls_back_to_recomputing(tiny):
    size = make(tiny).engine.memory.block_bytes
    small = make(tiny, swap_space_gib=5.5 * size / 2**30)
    assert small.engine.scheduler_state.config.host_blocks == 5
    tokens, events, _ = run(small, GREEDY)
    assert tokens == run(make(tiny, num_blocks=128), GREEDY)[0]
    assert {event.swapped for event in events if isinstance(event, Preempted)} == {True, False}


def test_a_recording_with_swapping_replays(tiny, tmp_path):
    llm = make(tiny)
    llm.engine.record(tmp_path / "run.jsonl")
    run(llm, DRAWN, ("b",))
    llm.engine.record(None)
    report = replay.verify(tmp_path / "run.jsonl")
    assert report.identical
    assert report.preemptions >= 3


def test_a_swapped_request_can_be_cancelled(tiny):
    llm = make(tiny)
    for name, prompt in PROMPTS.items():
        llm.engine.add(name, prompt, GREEDY)
    away = []
    while not away:
        llm.engine.step()
        away = [seq.request_id for seq in llm.engine.scheduler_state.waiting if seq.blocks]
    (event,) = llm.engine.cancel(away[0])
    assert (event.request_id, event.reason) == (away[0], "abort")
    scheduler.check(llm.engine.scheduler_state)
    while llm.engine.has_work:
        llm.engine.step()
    assert (
        llm.engine.scheduler_state.host_pool.num_free
        == llm.engine.scheduler_state.config.host_blocks
    )


@pytest.mark.parametrize("pinned", [False, True], ids=["", "through pinned memory"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swapped_blocks_return_bit_identical(dtype, pinned):
    kv = cache.init(layers=2, blocks=9, block_size=4, kv_heads=2, head_dim=3, dtype=dtype)
    leaves, tree = jax.tree.flatten(kv)
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.standard_normal(leaf.shape) * 9, leaf.dtype) for leaf in leaves]
    before = [np.asarray(leaf).copy() for leaf in leaves]
    swap, host_pages = SwapPrograms(kv, batch=3, pinned=pinned), host_cache(kv, 7)
    device, host, target = (3, 1, 9, 4, 7), (2, 7, 1, 5, 3), (5, 9, 1, 2, 8)
    kv = jax.tree.unflatten(tree, leaves)
    swap.out(kv, host_pages, list(zip(device, host, strict=True)))
    blank = jax.tree.map(jnp.zeros_like, kv)
    blank_shapes = jax.eval_shape(lambda: kv)
    after = swap.back(blank, host_pages, list(zip(host, target, strict=True)))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, blank_shapes)
    for old, new in zip(before, jax.tree.leaves(after), strict=True):
        chex.assert_trees_all_equal(new[np.array(target)], old[np.array(device)])
        chex.assert_trees_all_equal(new[np.array([3, 4, 6, 7])], np.zeros_like(old[[3, 4, 6, 7]]))


def test_a_swap_space_below_one_block_is_refused(tiny):
    with pytest.raises(
        ValueError,
        match=r"preemption is 'swap', but swap_space_gib 0 does not hold one block of \d+",
    ):
        make(tiny, swap_space_gib=0)
    with pytest.raises(
        ValueError,
        match=r"preemption is 'swop'; it must be one of 'recompute', 'swap' \(did you mean",
    ):
        EngineConfig(preemption="swop")  # type: ignore[arg-type]


def test_a_policy_chooses_between_swapping_and_recomputing():
    """Here only sequences that hold three blocks are worth moving."""
    picky = FCFS._replace(name="picky", swap=lambda victims: len(victims[0].blocks) >= 3)
    state = scheduler.init(scheduler.SchedulerConfig(2, 6, 16, 4, 12, host_blocks=9))
    for name, prompt in (("a", 3), ("b", 1), ("c", 3)):
        state = scheduler.submit(state, Request(name, prompt, 8))
    swapped: dict[str, list[bool]] = {}
    held: dict[str, int] = {}
    while state.waiting or state.running.seqs:
        held |= {seq.request_id: len(seq.blocks) for seq in state.running.seqs}
        state, plan = scheduler.schedule(state, picky)
        for name in plan.preempted:
            swapped.setdefault(name, []).append(name in plan.swapped)
            assert (name in plan.swapped) == (held[name] >= 3)
        state, _ = scheduler.commit(state, plan, [0] * len(plan.seqs))
        scheduler.check(state)
    assert {True, False} <= {one for several in swapped.values() for one in several}


def test_a_swap_transfer_is_bounded_in_bytes(tiny, monkeypatch):
    made = []
    monkeypatch.setattr(runtime, "SwapPrograms", lambda cache, batch: made.append(batch))
    one = make(tiny).engine
    assert made == [one.runtime.shapes.table_width], "as many as there may be"
    monkeypatch.setattr(runtime, "SWAPPED_BYTES", 3 * one.memory.block_bytes + 1)
    make(tiny)
    monkeypatch.setattr(runtime, "SWAPPED_BYTES", 1)
    make(tiny)
    assert made[1:] == [3, 1]

"""Preemption by swapping: content leaves for host memory and comes back as it was, and no token
changes.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.device import cache
from pagedjax.device.host_swap import SwapPrograms, host_cache
from pagedjax.engine import runtime
from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS
from pagedjax.host.types import Admitted, Preempted, Request, Resumed
from pagedjax.options.config import EngineConfig
from tests.engine.runs import greedy, sampled, small_llm, steps
from tests.refusals import refused

PROMPTS = {
    str(n): np.random.default_rng(n).integers(3, 320, n).tolist() for n in (3, 9, 17, 24, 40)
}
GREEDY = greedy(24)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24, ignore_eos=True)


def make(tiny, **config):
    swap = {"num_blocks": 10, "preemption": "swap", "swap_space_gib": 0.001}
    return small_llm(tiny, **({"block_size": 8} | swap | config))


def run(llm, params, forks=()):
    """Every prompt to its end -> (tokens by id, events)."""
    for name, prompt in PROMPTS.items():
        llm.engine.add(name, prompt, params, forks=[f"{name}{fork}" for fork in forks])
    results = list(steps(llm.engine))
    events = [event for result in results for event in result.events]
    return sampled(results), events


def of_kind(events, kind: type) -> list:
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.default_cases("cold-in groups-greedy")
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("forks", [(), ("b", "c")], ids=["alone", "in groups"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "cold"])
def test_swapping_changes_no_token(tiny, params, forks, caching):
    options = {"enable_prefix_caching": caching}
    roomy = run(small_llm(tiny, **options), params, forks)  # the programs of `tiny_llm`
    recomputed = run(make(tiny, preemption="recompute", **options), params, forks)
    swapping = make(tiny, **options)
    tokens, events = run(swapping, params, forks)
    assert roomy[0] == recomputed[0] == tokens
    assert not of_kind(roomy[1], Preempted)
    preempted = of_kind(events, Preempted)
    assert len(preempted) >= 3
    assert all(event.swapped for event in preempted)
    resumed = [event.request_id for event in of_kind(events, Resumed)]
    assert sorted(resumed) == sorted(event.request_id for event in preempted)
    assert len(of_kind(events, Admitted)) == len(PROMPTS)


def test_a_full_swap_space_falls_back_to_recomputing(tiny):
    size = make(tiny).engine.memory.block_bytes
    small = make(tiny, swap_space_gib=5.5 * size / 2**30)
    assert small.engine.scheduler_state.config.host_blocks == 5
    tokens, events = run(small, GREEDY)
    assert tokens == run(small_llm(tiny), GREEDY)[0]
    assert {event.swapped for event in of_kind(events, Preempted)} == {True, False}


@pytest.mark.parametrize("pinned", [False, True], ids=["", "through pinned memory"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swapped_blocks_return_bit_identical(dtype, pinned):
    blank = cache.init(layers=2, blocks=9, block_size=4, kv_heads=2, head_dim=3, dtype=dtype)
    rng = np.random.default_rng(0)
    kv = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape) * 9, x.dtype), blank)
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(kv)]
    swap = SwapPrograms(kv, batch=3, pinned=pinned)
    host_pages = host_cache(kv, 7)
    device = (3, 1, 9, 4, 7)
    host = (2, 7, 1, 5, 3)
    target = (5, 9, 1, 2, 8)
    swap.out(kv, host_pages, list(zip(device, host, strict=True)))
    shapes = jax.eval_shape(lambda: kv)
    after = swap.back(blank, host_pages, list(zip(host, target, strict=True)))
    chex.assert_trees_all_equal_shapes_and_dtypes(after, shapes)
    for old, new in zip(before, jax.tree.leaves(after), strict=True):
        chex.assert_trees_all_equal(new[np.array(target)], old[np.array(device)])
        chex.assert_trees_all_equal(new[np.array([3, 4, 6, 7])], np.zeros_like(old[[3, 4, 6, 7]]))


def test_a_swap_space_below_one_block_is_refused(tiny):
    with refused(r"preemption is 'swap', but swap_space_gib 0 does not hold one block of \d+"):
        make(tiny, swap_space_gib=0)
    with refused(r"preemption is 'swop'; it must be one of 'recompute', 'swap' \(did you mean"):
        EngineConfig(preemption="swop")  # type: ignore[arg-type]


def test_a_policy_chooses_between_swapping_and_recomputing():
    """Here only sequences that hold three blocks are worth moving."""
    picky = FCFS._replace(name="picky", swap=lambda victims: len(victims[0].blocks) >= 3)
    state = scheduler.init(
        scheduler.SchedulerConfig(
            block_size=2,
            num_blocks=6,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            max_model_len=12,
            host_blocks=9,
        )
    )
    for name, prompt in (("a", 3), ("b", 1), ("c", 3)):
        state = scheduler.submit(state, Request(name, prompt, 8))
    swapped = []
    blocks: dict[str, int] = {}
    while state.waiting or state.running.seqs:
        blocks |= {seq.request_id: len(seq.blocks) for seq in state.running.seqs}
        state, plan = scheduler.schedule(state, picky)
        for name in plan.preempted:
            swapped.append(name in plan.swapped)
            assert swapped[-1] == (blocks[name] >= 3)
        state, _ = scheduler.commit(state, plan, [0] * len(plan.seqs))
        scheduler.check(state)
    assert set(swapped) == {True, False}


def test_a_swap_transfer_is_bounded_in_bytes(tiny, monkeypatch):
    batches = []
    monkeypatch.setattr(runtime, "SwapPrograms", lambda cache, batch: batches.append(batch))
    engine = make(tiny).engine
    assert batches == [engine.runtime.shapes.table_width], "as many as there may be"
    monkeypatch.setattr(runtime, "SWAPPED_BYTES", 3 * engine.memory.block_bytes + 1)
    make(tiny)
    monkeypatch.setattr(runtime, "SWAPPED_BYTES", 1)
    make(tiny)
    assert batches[1:] == [3, 1]

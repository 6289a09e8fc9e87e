"""The policy `longest_prefix` in whole runs: its order of admission, its bound, its recordings."""

from __future__ import annotations

import random
from collections import Counter

from pagedjax.host import scheduler
from pagedjax.host.policies import LONGEST_PREFIX, RATE
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Request, Seq
from tests.host.scheduler_steps import WORD


def shared(name: str, prompt_len: int, blocks: int, max_tokens: int = 4) -> Request:
    """A request whose first `blocks` full blocks are those of every other request; its other blocks
    are its own.
    """
    hashes = tuple(f"all {i}" if i < blocks else f"{name} {i}" for i in range(prompt_len // 4))
    return Request(name, prompt_len, max_tokens, hashes=hashes)


def brute_force(state: SchedulerState, seq: Seq) -> int:
    """Returns the number of cached tokens of a waiting sequence, counted block by block."""
    size = state.config.block_size
    number = 0
    if seq.blocks:
        return seq.computed
    while number < (seq.length - 1) // size and seq.hashes[number : number + 1]:
        if seq.hashes[number] not in state.pool.contents:
            break
        number += 1
    return number * size


def run(config: SchedulerConfig, requests: list[Request], draw: random.Random) -> Counter[str]:
    """Submits with steps between and runs to the end; checks the order of each admission -> a
    tally.
    """
    state = scheduler.init(config)
    unsubmitted = requests[::-1]
    tally = Counter()
    for _ in range(64 * 32 * len(requests)):
        while unsubmitted and draw.random() < 0.5:
            state = scheduler.submit(state, unsubmitted.pop())
        before = {seq.request_id: seq for seq in state.waiting}
        state, plan = scheduler.schedule(state, LONGEST_PREFIX)
        for name in plan.admitted:
            arrival = before.pop(name).arrival
            oldest = min((seq.arrival for seq in before.values()), default=arrival)
            assert arrival - oldest < config.max_model_len / RATE, (
                "a request was overtaken from too far behind"
            )
            tally["overtook"] += arrival > oldest
        state, events = scheduler.commit(state, plan, [WORD] * len(plan.seqs))
        scheduler.check(state)
        tally.update(type(event).__name__ for event in events)
        tally["cached"] += sum(plan.cached) > 0
        if not (unsubmitted or state.waiting or state.running.seqs):
            break
    else:
        raise AssertionError("does not end")
    assert tally["Finished"] == len(requests)
    return tally


def test_many_requests_with_shared_prefixes_overtake_within_the_bound_and_end():
    draw = random.Random(0)
    tally = Counter()
    for _ in range(6):
        requests = [
            shared(str(i), draw.randint(1, 60), draw.randint(0, 15), draw.randint(1, 40))
            for i in range(40)
        ]
        tally += run(SchedulerConfig(4, 26, 16, 4, 100, draw.choice([0, 10])), requests, draw)
    assert min(tally[name] for name in ("cached", "overtook", "Preempted", "Resumed")) >= 20, tally


def test_the_first_admitted_has_the_least_key():
    """`RATE * arrival - cached` by brute force, in steps that change nothing else before
    admission.
    """
    draw = random.Random(0)
    checked = 0
    state = scheduler.init(SchedulerConfig(4, 48, 24, 3, 100, 10))
    for _ in range(1_000):
        while len(state.waiting) < 6:
            request = shared(
                str(state.arrivals), draw.randint(1, 60), draw.randint(0, 15), draw.randint(1, 20)
            )
            state = scheduler.submit(state, request)
        line = sorted(
            state.waiting,
            key=lambda seq: (RATE * seq.arrival - brute_force(state, seq), seq.arrival),
        )
        # a decode may evict a block before admission
        full = any(computed % 4 == 0 for computed in state.running.computed)
        state, plan = scheduler.schedule(state, LONGEST_PREFIX)
        if plan.admitted and not full:
            assert plan.admitted[0] == line[0].request_id
            checked += line[0].arrival > min(seq.arrival for seq in line)
        state, _ = scheduler.commit(state, plan, [WORD] * len(plan.seqs))
    assert checked > 20, "no request was admitted before an earlier one"

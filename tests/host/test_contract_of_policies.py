"""What a policy is given, what it may return, and that it is pure."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import pytest

from experiments.core import config
from pagedjax.host import policies, purity, scheduler
from pagedjax.host.policies import FCFS, Policy
from pagedjax.host.scheduler import SchedulerState
from pagedjax.host.types import Request, Seq
from pagedjax.options.own_errors import LIBRARIES
from pagedjax.options.purity import Impure
from tests.host.scheduler_steps import WORD, request, start, step
from tests.refusals import refused

Order = Callable[..., Sequence[Seq]]


def with_order(order: Order) -> Policy:
    return FCFS._replace(name="mine", order=order)


def busy() -> SchedulerState:
    """`a` runs and has two tokens more than when it entered; `b` waits."""
    state, *_ = step(start(request("a", 3), num_blocks=8))
    state, *_ = step(state)
    return scheduler.submit(state, request("b", 2))


def test_order_and_preempt_get_current_records_of_running_sequences():
    lengths: list[tuple[int, int]] = []

    def order(waiting, running, cached):
        assert len(running.seqs) == 1
        lengths.append((running.seqs[0].length, running.seqs[0].computed))
        lengths.extend((seq.length, seq.computed) for seq in running.seqs)
        assert lengths[-1] == (running.lengths[0], running.computed[0])
        return waiting

    def preempt(running):
        lengths.append((running[0].length, running[0].computed))
        return running[-1]

    policy = Policy("mine", order, FCFS.admit, preempt)
    state = busy()
    step(state, policy=policy)
    assert lengths == [(5, 4)] * 2
    lengths.clear()
    crowded, *_ = step(start(request("a", 4, 4), request("b", 4, 4), num_blocks=2))
    step(crowded, policy=policy)
    assert lengths == [(5, 4)]


REMEDY = "return the waiting sequences in an order, or some of them, each once"


@pytest.mark.parametrize(
    ("order", "returned"),
    [
        (lambda waiting, running, cached: None, "None"),
        (lambda waiting, running, cached: 3, "3"),
        (lambda waiting, running, cached: ["b"], "'b', which does not wait"),
        (lambda waiting, running, cached: running.seqs, "Seq(request=Request(request_id='a'"),
        (lambda waiting, running, cached: waiting * 2, "Seq(request=Request(request_id='b'"),
        (lambda waiting, running, cached: [waiting[0]._replace(length=1)], "Seq(request=Request("),
    ],
    ids=["None", "a number", "names", "running ones", "twice", "changed ones"],
)
def test_an_order_that_returns_anything_else_is_told_what_it_returned(order, returned):
    state = busy()
    message = f"order of the policy 'mine' returned {returned}"
    with refused(f"^{re.escape(message)}.*; {REMEDY}$"):
        scheduler.schedule(state, with_order(order))
    scheduler.check(state)


@pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "iterator"])
def test_an_order_may_return_any_iterable_of_some_of_them(kind):
    state = scheduler.submit(busy(), request("c", 2))
    _, plan, _ = step(state, policy=with_order(lambda waiting, *_: kind(waiting[1:])))
    assert plan.admitted == ("c",)


def test_a_plan_is_committed_once_to_the_state_that_schedule_returned_with_it():
    state, plan = scheduler.schedule(busy(), FCFS)
    after, _ = scheduler.commit(state, plan, [WORD] * len(plan.seqs))
    message = (
        "^the plan is of step 2 and the state is at step 3; commit a plan once, to the state that "
        "schedule returned with it$"
    )
    with refused(message):
        scheduler.commit(after, plan, [WORD] * len(plan.seqs))
    younger = start(Request("a", 3, 8))
    with refused(r"^the plan is of step 2 and the state is at step 0;"):
        scheduler.commit(younger, plan, [WORD] * len(plan.seqs))


# --- purity ---------------------------------------------------------------------------------------

CALLS: list[int] = []
count = 0


def appends(waiting, running, cached):
    CALLS.append(1)
    return waiting


def counts(waiting, running, cached):
    global count
    count += 1
    return waiting


def draws(waiting, running, cached):
    return sorted(waiting, key=lambda seq: random.random())


def with_variable() -> Order:
    calls = 0

    def order(waiting, running, cached):
        nonlocal calls
        calls += 1
        return waiting

    return order


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, waiting, running, cached):
        self.calls += 1
        return waiting


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (with_order(appends), "order of the policy 'mine' changes the global CALLS, so that"),
        (with_order(counts), "order of the policy 'mine' changes the global count, so that"),
        (with_order(with_variable()), "order of the policy 'mine' changes the variable calls"),
        (with_order(Counter()), "order of the policy 'mine' changes an attribute of its object"),
        (with_order(draws), r"order of the policy 'mine' returned \(r.*\) and then \(r.*\) for"),
        (
            policies.by_key("mine", lambda seq: CALLS.append(seq.arrival) or seq.arrival),
            "order of the policy 'mine' changes the global CALLS",
        ),
        (
            FCFS._replace(name="mine", preempt=lambda running: random.choice(running)),
            "preempt of the policy 'mine' returned r. and then r. for",
        ),
        (
            FCFS._replace(name="mine", admit=lambda *_: CALLS.append(1) is None),
            "admit of the policy 'mine' changes the global CALLS",
        ),
    ],
    ids=["append", "global", "closure", "object", "random", "key", "preempt", "admit"],
)
def test_a_policy_that_keeps_something_between_calls_is_refused(policy, message):
    random.seed(0)
    with pytest.raises(Impure, match=f"^{message}"):
        purity.check(policy)


def test_what_a_library_keeps_is_not_what_the_policy_keeps(monkeypatch):
    """A cache of an installed module, for example."""
    text = "calls = 0\ndef age(seq):\n    global calls\n    calls += 1\n    return seq.arrival\n"
    library = {"__name__": "library"}
    exec(compile(text, f"{LIBRARIES[0]}library.py", "exec"), library)
    monkeypatch.setitem(globals(), "age_of_library", library["age"])
    purity.check(with_order(lambda waiting, running, cached: sorted(waiting, key=library["age"])))
    assert library["calls"] > 0


def fails(waiting, running, cached):
    raise KeyError("this policy needs users of another form")


@pytest.mark.parametrize("policy", policies.POLICIES.values(), ids=policies.POLICIES)
def test_every_built_in_policy_is_pure(policy):
    purity.check(policy)


def test_a_policy_that_fails_on_the_requests_of_the_check_is_not_refused():
    purity.check(with_order(fails))


def test_an_experiment_refuses_a_policy_that_is_not_pure_before_anything_runs(tmp_path):
    (tmp_path / "leaky.py").write_text(
        "from pagedjax.policies import by_key\n"
        "SEEN = []\n"
        "LEAKY = by_key('leaky', lambda seq: (SEEN.append(1), seq.arrival)[1])\n"
    )
    (tmp_path / "leaky.yaml").write_text(
        "name: leaky\n"
        "engine: {policy: 'leaky.py:LEAKY'}\n"
        "workload: {kind: synthetic, count: 2, prompt: {dist: fixed, value: 8}, "
        "output: {dist: fixed, value: 8}}\n"
    )
    with refused(
        r"^engine\.policy is '.*leaky\.py:LEAKY': order of the policy 'leaky' changes the "
        r"global SEEN, so that equal runs would differ; let it depend on its arguments alone$"
    ):
        config.load(tmp_path / "leaky.yaml")


# --- oracles --------------------------------------------------------------------------------------


def longest(seq):
    return max(seq.limit, 1)


@pytest.mark.parametrize(
    ("policy", "reads"),
    [
        *((policy, False) for policy in policies.POLICIES.values()),
        (policies.by_key("mine", lambda seq: seq.limit), True),
        (policies.by_key("mine", longest), True),
        (policies.by_key("mine", lambda seq: longest(seq)), True),
        (with_order(lambda waiting, *_: sorted(waiting, key=lambda s: s.request.max_tokens)), True),
        (policies.by_key("mine", lambda seq: seq.length), False),
        (FCFS._replace(preempt=lambda running: max(running, key=longest)), True),
        (with_order(Counter()), False),
    ],
)
def test_a_policy_that_reads_how_long_a_request_can_become_is_known(policy, reads):
    assert purity.reads_limits(policy) == reads

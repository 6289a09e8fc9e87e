"""The promises of each policy: its order, its victim, and how many later requests can come before a
request.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import strategies as st

from pagedjax import LLM, SamplingParams
from pagedjax.commands.cli import main
from pagedjax.host import purity, scheduler, views
from pagedjax.host.policies import (
    FAIR,
    FCFS,
    LONGEST_PREFIX,
    PRIORITY,
    RATE,
    SHORTEST,
    WINDOW,
    Cached,
    Policy,
    by_key,
    find,
)
from pagedjax.host.replay import replay, verify
from pagedjax.host.scheduler import SchedulerConfig, SchedulerState
from pagedjax.host.types import Finished, Request, Running, Seq
from pagedjax.options.config import EngineConfig, Reservation
from pagedjax.options.own_errors import OwnError
from tests import drawn
from tests.host import drawn_views
from tests.host.scheduler_steps import EOS, WITHOUT_MEMORY, WORD, names, start

STRICT_PRIORITY = by_key("strict", lambda seq: seq.request.priority)
STRICT_SHORTEST = by_key("strict", lambda seq: seq.request.prompt_len)
RANDOM = FCFS._replace(
    name="random",
    order=lambda waiting, running, cached: random.sample(waiting, len(waiting)),
)


def ask(
    name: str, prompt_len: int = 1, max_tokens: int = 8, priority: int = 0, user: str = ""
) -> Request:
    return Request(name, prompt_len, max_tokens, 0, frozenset({EOS}), priority, user)


def with_hashes(request: Request, count: int, name: str) -> Request:
    """The request with hashes of its first blocks; equal names are equal blocks."""
    return request._replace(hashes=tuple(f"{name} {i}" for i in range(count)))


def queue(*requests: Request) -> tuple[Seq, ...]:
    return start(*requests, model_len=2000, num_blocks=2000).waiting


def order(
    policy: Policy,
    waiting: Iterable[Seq],
    running: Iterable[Seq] = (),
    cached: Cached = lambda seq: 0,
) -> str:
    """The names in the order of admission, for any order of the queue."""
    seqs = tuple(running)
    waiting = tuple(waiting)
    active = Running(seqs, tuple(seq.length for seq in seqs), (0,) * len(seqs))
    ordered = names(policy.order(waiting, active, cached))
    assert policy is FCFS or ordered == names(policy.order(waiting[::-1], active, cached))
    return "".join(ordered)


def step(
    state: SchedulerState, policy: Policy, token: int = WORD
) -> tuple[SchedulerState, scheduler.Plan, list[str]]:
    """One whole step -> (state, plan, ids that ended)."""
    state, plan = scheduler.schedule(state, policy)
    state, events = scheduler.commit(state, plan, [token] * len(plan.seqs))
    scheduler.check(state)
    return state, plan, [event.request_id for event in events if isinstance(event, Finished)]


def alive(state: SchedulerState) -> tuple[Seq, ...]:
    return state.waiting + scheduler.running(state)


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "requests", "expected"),
    [
        (FCFS, [ask("a", 9), ask("b", 1, priority=-5), ask("c")], "abc"),
        (PRIORITY, [ask("a", priority=1), ask("b"), ask("c", priority=-1), ask("d")], "cbda"),
        (SHORTEST, [ask("a", 300), ask("b", 100), ask("c", 200), ask("d", 40)], "dbca"),
        # one arrival is worth RATE tokens of a prompt
        (SHORTEST, [ask("a", 1 + RATE), ask("b", 2), ask("c", 1)], "abc"),
        (SHORTEST, [ask("a", 2 + RATE), ask("b", 1), ask("c", 1)], "bac"),
        (FAIR, [ask(name, 9 - i) for i, name in enumerate("abcdef")], "abcdef"),
    ],
)
def test_the_order_of_a_policy(policy, requests, expected):
    assert order(policy, queue(*requests)) == expected


def test_one_priority_level_is_worth_window_arrivals():
    first, *later = queue(ask("a", priority=1), ask("b"), ask("c"))
    young, old = (seq._replace(arrival=WINDOW + i) for seq, i in zip(later, (-1, 0), strict=True))
    assert order(PRIORITY, (first, young, old)) == "bac"  # equal keys: the earlier arrival


def test_generated_tokens_do_not_change_the_order_of_shortest():
    first, *later = queue(ask("a", 2), ask("b", 2))
    assert order(SHORTEST, (first._replace(length=60), *later)) == "ab"


@pytest.fixture
def greedy_and_modest() -> tuple[Seq, ...]:
    return queue(
        *(ask(name, 10, user="greedy") for name in "abc"),
        *(ask(name, 4, user="modest") for name in "xyz"),
    )


def test_fair_alternates_users_by_tokens_and_keeps_each_users_order(greedy_and_modest):
    # 0 and 0, then modest at 4, at 8; greedy at 10 and at 20
    assert order(FAIR, greedy_and_modest) == "axyzbc"


def test_fair_counts_the_current_tokens_of_running_sequences():
    run, a, x = queue(ask("r", 3, user="one"), ask("a", user="one"), ask("x", user="two"))
    assert order(FAIR, (a, x)) == "ax"
    assert order(FAIR, (a, x), [run]) == "xa"
    # the column counts, not the record, which is some steps old
    active = Running((run,), (9,), (8,))
    y, b = (seq._replace(length=5, arrival=5 + i) for i, seq in enumerate((x, a)))
    assert names(FAIR.order((a, x, y, b), active, len)) == ["x", "x", "a", "a"]


@pytest.mark.parametrize(
    ("cached_tokens", "expected"),
    [
        ({"b": 3 * RATE, "c": 9 * RATE, "d": 9 * RATE}, "cdba"),
        ({}, "abcd"),
        # an arrival is worth RATE cached tokens
        ({"b": RATE}, "abcd"),
        ({"b": RATE + 1}, "bacd"),
    ],
)
def test_the_longest_cached_prefix_is_first(cached_tokens, expected):
    waiting = queue(*(ask(name, 30) for name in "abcd"))
    cached = lambda seq: cached_tokens.get(seq.request_id, 0)  # noqa: E731
    assert order(LONGEST_PREFIX, waiting, cached=cached) == expected


# --- preemption -----------------------------------------------------------------------------------


def test_fair_preempts_the_latest_request_of_the_user_with_most_tokens(greedy_and_modest):
    assert FAIR.preempt(greedy_and_modest).request_id == "c"


drawn_seqs = st.lists(
    st.tuples(st.integers(1, 200), st.integers(0, 50), st.integers(-3, 3), st.sampled_from("xyz")),
    min_size=1,
    max_size=12,
)


@drawn.given(20, 50, rows=drawn_seqs)
def test_the_victim_is_the_last_in_order(rows: list[tuple[int, int, int, str]]):
    seqs = tuple(
        Seq(ask(str(i), prompt, 51, priority, user), i, prompt + 51, prompt + output)
        for i, (prompt, output, priority, user) in enumerate(rows)
    )
    for policy in WITHOUT_MEMORY.values():
        last = policy.order(seqs, Running(), lambda seq: 0)[-1]
        assert policy.preempt(seqs) == last, policy.name


# --- no starvation --------------------------------------------------------------------------------

Stream = Callable[[int], Request]  # the number of an arrival -> the request


def push_back(policy: Policy, victim: Request, stream: Stream, num_before: int = 0) -> int:
    """Number of later requests admitted before `victim`, with a queue that is never empty and two
    running.

    `num_before` requests of the stream arrive before the victim. Returns 600 if the victim is not
    admitted in as many steps.
    """
    state = start(*map(stream, range(num_before)), victim, num_blocks=256, seqs=2, model_len=512)
    number = num_before
    admitted = list[str]()
    for _ in range(600):
        while len(state.waiting) < 8:
            state = scheduler.submit(state, stream(number))
            number = number + 1
        state, plan, _ = step(state, policy)
        admitted += plan.admitted
        if victim.request_id in plan.admitted:
            return sum(
                int(name) >= num_before for name in admitted[: admitted.index(victim.request_id)]
            )
    return 600


@pytest.mark.parametrize(
    ("policy", "strict", "victim", "bound"),
    [
        (PRIORITY, STRICT_PRIORITY, ask("victim", priority=1), WINDOW),
        (PRIORITY, STRICT_PRIORITY, ask("victim", priority=3), 3 * WINDOW),
        (SHORTEST, STRICT_SHORTEST, ask("victim", 40), math.ceil(39 / RATE)),
        (SHORTEST, STRICT_SHORTEST, ask("victim", 400), math.ceil(399 / RATE)),
    ],
)
def test_an_endless_stream_of_small_requests_overtakes_a_bounded_number_of_times(
    policy, strict, victim, bound
):
    """They are urgent and short. A policy without ageing never admits the victim."""
    small = lambda i: ask(str(i), max_tokens=1)  # noqa: E731
    assert push_back(policy, victim, small) == bound - 1
    assert push_back(strict, victim, small) == 600


def test_an_endless_stream_of_cached_prefixes_overtakes_a_bounded_number_of_times():
    prompt = 200
    victim = ask("victim", 9)
    cached = lambda i: with_hashes(ask(str(i), prompt, max_tokens=1), prompt // 4, "shared")  # noqa: E731
    strict = LONGEST_PREFIX._replace(
        order=lambda waiting, _, cached: sorted(waiting, key=lambda seq: -cached(seq))
    )
    assert 0 < push_back(LONGEST_PREFIX, victim, cached, num_before=3) <= prompt / RATE
    assert push_back(strict, victim, cached, num_before=3) == 600


def test_fair_admits_another_user_before_the_queue_of_a_greedy_one():
    """As soon as one request of the greedy user runs, the other user is next."""
    victim = ask("victim", user="modest")
    greedy = lambda i: ask(str(i), 3, 1 + i % 7, user="greedy")  # noqa: E731
    state = start(*map(greedy, range(300)), seqs=4, num_blocks=256)
    for _ in range(9):
        state, *_ = step(state, FAIR)
    state = scheduler.submit(state, victim)
    waits = {}
    for policy in (FAIR, FCFS):
        branch_state = state
        passed = list[str]()
        while "victim" not in passed:
            branch_state, plan, _ = step(branch_state, policy)
            passed += plan.admitted
        waits[policy.name] = passed.index("victim")
    assert waits["fair"] == 0 < 250 < waits["fcfs"]


def test_new_users_do_not_overtake_a_user_without_running_requests():
    """Without arrival as the tie-breaker they would overtake it: every new user has no tokens."""
    victim = ask("victim", user="user z")
    newcomers = lambda i: ask(str(i), 2, 3, user=f"user {i}")  # noqa: E731
    by_name = FAIR._replace(
        order=lambda waiting, running, cached: sorted(
            waiting, key=lambda seq: (seq.request.user, seq.arrival)
        )
    )
    assert push_back(FAIR, victim, newcomers, num_before=9) == 0
    assert push_back(by_name, victim, newcomers, num_before=9) == 600


def test_new_users_overtake_a_second_request_only_while_the_first_is_unfinished():
    state = start(ask("first", 1, 30, user="z"), ask("second", user="z"), seqs=2, model_len=64)
    ended = False
    for number in range(100):
        for i in range(2):
            state = scheduler.submit(state, ask(f"{number} {i}", 1, 2, user=f"user {number} {i}"))
        state, plan, finished = step(state, FAIR)
        if ended:
            assert plan.admitted[0] == "second"
            return
        ended = "first" in finished
    raise AssertionError("starved")


# --- any workload ---------------------------------------------------------------------------------

workloads = st.lists(
    st.tuples(
        st.integers(1, 16),
        st.integers(1, 16),
        st.integers(-2, 2),
        st.sampled_from("xyz"),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)
sizes = {
    "block_size": st.integers(1, 4),
    "num_blocks": st.integers(1, 10),
    "max_num_batched_tokens": st.integers(1, 12),
    "max_num_seqs": st.integers(1, 5),
    "max_model_len": st.just(32),
    "host_blocks": st.sampled_from([0, 3, 20]),
}
# hypothesis would draw every field that is not given
usual = {
    name: st.just(value)
    for name, value in SchedulerConfig._field_defaults.items()
    if name not in sizes
}
usual["views"] = drawn_views.any_groups
ways = {
    "chunked_prefill": st.booleans(),
    "mixed_steps": st.booleans(),
    "reservation": st.sampled_from(get_args(Reservation)),
    "views": st.just(()),
    "prefix_checkpoints": st.none(),
    "late_stops": st.just(False),
    "empty_blocks": st.just(0),
}
configs = drawn_views.with_checkpoints(st.builds(SchedulerConfig, **sizes, **usual))
baselines = st.builds(SchedulerConfig, **sizes, **ways)


def roomy(config: SchedulerConfig) -> SchedulerConfig:
    """With blocks for any single request, and a budget for its whole prompt if prompts must not be
    cut.
    """
    need = -(-config.max_model_len // config.block_size)
    budget = config.max_num_batched_tokens
    need = need if config.reservation == "none" else 1 << (need - 1).bit_length()
    need = (
        views.smallest_pool(config, Request("longest", 1, 31), config.max_model_len)
        if config.views
        else need
    )
    budget += 0 if config.chunked_prefill else config.max_model_len
    return config._replace(num_blocks=max(config.num_blocks, need), max_num_batched_tokens=budget)


def rank(policy: Policy, state: SchedulerState) -> list[int]:
    """Arrivals of all unfinished requests in the order of the policy, as if all were waiting."""
    line = tuple(sorted(alive(state), key=lambda seq: seq.arrival))
    # these requests have no hashes
    return [seq.arrival for seq in policy.order(line, Running(), lambda seq: 0)]


def drive(
    policy: Policy, config: SchedulerConfig, workload: list[tuple[int, int, int, str, bool]]
) -> int:
    """Submits with steps between, runs to the end and checks the rules -> number of preemptions."""
    config = roomy(config)
    state = scheduler.init(config)
    preempted = 0
    remaining = list(enumerate(workload))
    steps = 2 * 32 * (len(workload) + 1) + len(workload)
    if not config.mixed_steps:  # every second step, or after all that can be admitted before it
        steps *= 2 if config.chunked_prefill else 1 + len(workload)
    still: list[str] = []  # the first in order, if it made no progress in the step before
    while remaining or alive(state):
        assert steps > 0, "does not end"
        steps -= 1
        while remaining:
            i, (prompt, output, priority, user, last) = remaining.pop(0)
            state = scheduler.submit(state, ask(str(i), prompt, output, priority, user))
            if last:
                break
        before = rank(policy, state)
        ran = {seq.arrival for seq in scheduler.running(state)}
        state, plan, _ = step(state, policy)
        preempted += len(plan.preempted)

        waited = [str(arrival) for arrival in before if arrival not in ran]
        stayed = [str(arrival) for arrival in before if arrival in ran]
        assert plan.admitted == tuple(waited[: len(plan.admitted)]), "a request was overtaken"
        assert plan.preempted == tuple(stayed[::-1][: len(plan.preempted)]), (
            "another request than the last in order was preempted"
        )
        stands = [name for name in stayed[:1] if name not in names(plan.seqs)]
        assert not (stands and config.mixed_steps), "the first in order made no progress"
        if config.chunked_prefill:
            assert not stands or stands != still, "the first in order made no progress twice"
            still = stands
        else:
            assert not stands or plan.admitted, (
                "the first in order made no progress without a reason"
            )
    assert state.pool.num_free == config.num_blocks
    return preempted


@drawn.examples(10, 80)
@pytest.mark.parametrize("modes", [configs, baselines], ids=["usual", "baselines"])
@pytest.mark.parametrize("policy", WITHOUT_MEMORY.values(), ids=WITHOUT_MEMORY)
def test_random_workloads_end_and_the_first_in_order_always_advances(
    policy: Policy, modes, number: int
):
    def holds(config: SchedulerConfig, workload) -> None:
        drive(policy, config, workload)

    drawn.check(number, holds, config=modes, workload=workloads)


@pytest.mark.parametrize("modes", [(True, True), (True, False), (False, True), (False, False)])
def test_many_requests_end_in_a_pool_that_is_too_small(modes: tuple[bool, bool]):
    """modes: chunked_prefill and mixed_steps."""
    draw = random.Random(0)
    config = SchedulerConfig(2, 16, 12, 6, 32, 0, *modes)
    for policy in WITHOUT_MEMORY.values():
        preempted = 0
        for _ in range(4):
            crowd = [
                (draw.randint(1, 9), 16, draw.randint(-2, 2), draw.choice("xyz"), i % 3 == 0)
                for i in range(14)
            ]
            preempted += drive(policy, config, crowd)
        assert preempted >= 10, f"{policy.name}: too few preemptions"


@drawn.examples(30, 160)
def test_a_finite_workload_ends_under_a_random_policy(number: int):
    """Each step leaves a sequence that computes, and what it generated survives a preemption."""

    def holds(config: SchedulerConfig, workload, seed: int) -> None:
        draw = random.Random(seed)
        moody = Policy(
            "moody",
            order=lambda waiting, running, cached: draw.sample(waiting, len(waiting)),
            admit=lambda seq, need, free: True,
            preempt=draw.choice,
        )
        config = roomy(config)
        state = scheduler.init(config)
        for i, (prompt, output, priority, user, _) in enumerate(workload):
            state = scheduler.submit(state, ask(str(i), prompt, output, priority, user))
        steps_left = (
            sum(output for _, output, *_ in workload) * 32
        )  # a token every 32 steps at least
        steps_left *= 1 if config.mixed_steps else 2  # chunks and decodes take turns
        while alive(state):
            state, *_ = step(state, moody)
            steps_left -= 1
            assert steps_left >= 0, "does not end"

    modes = st.one_of(configs, baselines)
    drawn.check(number, holds, config=modes, workload=workloads, seed=st.integers(0, 2**16))


@pytest.mark.parametrize(
    ("policy", "chunked", "mixed"),
    [
        *((policy, True, True) for policy in WITHOUT_MEMORY.values()),
        (FCFS, True, False),
        (FAIR, False, False),
    ],
    ids=[*WITHOUT_MEMORY, "fcfs by turns", "fair with whole prompts first"],
)
def test_branches_end_in_a_pool_that_is_too_small(policy: Policy, chunked: bool, mixed: bool):
    """All branches of a victim are preempted, even the first in order."""
    draw = random.Random(0)
    preempted = 0
    for _ in range(5):
        config = SchedulerConfig(2, 16, 12, 6, 32, chunked_prefill=chunked, mixed_steps=mixed)
        state = scheduler.init(roomy(config))
        for i in range(8):
            forks = tuple(f"{i} {k}" for k in range(draw.randint(0, 3)))
            request = ask(str(i), draw.randint(1, 9), 16, draw.randint(-2, 2), draw.choice("xyz"))
            state = scheduler.submit(state, request._replace(forks=forks))
        steps_left = state.arrivals * 16 * 32
        while alive(state):
            state, plan, _ = step(state, policy)
            preempted = preempted + len(plan.preempted)
            steps_left = steps_left - 1
            assert steps_left >= 0, "does not end"
    assert preempted >= 25, "too few preemptions"


# --- the example of docs/design/policies.md -------------------------------------------------------


@pytest.fixture
def documented(documented_file) -> Path:
    return documented_file("policies.md", "least_work.py")


def test_the_documented_policy_orders_and_ends_all_requests(documented):
    least_work = find(f"{documented}:LEAST_WORK")
    assert order(least_work, queue(ask("a", 10, 600), ask("b", 200, 10), ask("c", 1, 2))) == "cba"
    sizes = SchedulerConfig(2, 16, 8, 4, 32)
    drive(least_work, sizes, [(1 + i % 9, 16 - i, 0, "x", bool(i % 2)) for i in range(14)])


@pytest.mark.slow
def test_the_documented_policy_runs_in_an_engine_and_its_recording_replays(
    documented, tiny, tmp_path, capsys
):
    name = f"{documented}:LEAST_WORK"
    # of tiny_llm: its programs
    sizes = {"max_num_seqs": 8, "num_blocks": 256, "max_num_batched_tokens": 64}
    llm = LLM(tiny, progress=False, policy=name, token_buckets=(8, 64), **sizes)
    llm.engine.record(tmp_path / "run.jsonl")
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in (2, 30, 3)]
    llm.generate([[20, 30], [40, 50], [60]], params, use_tqdm=False)
    llm.engine.record(None)
    first = [
        t.plan.admitted
        for t in replay(tmp_path / "run.jsonl", {"least_work": find(name)})
        if t.plan
    ]
    assert [ids for ids in first if ids] == [("0", "2", "1")]
    assert main(["replay", str(tmp_path / "run.jsonl"), "--policy", name]) == 0
    assert main(["replay", str(tmp_path / "run.jsonl")]) != 0
    error = capsys.readouterr().err
    assert "names the policy 'least_work'" in error
    assert f"a recording runs no file, so add --policy {name}" in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fcsf", "policy is 'fcsf'; .*did you mean 'fcfs'"),
        ("nowhere.py:MINE", "there is no file nowhere.py; write one of fcfs, "),
        ("no_such_module:MINE", "no_such_module cannot be imported"),
        (
            "pagedjax.host.policies:WINDOW",
            "WINDOW in pagedjax.host.policies is no Policy; those in it: .*'FCFS'",
        ),
        (FCFS._replace(admit=max), "'fcfs' calls itself 'fcfs', which is another one; rename it"),
        (":FCFS", "policy is ':FCFS'; write one of"),
    ],
)
def test_a_missing_or_invalid_policy_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find(EngineConfig(policy=name).policy)


def test_a_policy_whose_order_takes_other_arguments_is_refused(tmp_path):
    """As every policy did before `cached` was added."""
    text = "from pagedjax.policies import FCFS\nOLD = FCFS._replace(name='old', order=lambda waiting, running: waiting)"
    (tmp_path / "old.py").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"its order takes other arguments; write order\(waiting, running, cached\)",
    ):
        find(f"{tmp_path / 'old.py'}:OLD")


# --- what functions of one's own return and raise -------------------------------------------------


def in_file(tmp_path: Path, change: str) -> Policy:
    """FCFS with a change, in a file of one's own."""
    text = f"from pagedjax.policies import FCFS\nMINE = FCFS._replace(name='mine', {change})\n"
    (tmp_path / "mine.py").write_text(text)
    return find(f"{tmp_path}/mine.py:MINE")


def preempting(policy: Policy | str) -> None:
    """A step in which the policy is asked for each of its decisions."""
    state = start(ask("a", 4, 4), ask("b", 4, 4), num_blocks=2, block_size=4, host_blocks=4)
    state, plan = scheduler.schedule(state, policy)
    state, _ = scheduler.commit(state, plan, (WORD,) * len(plan.seqs))
    scheduler.schedule(state, policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("admit=lambda s, n, f: None", "admit of the policy 'mine' returned None; return True or"),
        ("swap=lambda v: 'no'", "swap of the policy 'mine' returned 'no'; return True or False"),
        (
            "admit=lambda s, n, f: __import__('numpy').ones(2, bool)",
            "admit of the policy 'mine' returned .*True",
        ),
        ("preempt=lambda r: r", "preempt of the policy 'mine' returned .*; return one of the run"),
        (
            "preempt=lambda r: r[0]._replace(arrival=0, length=1)",
            "preempt of the policy .mine. returned Seq.*; return one",
        ),
    ],
)
def test_a_wrong_decision_is_refused_and_said(tmp_path, change, message):
    policy = in_file(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        preempting(policy)
    with pytest.raises(ValueError, match=f"policy is 'mine': {message}"):
        purity.find_pure(policy)


@pytest.mark.parametrize(
    "change",
    [
        "order=lambda w, r, c: w[9]",
        "order=lambda w, r, c: (w[i] for i in (0, 9))",
        "admit=lambda s, n, f: s[99]",
        "preempt=lambda r: r[9]",
        "swap=lambda v: v[9]",
    ],
)
def test_an_error_in_a_function_names_its_file_and_line(tmp_path, change):
    function = change.partition("=")[0]
    policy = in_file(tmp_path, change)
    place = rf"{function} of the policy 'mine' raised IndexError: .* in <.*> \(.*mine.py, line 2\)"
    with pytest.raises(OwnError, match=place) as caught:
        preempting(policy)
    assert isinstance(caught.value.__cause__, IndexError)
    purity.find_pure(policy)  # it may need requests of another kind


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ("order=lambda w, r, c: sorted(w, key=lambda s: s.predicted)", True),
        ("order=lambda w, r, c: sorted(w, key=lambda s: s.request.predicted or 64)", False),
        ("order=lambda w, r, c: [w[9].predicted]", False),  # it fails with them, too
        ("admit=lambda s, n, f: n <= f", False),
    ],
)
def test_a_policy_needs_predictions_if_it_fails_without_them_alone(tmp_path, change, needs):
    assert purity.needs_predictions(in_file(tmp_path, change)) == needs


def test_functions_that_take_other_arguments_are_refused(tmp_path):
    for function, usage in (("admit", r"admit\(seq, need, free\)"), ("swap", r"swap\(victims\)")):
        with pytest.raises(
            ValueError, match=f"its {function} takes other arguments; write {usage}"
        ):
            in_file(tmp_path, f"{function}=lambda: True")


def test_a_schedule_takes_the_name_of_a_shipped_policy():
    state = start(ask("a", 40), ask("b", 2), seqs=1)
    assert scheduler.schedule(state, "shortest") == scheduler.schedule(state, SHORTEST)
    assert scheduler.schedule(state, "shortest") != scheduler.schedule(state, "fcfs")
    with pytest.raises(ValueError, match=r"policy is .shortet.; .*did you mean 'shortest'"):
        scheduler.schedule(state, "shortet")
    with pytest.raises(ValueError, match=r"give the value that pagedjax\.policies\.find"):
        scheduler.schedule(state, "mine.py:MINE")


# --- policies of one's own before weights ---------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("nowhere.py:MINE", "there is no file nowhere.py"),
        (
            FCFS._replace(name="mine", swap=lambda victims: None),
            "swap of the policy 'mine' returned",
        ),
        (RANDOM, "order of the policy 'random' "),
    ],
    ids=["missing", "wrong", "impure"],
)
def test_a_policy_is_checked_before_weights_are_loaded(policy, message):
    with pytest.raises(ValueError, match=message):
        LLM("/no/such/model", policy=policy)


def test_an_engine_takes_the_value_and_its_recording_replays(tiny, tmp_path, capsys):
    policy = FCFS._replace(name="last", order=lambda waiting, running, cached: waiting[::-1])
    sizes = {"max_num_seqs": 8, "num_blocks": 256, "max_num_batched_tokens": 64}
    llm = LLM(tiny, progress=False, policy=policy, token_buckets=(8, 64), **sizes)
    path = tmp_path / "run.jsonl"
    llm.engine.record(path)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)
    llm.generate([[20, 30], [40]], params, use_tqdm=False)
    llm.engine.record(None)
    steps = [t.plan.admitted for t in replay(path, {"last": policy}) if t.plan]
    assert steps[0] == ("1", "0")
    assert verify(path, {"last": policy}).identical
    assert main(["replay", str(path)]) != 0
    assert "names the policy 'last'; known are" in capsys.readouterr().err


def test_the_page_of_policies_names_what_one_may_read():
    page = Path("docs/design/policies.md").read_text(encoding="utf-8")
    rows = {
        row.split("|")[1].strip(" `"): row.split("|")[2] for row in re.findall(r"(?m)^\|.*", page)
    }
    properties = {name for name, item in vars(Seq).items() if isinstance(item, property)}
    for row, names_there in (
        ("seq", {*Seq._fields, *properties}),
        ("seq.request", Request._fields),
    ):
        assert set(re.findall("`(\\w+)`", rows[row])) == set(names_there)

"""The checker of policies: planted faults, no false alarm, and a search without folding beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from immutables import Map

from pagedjax.commands.cli import main
from pagedjax.host.checker import folding
from pagedjax.host.checker.check import EXACT_GAP, Report, check, text
from pagedjax.host.checker.counterexample import NotConfirmed, record, run
from pagedjax.host.checker.cycles import Places, longest_runs, shortest_lasso
from pagedjax.host.checker.moves import (
    Arrive,
    CancelRank,
    Effect,
    Move,
    Node,
    Step,
    apply,
    moves,
    start,
)
from pagedjax.host.checker.search import Graph, explore
from pagedjax.host.checker.worlds import World, worlds
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import FCFS, POLICIES, SHORTEST, WINDOW, Policy, by_key, find
from pagedjax.host.policies.mlfq import mlfq
from pagedjax.host.policies.srtf import srtf
from pagedjax.host.policies.vtc import vtc
from pagedjax.host.replay import verify
from pagedjax.host.types import Admitted, Finished, Submitted
from pagedjax.options.config import PrefixCheckpoints
from tests.refusals import refused

STEP = Step((False,))
EMPTY_STEP = Step(())
LONG, SHORT, OTHER = map(Arrive, range(3))


def world_of(policy: Policy, name: str, requests: int = 2, num_blocks: int = 4) -> World:
    world = next(world for world in worlds(policy, requests, num_blocks) if world.name == name)
    return world._replace(gap=folding.largest_gap(world))


# --- planted faults -------------------------------------------------------------------------------

PLAIN = FCFS._replace(bound=None, urgent_first=False)
HOLDING = PLAIN._replace(name="holding", admit=lambda seq, need, free: need <= 3)
SHORT_PROMPTS = by_key("short_prompts", lambda seq: seq.request.prompt_len)
LEAST_URGENT = PLAIN._replace(
    name="least_urgent",
    urgent_first=True,
    # two neighbours may change places, so that no request starves
    order=lambda waiting, running, cached: sorted(
        waiting, key=lambda seq: (seq.arrival // 2, -seq.request.priority)
    ),
)
AGED = by_key("aged", lambda seq: seq.arrival + 3 * seq.request.priority)
HASTY = AGED._replace(name="hasty", bound=1)
WASTEFUL = PLAIN._replace(
    name="wasteful", preempt=lambda running: max(running, key=lambda seq: seq.computed)
)


def evicting() -> Policy:
    """Sends everybody back before each step, so that no long prompt is ever computed."""
    memory: dict[str, Any] = {
        "init": lambda: 0,
        "order": lambda memory, waiting, running, cached: waiting,
        "evict": lambda memory, waiting, running: [seq.request_id for seq in running.seqs],
    }
    return PLAIN._replace(name="evicting", **memory)


def checked(policy: Policy, **options: Any) -> Report:
    report = check(policy, **options)
    assert report.counterexample is not None
    return report


@pytest.mark.parametrize(
    ("policy", "kind", "stem", "loop"),
    [
        (HOLDING, "deadlock", (LONG,), (EMPTY_STEP,)),
        # only a shorter prompt is preferred, so it arrives and ends again and again
        (SHORT_PROMPTS, "starvation", (LONG,), (SHORT, STEP)),
        (LEAST_URGENT, "priority inversion", (SHORT, LONG, STEP), ()),
        (HASTY, "bound", (LONG, SHORT, SHORT, STEP, STEP), ()),
    ],
    ids=lambda value: value.name if isinstance(value, Policy) else None,
)
def test_a_planted_fault_has_the_shortest_counterexample_and_its_recording_replays(
    policy, kind, stem, loop, tmp_path
):
    report = checked(policy)
    counterexample = report.counterexample
    assert counterexample is not None
    assert (counterexample.kind, counterexample.stem, counterexample.loop) == (kind, stem, loop)
    replays(report, policy, tmp_path)


def replays(report: Report, policy: Policy, folder) -> None:
    """The recording has each event once, and a loop twice, and verifies byte for byte."""
    counterexample = report.counterexample
    assert counterexample is not None
    record(counterexample, folder / "run.jsonl")
    verified = verify(folder / "run.jsonl", {policy.name: policy})
    assert verified.identical
    assert verified.steps == sum(isinstance(event, Step) for event in counterexample.events)
    assert verified.requests == sum(isinstance(event, Arrive) for event in counterexample.events)


def test_work_that_is_lost_twice_has_the_shortest_counterexample(tmp_path):
    report = checked(WASTEFUL)
    counterexample = report.counterexample
    assert counterexample is not None
    assert (counterexample.kind, counterexample.world.name) == ("lost work", "recompute")
    assert len(counterexample.events) == 12
    discards = [move.effect.discarded for move in run(counterexample.world, counterexample.events)]
    assert [ranks for ranks in discards if ranks] == [(0,), (0,)]
    assert discards[-1] == (0,)
    replays(report, WASTEFUL, tmp_path)


def test_evictions_that_never_end_have_the_shortest_counterexample(tmp_path):
    policy = evicting()
    report = checked(policy)
    counterexample = report.counterexample
    assert counterexample is not None
    assert counterexample.kind == "livelock"
    assert counterexample.stem == (LONG, STEP)
    assert counterexample.loop == (EMPTY_STEP, STEP)
    replays(report, policy, tmp_path)


def test_an_error_of_the_policy_is_a_counterexample(tmp_path):
    policy = by_key("failing", lambda seq: 1 / (2 - seq.arrival))
    report = checked(policy)
    counterexample = report.counterexample
    assert counterexample is not None
    assert counterexample.kind == "error"
    assert "ZeroDivisionError" in counterexample.sentence
    replays(report, policy, tmp_path)


# --- no false alarm -------------------------------------------------------------------------------


def holds(policy: Policy, seconds: float | None, **options: Any) -> None:
    """There is no counterexample. seconds: the time limit of the search; None: it comes to an end.

    The search finds the shortest counterexample first.
    """
    report = check(policy, seconds=seconds, **options)
    assert report.counterexample is None, text(report)
    assert report.exhausted or seconds is not None


# of these evictions are seen in small worlds, and the search ends
IMPATIENT = (
    mlfq(levels=3, quantum=1, ratio=2, prompt_work=0.5, patience=2),
    srtf(patience=2, margin=1),
)
# the searches of the others with memory do not end
ENDING = [policy for policy in POLICIES.values() if policy.init is None or policy.name == "mlfq"]
every_shipped = pytest.mark.parametrize(
    "policy", [*POLICIES.values(), *IMPATIENT], ids=lambda policy: policy.name
)


@every_shipped
def test_a_shipped_policy_holds_in_a_small_world(policy):
    holds(policy, None if policy in (*ENDING, *IMPATIENT) else 0.3, requests=2, num_blocks=4)


@pytest.mark.slow
@every_shipped
def test_a_shipped_policy_holds_for_three_requests_and_six_blocks(policy):
    holds(policy, None if policy in ENDING else 5)


@pytest.mark.exhaustive  # a minute each; above, the search has a time limit
@pytest.mark.parametrize("policy", IMPATIENT, ids=lambda policy: policy.name)
def test_impatient_policies_hold_wherever_three_requests_and_six_blocks_lead(policy):
    holds(policy, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world", "largest"),
    [("shortest", "queue", 3), ("longest_prefix", "cached_queue", 2), ("priority", "ageing", 63)],
)
def test_bounds_of_shipped_policies_are_nearly_reached(name, world, largest):
    """By one that is lower than what a run reaches, the same policy has a counterexample."""
    report = check(POLICIES[name], requests=2, num_blocks=6)
    overtaken = {part.world.name: part.overtaken for part in report.coverage}
    assert overtaken[world] == largest
    lower = checked(POLICIES[name]._replace(bound=largest - 1), requests=2).counterexample
    assert lower is not None
    assert lower.kind == "bound"
    assert sum(isinstance(event, Arrive) for event in lower.stem) >= largest + 1


def test_a_function_of_each_request_may_be_the_bound():
    """A long prompt may be overtaken once, a short one never."""
    bounds = {64: 2, 33: 0, 1: 0}
    policy = SHORTEST._replace(
        name="mine", bound=lambda request, others: bounds[request.prompt_len]
    )
    sentence = "1 later requests enter before c0, and the policy states a bound of 0"
    counterexample = checked(policy).counterexample
    assert counterexample is not None
    assert counterexample.sentence == sentence


def test_a_bound_that_is_no_number_is_refused():
    for bound, message in (
        (-1, "policy 'mine': its bound is -1; give a whole number of at least 0, a function, or"),
        (True, "its bound is True"),
        (lambda request: 1, r"its bound takes other arguments; write bound\(request, others\)"),
    ):
        with refused(message):
            find(PLAIN._replace(name="mine", bound=bound))
    wrong = PLAIN._replace(name="mine", bound=lambda request, others: 0.5)
    with refused("bound of the policy 'mine' returned 0.5 for a request; return a whole number"):
        check(wrong, requests=1)


def test_a_request_overtakes_another_once_even_if_it_enters_again():
    latest_first = PLAIN._replace(
        name="latest_first", order=lambda waiting, running, cached: waiting[::-1]
    )
    world = world_of(latest_first, "queue")
    node = node_after(world, LONG, SHORT)
    assert apply(world, node, STEP).effect.overtaken == (1, 0)
    waiting_again = node._replace(waited_again=frozenset({1}))
    assert apply(world, waiting_again, STEP).effect.overtaken == (0, 0)


# --- folding --------------------------------------------------------------------------------------


def unfolded(world: World, depth: int) -> Iterator[tuple[int, Move]]:
    """All moves up to a depth, from states of which only equal ones are taken for one."""
    frontier = {start(world)}
    for reached in range(1, depth + 1):
        following: set[Node] = set()
        for node in frontier:
            for move in moves(world, node):
                yield reached, move
                following.add(move.node)
        frontier = following


def check_depths(world: World, depth_limit: int) -> Graph:
    """Compares the search with one that folds nothing, up to a depth -> the states that it reached."""
    depths = {folding.key_of(world, start(world)): 0}
    for depth, move in unfolded(world, depth_limit):
        depths.setdefault(folding.key_of(world, move.node), depth)
    graph = explore(world)
    folded = {
        key: graph.depths[number]
        for key, number in graph.numbers.items()
        if graph.depths[number] <= depth_limit
    }
    assert folded == depths
    return graph


@pytest.mark.parametrize("name", ["queue", "cached_queue", "recompute", "swap", "prefix"])
@pytest.mark.parametrize("policy", [FCFS, POLICIES["fair"], AGED], ids=lambda policy: policy.name)
def test_a_search_without_folding_reaches_the_same_states_at_the_same_depths(name, policy):
    check_depths(world_of(policy, name, num_blocks=3), 5)


def with_states(world: World, checkpoints: PrefixCheckpoints) -> World:
    """The world with a group of layers of states beside that of attention."""
    config = world.config._replace(
        num_blocks=2 * world.config.num_blocks,
        views=(ALL, View(2)),
        shares_filling=False,
        prefix_checkpoints=checkpoints,
    )
    return world._replace(config=config)


@pytest.mark.parametrize(
    "checkpoints",
    [
        PrefixCheckpoints(prompts=True, texts=True),
        PrefixCheckpoints(interval=4, junctions=True),
    ],
    ids=["last", "interval and junctions"],
)
def test_every_request_ends_with_states_of_which_some_are_kept(checkpoints):
    graph = check_depths(with_states(world_of(FCFS, "prefix", num_blocks=3), checkpoints), 4)
    assert graph.exhausted
    assert graph.fault is None
    assert shortest_lasso(Places(graph)) is None


def test_a_search_without_folding_finds_the_same_largest_numbers():
    world = world_of(AGED, "queue")
    totals = {start(world): {0: 0}}  # of each state, the sum of each rank
    largest = 0
    for _ in range(6):
        following: dict[Node, dict[int, int]] = {}
        for node, sums in totals.items():
            for move in moves(world, node):
                after = following.setdefault(move.node, {})
                for rank, total in sums.items():
                    total += move.effect.overtaken[rank] if move.effect.overtaken else 0
                    largest = max(largest, total)
                    if rank not in move.effect.ended:
                        place = rank - sum(end < rank for end in move.effect.ended)
                        after[place] = max(after.get(place, 0), total)
                if move.effect.arrives:
                    after[len(move.node.state.ids) - 1] = 0
        totals = following
    assert largest == 2

    def overtaken(effect: Effect, rank: int) -> int:
        return effect.overtaken[rank] if effect.overtaken else 0

    places = Places(explore(world))
    assert shortest_lasso(places) is None
    assert max(longest_runs(places, overtaken).values()) == largest


def test_a_search_without_folding_finds_the_first_deadlock_and_the_first_inversion():
    world = world_of(HOLDING, "queue")
    stuck = [
        depth
        for depth, move in unfolded(world, 3)
        if move.node.state.ids and move.effect.num_rows == 0
    ]
    fault = explore(world).fault
    assert fault is not None
    assert explore(world).depths[fault.node] + 1 == min(stuck) == 2
    world = world_of(LEAST_URGENT, "queue")
    inverted = [depth for depth, move in unfolded(world, 4) if move.effect.inversion]
    graph = explore(world)
    assert graph.fault is not None
    assert graph.depths[graph.fault.node] + 1 == min(inverted) == 3


def test_renamed_blocks_and_shifted_arrivals_are_one_state():
    world = world_of(FCFS, "recompute")
    fresh = node_after(world, SHORT, Step((False,)))
    later = node_after(world, OTHER, SHORT, Step((True, False)))
    assert later.state.running.seqs[0].blocks != fresh.state.running.seqs[0].blocks
    assert later.state != fresh.state
    assert folding.key_of(world, later) == folding.key_of(world, fresh)


def test_requests_of_one_shape_are_exchanged():
    world = world_of(FCFS, "recompute")
    first = node_after(world, SHORT, SHORT, CancelRank(0))
    second = node_after(world, SHORT, SHORT, CancelRank(1))
    assert folding.key_of(world, first) == folding.key_of(world, second)


def node_after(world: World, *events) -> Node:
    node = start(world)
    for event in events:
        node = apply(world, node, event).node
    return node


def test_passers_leave_the_state_that_the_search_jumps_to():
    world = world_of(FCFS, "queue")._replace(stride=5)
    node = node_after(world, LONG)
    jumped = next(move.node for move in moves(world, node) if move.happening == SHORT)
    assert jumped == apply(world, node, SHORT).node
    assert jumped.state.waiting[1].arrival == 5


@pytest.mark.parametrize(
    ("policy", "gap"),
    [(FCFS, 1), (POLICIES["shortest"], 4), (POLICIES["priority"], WINDOW), (AGED, 3)],
    ids=lambda value: value.name if isinstance(value, Policy) else None,
)
def test_the_distances_of_arrivals_that_a_policy_tells_apart(policy, gap):
    world = world_of(policy, "queue", num_blocks=6)
    assert folding.largest_gap(world) == gap
    assert (gap > EXACT_GAP) == (policy.name == "priority")


def test_a_policy_that_reads_what_is_folded_is_refused():
    """It prefers the latest request, but only of the first 280: nobody starves."""
    policy = PLAIN._replace(
        name="numbers",
        order=lambda waiting, running, cached: waiting[:: -1 if waiting[-1].arrival < 280 else 1],
    )
    with pytest.raises(NotConfirmed, match="'numbers' decides differently in two states"):
        check(policy, requests=2)


def observe_in_one_call(memory, events, now):
    """The users in their turn, who are forgotten at the end of a call, and not after an event."""
    users, turns = memory
    for event in events:
        if isinstance(event, Submitted):
            user = event.seq.request.user
            users = users.set(event.seq.request_id, user)
            turns = turns if user in turns else (user, *turns)
        elif isinstance(event, Admitted):
            user = users[event.request_id]
            turns = (*[name for name in turns if name != user], user)
        elif isinstance(event, Finished):
            users = users.delete(event.request_id)
    return users, tuple([user for user in turns if user in users.values()])


def test_a_memory_that_depends_on_the_calls_of_observe_is_refused_with_the_remedy():
    policy = Policy(
        "in_one_call",
        lambda memory, waiting, running, cached: sorted(
            waiting, key=lambda seq: memory[1].index(seq.request.user)
        ),
        init=lambda: (Map(), ()),
        observe=observe_in_one_call,
    )
    with pytest.raises(NotConfirmed, match="of events in one call and in several calls"):
        check(policy, requests=2)


class Steps(NamedTuple):
    """A memory whose number grows without end, and of which only the parity matters."""

    number: int = 0

    def folded(self) -> int:
        return self.number % 2


def test_a_memory_is_folded_as_it_says():
    memory: dict[str, Any] = {
        "init": Steps,
        "observe": lambda memory, events, now: Steps(memory.number + 1),
        "order": lambda memory, waiting, running, cached: waiting[:: -1 if memory.folded() else 1],
    }
    policy = PLAIN._replace(name="parity", **memory)
    graph = explore(world_of(policy, "queue"), until=60.0, clock=iter(range(10**4)).__next__)
    assert graph.exhausted


@pytest.mark.parametrize("name", ["queue", "recompute"])
@pytest.mark.parametrize(
    "policy",
    [
        vtc(output_weight=0.5),
        *IMPATIENT,
    ],
    ids=["vtc", "mlfq", "srtf"],
)
def test_states_with_equal_folded_memories_go_on_equally(name, policy):
    """Of all states with one key, each event has the same effect and leads to one key."""
    world = world_of(policy, name, num_blocks=3)
    outcomes: dict[folding.Key, set] = {}
    nodes = {start(world)}
    for _ in range(6):
        following: set[Node] = set()
        for node in nodes:
            branches = []
            for move in moves(world, node):
                branches.append((move.happening, move.effect, folding.key_of(world, move.node)))
                following.add(move.node)
            outcomes.setdefault(folding.key_of(world, node), set()).add(tuple(branches))
        nodes = following
    assert len(outcomes) > 30
    assert all(len(branches) == 1 for branches in outcomes.values())


# --- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_was_covered(capsys):
    assert main(["check", "static", "--requests", "1", "--blocks", "2"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("static: at most 1 unfinished requests of 3 shapes, 2 blocks\n")
    assert "holds: every request ends" in output
    assert "All states were covered in" in output


def test_the_command_writes_a_counterexample_that_replays(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from pagedjax.policies import FCFS\n"
        "def holding(limit: int = 9):\n"
        "    return FCFS._replace(name='holding', admit=lambda seq, need, free: need <= limit)\n"
    )
    assert main(["check", "name=mine.py:holding,limit=2", "--record", "run.jsonl"]) == 1
    output = capsys.readouterr().out
    assert "deadlock: a step computes nothing" in output
    command = "recorded: pagedjax view run.jsonl --policy 'mine.py:holding(limit=2)'\n"
    assert output.endswith(command)
    assert main(["replay", "run.jsonl", "--policy", "mine.py:holding(limit=2)"]) == 0
    assert main(["view", "run.jsonl", "--policy", "mine.py:holding(limit=2)"]) == 0


def test_the_command_says_that_the_time_limit_ended_the_search():
    times = iter(range(10**6))
    report = check(POLICIES["fair"], seconds=60, clock=lambda: float(next(times)))
    assert not report.exhausted
    assert "Not exhausted: the time limit ended the search" in text(report)
    assert "folded()" not in text(report)


def test_a_memory_without_end_is_told_of_folding():
    policy = PLAIN._replace(
        name="counts",
        order=lambda memory, waiting, running, cached: waiting,
        init=int,
        observe=lambda memory, events, now: memory + 1,
    )
    times = iter(range(10**6))
    report = check(policy, requests=1, seconds=60, clock=lambda: float(next(times)))
    assert text(report).endswith("or give the memory a method `folded()`")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody"], "policy is 'nobody'; write one of fcfs"),
        (["fcfs", "--requests", "0"], "--requests is 0; it must be an integer of at least 1"),
        (["fcfs", "--record", "nowhere/run.jsonl"], "has no folder; make"),
    ],
)
def test_a_wrong_call_of_the_command(words, message, capsys):
    try:
        status = main(["check", *words])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_numbers_below_1_are_refused():
    with refused("^blocks is 0; it must be at least 1$"):
        check(FCFS, num_blocks=0)

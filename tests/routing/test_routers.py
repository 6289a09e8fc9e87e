"""The laws of routers, and the prefix router against a naive one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from pagedjax import routing
from pagedjax.engine import block_hashes
from pagedjax.options.params import SamplingParams
from pagedjax.routing import (
    PREFIX,
    ROUND_ROBIN,
    ROUTERS,
    Load,
    Replica,
    Router,
    RouterRequest,
    by_prefix,
    find,
)
from pagedjax.routing.prefixes import Prefixes, depth, learned
from pagedjax.routing.state import RouterState, check
from tests import drawn

OF_ALL = [*ROUTERS.values(), by_prefix("tight", factor=1.0, slack=0)]
# A prompt is a path in a tree: its hashes are its own beginnings, as chained hashes are.
PROMPTS = st.text("ab", max_size=6)
# What happens to a router: a request arrives, one ends, a replica joins or leaves. Numbers pick
# among what there is.
WHAT = st.one_of(
    st.tuples(st.just("route"), PROMPTS, st.integers(0, 50)),
    st.tuples(st.just("finish"), st.integers(0, 99)),
    st.tuples(st.just("join")),
    st.tuples(st.just("leave"), st.integers(0, 99)),
)


def hashes(prompt: str) -> tuple[str, ...]:
    return tuple(prompt[: i + 1] for i in range(len(prompt)))


def cluster(count: int, known_blocks: int = 100) -> RouterState:
    state = routing.init(known_blocks)
    for replica in range(count):
        state = routing.joined(state, replica)
    return state


def send(
    state: RouterState, router: Router, *prompts: str, at: int = 0
) -> tuple[RouterState, list]:
    """Route requests of these prompts, named by their place. Returns the state and the replica of
    each.
    """
    chosen = []
    for i, prompt in enumerate(prompts, start=at):
        state, replica = routing.route(state, router, RouterRequest(f"r{i}", 10, hashes(prompt)))
        chosen.append(replica)
    return state, chosen


def play(
    router: Router, happened: Sequence[tuple], replicas: int
) -> list[tuple[RouterState, str, Any]]:
    """The states after each of `happened`, with what was done and to what."""
    state = cluster(replicas, known_blocks=5)
    history = []
    for i, (action, *details) in enumerate(happened):
        subject: Any = None
        if action == "route" and state.replicas:
            request = RouterRequest(f"r{i}", details[1], hashes(details[0]))
            state, subject = routing.route(state, router, request)
        elif action == "finish" and state.unfinished:
            subject = sorted(state.unfinished)[details[0] % len(state.unfinished)]
            state = routing.finished(state, subject)
        elif action == "join":
            subject = f"joined at {i}"
            state = routing.joined(state, subject)
        elif action == "leave" and state.replicas:
            subject = state.replicas[details[0] % len(state.replicas)]
            state = routing.left(state, subject)
        history.append((state, action, subject))
    return history


@drawn.given(30, 100, st.sampled_from(OF_ALL), st.lists(WHAT, max_size=40), st.integers(0, 4))
def test_every_router_keeps_the_laws(router: Router, happened: list, replicas: int):
    history = play(router, happened, replicas)
    before = cluster(replicas, known_blocks=5)
    for state, action, subject in history:
        check(state)  # loads are sums over the unfinished requests, so none is negative
        assert sum(load.requests for load in state.loads.values()) == len(state.unfinished)
        if action == "route" and before.replicas:
            assert subject in before.replicas
            assert state.loads[subject].requests == before.loads[subject].requests + 1
        if action == "leave" and before.replicas:
            assert subject not in state.replicas
            assert all(routed.replica != subject for routed in state.unfinished.values())
        before = state
    assert history == play(router, happened, replicas), (
        "the same events gave other states, or a state was changed"
    )


@drawn.given(
    30, 100, st.lists(WHAT, max_size=40), st.integers(1, 4), st.floats(1, 3), st.integers(0, 6)
)
def test_no_replica_gets_a_request_beyond_the_limit(
    happened: list, replicas: int, factor: float, slack: int
):
    for state, action, replica in play(by_prefix("mine", factor, slack), happened, replicas):
        if action == "route" and state.replicas:
            limit = max(slack, math.ceil(factor * len(state.unfinished) / len(state.replicas)))
            assert state.loads[replica].requests <= limit


@drawn.given(30, 100, st.lists(PROMPTS, max_size=12), PROMPTS.filter(bool), st.integers(1, 5))
def test_a_known_prefix_is_found_when_the_load_allows_it(
    earlier: list[str], prompt: str, replicas: int
):
    state, chosen = send(cluster(replicas), by_prefix("any", factor=1.0, slack=100), *earlier)
    depths = [0] * replicas
    for earlier_prompt, at in zip(earlier, chosen, strict=True):
        depths[at] = max(depths[at], common_length(prompt, earlier_prompt))
    _, (replica,) = send(state, by_prefix("any", slack=100), prompt, at=len(earlier))
    assert depths[replica] == max(depths)


def common_length(a: str, b: str) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@drawn.given(30, 100, st.lists(PROMPTS, max_size=30), st.integers(0, 8))
def test_known_hashes_are_bounded_and_closed_to_the_front(prompts: list[str], limit: int):
    prefixes = Prefixes(limit)
    for prompt in prompts:
        prefixes = learned(prefixes, hashes(prompt))
        assert len(prefixes.stamps) <= limit
        assert depth(prefixes, hashes(prompt)) == min(limit, len(prompt)), (
            "what was used last is known"
        )
        for key in prefixes.stamps:
            assert depth(prefixes, hashes(key)) == len(key), (
                "a hash is known without those before it"
            )


class NaivePrefixRouter(RuleBasedStateMachine):
    """The prefix router against lists: hashes in order of use, requests one by one, every rule by
    its words.
    """

    FACTOR = 1.5
    SLACK = 2
    KNOWN = 6

    def __init__(self) -> None:
        super().__init__()
        self.router = by_prefix("compared", self.FACTOR, self.SLACK)
        self.state = routing.init(self.KNOWN)
        self.replicas: list[Replica] = []  # the next in turn is the first
        self.order: list[Replica] = []
        self.used: dict[Replica, list[str]] = {}  # hashes of a replica, the oldest first
        self.requests: dict[str, tuple[Replica, int]] = {}
        self.count = 0

    @precondition(lambda self: len(self.order) < 5)
    @rule()
    def join(self) -> None:
        self.count += 1
        self.state = routing.joined(self.state, self.count)
        last = self.replicas[-1] if self.replicas else None
        self.order.append(self.count)
        self.used[self.count] = []
        self.turn_after(last if self.routed else None)

    routed = False

    def turn_after(self, last: Replica | None) -> None:
        at = self.order.index(last) + 1 if last is not None else 0
        self.replicas = self.order[at:] + self.order[:at]

    @precondition(lambda self: self.order)
    @rule(prompt=PROMPTS, tokens=st.integers(0, 20))
    def arrive(self, prompt: str, tokens: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.state, chosen = routing.route(
            self.state, self.router, RouterRequest(name, tokens, hashes(prompt))
        )
        assert chosen == self.expected(prompt)
        self.requests[name] = (chosen, tokens)
        self.routed = True
        self.turn_after(chosen)
        for key in reversed(hashes(prompt)[: self.KNOWN]):
            if key in self.used[chosen]:
                self.used[chosen].remove(key)
            self.used[chosen].append(key)
        del self.used[chosen][: -self.KNOWN]

    def expected(self, prompt: str) -> Replica:
        best: tuple[int, ...] | None = None
        best_replica: Replica = -1
        for place, replica in enumerate(self.replicas):
            tokens = [tokens for at, tokens in self.requests.values() if at == replica]
            mean = (len(self.requests) + 1) / len(self.order)
            if len(tokens) + 1 > max(self.SLACK, math.ceil(self.FACTOR * mean)):
                continue
            length = 0
            while length < len(prompt) and prompt[: length + 1] in self.used[replica]:
                length += 1
            rank = (-length, len(tokens), sum(tokens), place)
            if best is None or rank < best:
                best = rank
                best_replica = replica
        return best_replica

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.state = routing.finished(self.state, name)
        del self.requests[name]

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.order))
        self.state = routing.left(self.state, replica)
        self.order.remove(replica)
        self.replicas.remove(replica)
        del self.used[replica]
        self.requests = {
            name: (at, tokens) for name, (at, tokens) in self.requests.items() if at != replica
        }
        self.routed = self.routed and bool(self.order)

    @invariant()
    def same(self) -> None:
        check(self.state)
        assert list(self.state.turn) == self.replicas
        for replica in self.order:
            tokens = [tokens for at, tokens in self.requests.values() if at == replica]
            assert self.state.loads[replica] == Load(len(tokens), sum(tokens))
            prefixes = self.state.known[replica]
            assert [prefixes.hashes[stamp] for stamp in sorted(prefixes.hashes)] == self.used[
                replica
            ]


@drawn.examples(15, 60)
def test_the_prefix_router_is_the_naive_one(number: int):
    drawn.run_machine(NaivePrefixRouter, number, steps=40)


@pytest.mark.parametrize("router", OF_ALL, ids=lambda router: router.name)
def test_a_request_avoids_replicas_while_there_are_others(router):
    state = cluster(3)
    for number in range(9):
        request = RouterRequest(f"q{number}", 5, hashes("ab"), avoids=(0, 1, 7))
        state, chosen = routing.route(state, router, request)
        assert chosen == 2
    check(state)
    assert state.loads[2] == Load(9, 45)
    assert state.replicas == (0, 1, 2)
    state, chosen = routing.route(state, router, RouterRequest("all", 1, avoids=(0, 1, 2)))
    assert chosen in state.replicas
    check(state)


def test_round_robin_goes_on_where_it_was_when_a_replica_leaves():
    state, chosen = send(cluster(4), ROUND_ROBIN, *[""] * 6)
    assert chosen == [0, 1, 2, 3, 0, 1]
    state = routing.left(state, 1)
    assert send(state, ROUND_ROBIN, *[""] * 4, at=6)[1] == [2, 3, 0, 2]
    assert send(routing.joined(state, 1), ROUND_ROBIN, *[""] * 4, at=6)[1] == [2, 3, 1, 0]
    state = routing.left(routing.left(routing.left(state, 0), 2), 3)
    assert send(routing.joined(state, "new"), ROUND_ROBIN, "", at=6)[1] == ["new"]


def test_least_loaded_counts_requests_then_tokens():
    state = cluster(2)
    for name, tokens in (("heavy", 100), ("light", 1)):
        state, _ = routing.route(state, routing.LEAST_LOADED, RouterRequest(name, tokens))
    state, third = routing.route(state, routing.LEAST_LOADED, RouterRequest("third", 5))
    assert third == 1
    assert state.loads[1] == Load(2, 6)
    state = routing.finished(state, "heavy")
    assert routing.route(state, routing.LEAST_LOADED, RouterRequest("fourth", 5))[1] == 0


def test_routers_without_prefixes_remember_none():
    for router in (ROUND_ROBIN, routing.LEAST_LOADED):
        assert send(cluster(1), router, "abc")[0].known[0] == Prefixes(100)
    assert send(cluster(1, known_blocks=0), PREFIX, "abc")[0].known[0] == Prefixes(0)


def test_a_replica_that_returns_knows_nothing():
    state, _ = send(cluster(2), PREFIX, "abc")
    returned = routing.joined(routing.left(state, 0), 0)
    assert returned.known_prefix(0, RouterRequest("", 0, hashes("abc"))) == 0
    assert returned.loads[0] == Load()
    assert routing.finished(returned, "r0") == returned, "its request ended with it"


def test_prompts_with_another_salt_or_adapter_have_other_hashes():
    prompt = list(range(40))
    plain = SamplingParams()
    root, plain_hashes = block_hashes.of_prompt(prompt, plain, 16)
    assert len(plain_hashes) == 2
    assert root is not None
    other_hashes = [
        block_hashes.of_prompt(prompt, SamplingParams(cache_salt="mine"), 16)[1],
        block_hashes.of_prompt(prompt, plain, 16, adapter="digest")[1],
        block_hashes.of_prompt(prompt, plain, 16, tags=("tag",))[1],
    ]
    assert len({plain_hashes, *other_hashes}) == 4
    assert block_hashes.of_prompt([*prompt, 7], plain, 16)[1] == plain_hashes
    for refused in (SamplingParams(enable_prefix_caching=False), SamplingParams(prompt_logprobs=0)):
        assert block_hashes.of_prompt(prompt, refused, 16) == (None, ())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda s: routing.init(-1),
            "known_blocks is -1; it must be at least 0, which remembers no prefix",
        ),
        (
            lambda s: routing.joined(s, 1),
            "replica 1 is present already; give it another name, or let it leave first",
        ),
        (
            lambda s: routing.left(s, 7),
            "replica 7 is not present, so it cannot leave; present: 0, 1",
        ),
        (
            lambda s: send(routing.init(), PREFIX, ""),
            "request 'r0' has nowhere to go: 0 replicas are present, and 1 is",
        ),
        (
            lambda s: send(s, PREFIX, ""),
            "request 'r0' is unfinished on replica 0; give the new one another id",
        ),
        (
            lambda s: routing.route(s, PREFIX, RouterRequest("a", -1)),
            "request 'a' has -1 tokens; give at least 0",
        ),
        (
            lambda s: routing.route(
                s, Router("mine", lambda state, request: [0]), RouterRequest("a", 1)
            ),
            "router 'mine' chose replica [0] for request 'a'; present are 0, 1; its choose must return one of",
        ),
        (lambda s: by_prefix("mine", factor=math.nan), "factor is nan; it must be at least 1"),
        (lambda s: by_prefix("mine", slack=-1), "slack is -1; it must be at least 0 requests"),
        (
            lambda s: find("fastest"),
            "router is 'fastest'; write one of round_robin, least_loaded, prefix, module:NAME",
        ),
    ],
)
def test_wrong_values_are_refused_with_a_remedy(act, message: str):
    state, _ = send(cluster(2), ROUND_ROBIN, "")
    with pytest.raises(ValueError, match=re.escape(message)):
        act(state)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "MINE = Router('prefix', lambda state, request: 0)",
            "calls itself 'prefix', which is another one; rename it",
        ),
        (
            "MINE = Router('mine', lambda state: 0)",
            "its choose takes other arguments; write choose(state, request)",
        ),
    ],
)
def test_a_wrong_router_of_ones_own_is_refused(tmp_path, code: str, message: str):
    file = tmp_path / "mine.py"
    file.write_text(f"from pagedjax.routing import Router\n{code}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        find(f"{file}:MINE")


def test_a_factor_beyond_the_number_of_replicas_limits_nothing():
    state = cluster(2)
    hashes = (b"a",)
    for i in range(20):
        state, chosen = routing.route(
            state, by_prefix("mine", 1e308, 0), RouterRequest(str(i), 1, hashes)
        )
        assert chosen == 0

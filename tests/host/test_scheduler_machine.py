"""The scheduler against the reference model: transitions in any order, with pools that are too
small.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from pagedjax.host import scheduler
from pagedjax.host.policies import FCFS, Cached
from pagedjax.host.scheduler import Rejected, SchedulerConfig, SchedulerState
from pagedjax.host.types import (
    Choice,
    Event,
    Finished,
    FinishReason,
    Forked,
    Plan,
    Request,
    Running,
    Seq,
)
from pagedjax.options.config import Reservation
from tests import drawn
from tests.host.scheduler_model import Model, ModelSequence

STOPS = (0, 1, 2)
tokens = st.integers(0, 9)
shares = st.floats(0, 0.999)
seeds = st.integers(0, 2**32 - 1)
sizes = {
    "block_size": st.integers(1, 8),
    "num_blocks": st.integers(1, 12),
    "max_num_batched_tokens": st.integers(1, 32),
    "max_num_seqs": st.integers(1, 6),
    "max_model_len": st.integers(2, 40),
    "host_blocks": st.one_of(st.just(0), st.integers(1, 12)),
    "empty_blocks": st.sampled_from([0, 0, 2, 5]),
}
# (chunked_prefill, mixed_steps, reservation): the default mode, and the baseline modes
USUAL, *BASELINES = itertools.product((True, False), (True, False), get_args(Reservation))
# modes with branches, preemption and prefix sharing
PAGED = [mode for mode in BASELINES if mode[2] == "none"]


def config_of(mode: tuple[bool, bool, Reservation], **sizes: int) -> SchedulerConfig:
    """With reservation "max", max_model_len is cut to the largest piece: else all requests are
    refused.
    """
    sizes["empty_blocks"] = min(sizes.get("empty_blocks", 0), sizes["num_blocks"] - 1)
    ways = dict(zip(("chunked_prefill", "mixed_steps", "reservation"), mode, strict=True))
    config = SchedulerConfig(**sizes, **ways)
    if config.reservation != "max":
        return config
    return config._replace(max_model_len=max(2, min(config.max_model_len, longest(config))))


def longest(config: SchedulerConfig) -> int:
    """The most tokens for which one request can get blocks."""
    pieces = [1 << i for i in range(8) if 1 << i <= config.num_blocks]
    return config.block_size * (config.num_blocks if config.reservation == "none" else pieces[-1])


# hypothesis would draw every field that is not given
configs = st.builds(config_of, mode=st.just(USUAL), **sizes)
baselines = st.builds(
    config_of,
    mode=st.sampled_from([*BASELINES, *PAGED * 4]),
    **{**sizes, "num_blocks": st.integers(1, 20)},
)


class Driver:
    """Runs the real scheduler and the model side by side, and compares them after every transition."""

    def __init__(self, config: SchedulerConfig, tally: Counter[str]) -> None:
        self.tally = tally
        self.state = scheduler.init(config)
        self.model = Model(config)
        self.plan: Plan | None = None
        self.names = 0
        self.drafts: dict[str, list[int]] = {}  # of the plan in flight
        # the oldest request, if it made no progress in the step before
        self.stalled: ModelSequence | None = None
        # the last ones, with their hashes when they were new
        self.past: list[tuple[SchedulerState | Plan, int]] = []
        self.remember(self.state)

    def remember(self, value: SchedulerState | Plan) -> None:
        """A hash covers every field. Lists, dictionaries and sets, which could change later, have
        none.
        """
        self.past = [*self.past[-40:], (value, hash(value))]

    def check_new_state(self, state: SchedulerState) -> None:
        """Checks a new state: it is valid, it equals the model, and earlier states have not
        changed.
        """
        scheduler.check(state)
        self.model.compare(state)
        assert all(hash(value) == before for value, before in self.past[-3:]), (
            "an old state changed"
        )
        self.state = state
        self.remember(state)

    def submit(self, request: Request) -> None:
        request = request._replace(hashes=self.model.hashes(request.request_id, request.prompt_len))
        try:
            state = scheduler.submit(self.state, request)
        except Rejected:
            self.tally["rejected"] += 1
            assert not self.model.accepts(request), "rejected, but it fits"
            self.check_new_state(self.state)
        else:
            assert self.model.accepts(request), "accepted, but it can never run"
            self.model.submit(request)
            self.check_new_state(state)

    def submit_new(
        self,
        prompt_len: int,
        max_tokens: int,
        min_tokens: int,
        stops: frozenset[int],
        family: int = 0,
        forks: int = 0,
        beams: bool = False,
    ) -> None:
        """Requests of families 0 and 1 share prefixes within their family; a request of family 2
        shares nothing.
        """
        self.names += 1
        if self.state.config.reservation != "none" and family < 2:
            # requests that share are refused in these modes
            family = 2
            forks = 0
            beams = False
        kind, end = ("private", "") if family == 2 else ("r", f".{family}")
        names = [f"{kind}{self.names}{branch}{end}" for branch in ("", "b", "c", "d")[: forks + 1]]
        request = Request(names[0], prompt_len, max_tokens, min(min_tokens, max_tokens))
        stops = frozenset() if beams else stops
        forks_of_request = tuple(names[1:])
        self.submit(request._replace(stop_token_ids=stops, forks=forks_of_request, beams=beams))

    def oldest(self) -> ModelSequence | None:
        """The oldest request; None where beams that wait for a choice block the queue."""
        sequences = self.model.alive()
        moving = {sequence.group for sequence in sequences if not sequence.awaits_siblings()}
        blocked = any(
            sequence.awaits_siblings() and sequence.group not in moving for sequence in sequences
        )
        return min([] if blocked else sequences, default=None)

    def schedule(self, seed: int = 0, drafting: float = 0.0) -> None:
        """drafting: the share of decodes that are offered drafts."""
        draw = random.Random(seed)
        active = scheduler.running(self.state)
        drafts = {
            seq.request_id: [draw.randrange(40) for _ in range(draw.randint(1, 9))]
            for seq in active
            if draw.random() < drafting
        }
        offered = {name: len(tokens) for name, tokens in drafts.items()}
        decodes = {seq.request_id for seq in active if seq.length - seq.computed == 1}
        oldest = self.oldest()
        cached: dict[int, int] = {}

        def order(waiting: tuple[Seq, ...], running: Running, cached_of: Cached) -> tuple[Seq, ...]:
            cached.update({seq.arrival: cached_of(seq) for seq in waiting})
            return waiting

        state, plan = scheduler.schedule(self.state, FCFS._replace(order=order), offered)
        assert scheduler.schedule(self.state, FCFS, offered)[1] == plan, (
            "the same state gave another plan"
        )
        undrafted = scheduler.schedule(self.state, FCFS)[1]
        drafted_columns = ("seqs", "counts", "drafts", "blocks_used")
        columns = {name: getattr(undrafted, name) for name in drafted_columns}
        assert plan._replace(**columns) == undrafted, "a draft changed the plan"
        assert [seq.arrival for seq in plan.seqs] == [seq.arrival for seq in undrafted.seqs]

        step = self.model.schedule(drafts)
        assert plan.drafts == () or plan.drafts == tuple(
            len(step.drafts.get(row[0].name, [])) for row in step.rows
        )
        assert any(plan.drafts) == bool(step.drafts), "drafts were lost, or made up"
        self.drafts = step.drafts
        self.tally["drafted"] += bool(step.drafts)
        self.tally["a draft in another block"] += any(
            len(seq.blocks) > len(seq_without.blocks)
            for seq, seq_without in zip(plan.seqs, undrafted.seqs, strict=True)
        )
        self.tally["drafts cut"] += any(
            0 < k < offered[seq.request_id] for seq, k in zip(plan.seqs, plan.drafts, strict=False)
        )
        assert not cached or cached == self.model.cached, (
            "`order` got other numbers of cached tokens"
        )
        self.tally["cached in the queue"] += sum(number > 0 for number in cached.values())
        assert plan.admitted == tuple(sequence.name for sequence in step.admitted)
        lists = (step.cached, step.preempted, step.swapped, step.resumed)
        assert (plan.cached, plan.preempted, plan.swapped, plan.resumed) == tuple(map(tuple, lists))
        ids = [seq.request_id for seq in plan.seqs]
        assert list(zip(ids, plan.starts, plan.counts, plan.lengths, strict=True)) == [
            (sequence.name, start, count, sequence.known) for sequence, start, count in step.rows
        ]
        c = self.state.config
        assert sum(plan.counts) == plan.num_tokens <= c.max_num_batched_tokens
        assert len(ids) <= c.max_num_seqs
        assert min(plan.counts, default=1) >= 1
        for name in decodes - set(plan.preempted) if c.mixed_steps else ():
            assert undrafted.counts[ids.index(name)] == 1, f"the decode of {name} was deferred"
        oldest_rows = [
            seq
            for seq in plan.seqs
            if oldest
            and seq.group == oldest.group
            and (seq.arrival == oldest.arrival or oldest.request.beams)
        ]
        if c.mixed_steps:
            assert oldest is None or oldest_rows, "the oldest request makes no progress"
        else:
            self.check_unmixed(plan, decodes - set(plan.preempted), None if oldest_rows else oldest)
        if c.reservation != "none":
            assert not plan.preempted, "a sequence with a reservation was preempted"
        assert (plan.step, plan.num_waiting) == (self.model.steps, len(self.model.waiting))
        assert (plan.blocks_used, plan.num_blocks) == (
            c.num_blocks - self.model.free(),
            c.num_blocks,
        )
        partial = [row for row in plan.rows if not row.samples]
        assert len(partial) <= 1, "a prompt was cut though an earlier one is not whole"
        assert c.chunked_prefill or not partial, "a prompt was cut"

        self.model.execute(plan, scheduler.running(state))
        self.plan = plan
        self.check_new_state(state)
        self.remember(plan)
        self.count_plan(plan, decodes)

    def count_plan(self, plan: Plan, decodes: set[str]) -> None:
        shared = [block for seq in plan.seqs for block in seq.blocks]
        active = scheduler.running(self.state)
        ids = {seq.request_id for seq in plan.seqs}
        groups = Counter(seq.group for seq in active if seq.group is not None)
        group_runs = max(groups.values(), default=0) > 1
        prompts = {seq.request_id for seq in active if seq.length - seq.computed > 1}
        self.tally += Counter(
            {
                "preempted": len(plan.preempted),
                "cut": sum(not row.samples for row in plan.rows),
                "found": sum(cached > 0 for cached in plan.cached),
                "swapped": len(plan.swapped),
                "resumed": len(plan.resumed),
                "copied": len(plan.copies),
                "a group preempted": len(plan.preempted) > 1 and group_runs,
                "shared": len(set(shared)) < len(shared),
                "decodes waited": bool(decodes - set(plan.preempted) - ids),
                "prompts waited": not prompts <= ids,
                "reserved": len(plan.admitted) if self.state.config.reservation != "none" else 0,
                "no whole prompt": self.model.uncut,
                "no piece": self.model.fragmented,
            }
        )
        self.model.uncut = self.model.fragmented = 0

    def check_unmixed(self, plan: Plan, decodes: set[str], waits: ModelSequence | None) -> None:
        """Without mixed steps, a step has all decodes and nothing else, or no decode. `waits`: the
        oldest, if it waits.

        With chunks it waits for one step at a time: an odd step has its decode, an even step its
        chunk, before all other chunks. With whole prompts it waits only in steps that admit a
        request.
        """
        ids = {seq.request_id for seq in plan.seqs}
        if ids & decodes:
            without = [
                n - k
                for n, k in zip(plan.counts, plan.drafts or [0] * len(plan.counts), strict=True)
            ]
            assert (ids, set(without), plan.admitted) == (decodes, {1}, ()), "prompts among decodes"
        if self.state.config.chunked_prefill:
            assert waits is None or waits is not self.stalled, (
                "the oldest request made no progress twice"
            )
            self.stalled = waits
        else:
            assert ids & decodes or ids == set(plan.admitted), (
                "a prompt that entered before was left over"
            )
            assert waits is None or plan.admitted, "the oldest request waits without a reason"

    def commit(self, sampled: list[int], seed: int, *, may_omit_choice: bool = True) -> None:
        """`may_omit_choice`: the engine may leave out the choice for beams that are all complete."""
        assert self.plan is not None
        draw = random.Random(seed)
        samples: list[Any] = list(sampled)
        for i, seq in enumerate(self.plan.seqs):
            drafts = self.drafts.get(seq.request_id, [])
            if drafts:  # the first ones are right, and a token follows them
                right = draw.randint(0, len(drafts))
                samples[i] = (*drafts[:right], sampled[i])
                self.tally["all drafts right"] += right == len(drafts)
                self.tally["drafts past the end"] += (
                    len(self.model.until_the_end(self.model.flight.rows[i][0], samples[i])) <= right
                )
        sampled = samples
        hashes = self.model.filled_hashes(sampled)
        ready, at_limit = self.model.ready()
        choices = {}
        for group in ready:
            names = [sequence.name for sequence in group]
            width = len(names) + len(group[0].request.forks)
            if not (may_omit_choice and draw.random() < 0.1):
                parents = tuple(draw.choices(names, k=width))
                choices[names[0]] = Choice(parents, tuple(draw.choices(range(40), k=width)))
        arguments = (self.plan, sampled, hashes, choices)
        state, events = scheduler.commit(self.state, *arguments)
        assert scheduler.commit(self.state, *arguments)[1] == events, (
            "the same step gave other events"
        )
        assert list(events) == self.model.commit(sampled, choices)
        self.plan = None
        self.check_new_state(state)
        for sequence in at_limit:
            self.cancel(sequence.name, "length")
        self.tally["beams went on"] += len(choices)
        self.tally["a beam had several children"] += sum(
            len(set(c.parents)) < len(c.parents) for c in choices.values()
        )
        self.tally["beams waited"] += any(
            sequence.awaits_siblings() for sequence in self.model.running
        )
        self.tally["step"] += 1
        self.tally["forked"] += sum(isinstance(event, Forked) for event in events)
        self.count_ends(events)

    def cancel(self, name: str, reason: FinishReason) -> None:
        in_flight = self.plan is not None and any(seq.request_id == name for seq in self.plan.seqs)
        state, events = scheduler.cancel(self.state, name, reason)
        assert list(events) == self.model.cancel(name, reason)
        assert events or state is self.state
        self.check_new_state(state)
        self.tally["cancelled in flight"] += bool(events and in_flight)
        self.tally["cancelled"] += bool(events)

    def forget(self) -> None:
        self.model.forget()
        self.check_new_state(scheduler.forget(self.state))
        self.tally["forgot"] += 1

    def restart(self) -> None:
        """A step failed after this state: the engine continues from the state before its plan."""
        if self.plan is None:
            self.tally["restarted"] += bool(self.state.running.seqs)
            self.model.restart()
            self.check_new_state(scheduler.restart(self.state))

    def update(self, pending: Any) -> None:
        """The weights become others between two steps."""
        if self.plan is None:
            self.tally[f"updated, {pending}"] += bool(self.state.running.seqs)
            self.tally["updated while some were swapped"] += any(
                seq.blocks for seq in self.state.waiting
            )
            self.model.update(pending)
            self.check_new_state(scheduler.update(self.state, pending))

    def count_ends(self, events: tuple[Event, ...]) -> None:
        self.tally.update(event.reason for event in events if isinstance(event, Finished))

    def fit(self, prompt: float, output: float) -> tuple[int, int]:
        """Two numbers in [0, 1) as a prompt length and max_tokens that the limits allow."""
        c = self.state.config
        longest_sequence = min(c.max_model_len, longest(c))
        if not c.chunked_prefill:
            longest_sequence = max(1, min(longest_sequence, c.max_num_batched_tokens))
        prompt_len = 1 + int(prompt * (longest_sequence - 1))
        return prompt_len, 1 + int(output * (longest_sequence - prompt_len))

    def traffic(self, number: int, seed: int, *, busy: bool = True, drafting: float = 0.0) -> None:
        """Runs `number` steps with random tokens; if `busy`, requests arrive and are cancelled
        before transitions.
        """
        draw = random.Random(seed)
        for _ in range(number):
            if self.plan is None:
                self.random_submit_or_cancel(draw, busy)
                self.schedule(draw.randrange(2**32) if drafting else 0, drafting)
            self.random_submit_or_cancel(draw, busy)
            assert self.plan is not None
            self.commit(
                [draw.randrange(40) for _ in self.plan.seqs],
                draw.randrange(2**32),
                may_omit_choice=busy,
            )

    def random_submit_or_cancel(self, draw: random.Random, busy: bool) -> None:
        if busy and draw.random() < 0.3 and len(self.model.alive()) < 12:
            # short prompts with long outputs: many are admitted, then the pool is too small for all
            lengths = self.fit(draw.random() ** 3, draw.random())
            stops = frozenset(draw.sample(STOPS, draw.randrange(4)))
            forks = max(0, draw.randrange(-3, 4))
            beams = draw.random() < 0.3
            self.submit_new(*lengths, draw.randrange(4), stops, draw.randrange(3), forks, beams)
        if busy and draw.random() < 0.02:
            self.forget()
        if busy and draw.random() < 0.02:
            self.restart()
        if busy and draw.random() < 0.04:
            self.update(draw.choice(["restart", "keep"]))
        if busy and draw.random() < 0.05 and self.model.alive():
            name = draw.choice(self.model.names())
            self.cancel(name, "abort")
            # the id is used again, perhaps while the cancelled request is in flight
            if draw.random() < 0.5:
                self.submit(Request(name, *self.fit(draw.random(), draw.random())))

    def drain(self, seed: int) -> None:
        """Runs until every request has ended, and checks a bound on the steps.

        The oldest request is in every plan (asserted in `schedule`), so it computes at least one
        token a step. It is never preempted: the victim is the latest arrival, and a sequence that
        runs alone fits by the rule of `submit`. So it ends within limit - 1 steps (its last token
        is sampled, never computed; a branch computes the last token of its prompt once more), and
        then the next request is the oldest.

        If chunks and decodes alternate, it is at least in every second plan. If whole prompts go
        first, it waits in steps that admit a request, and between two steps that advance it no
        request is admitted twice: a step that preempts is a step of decodes.
        """
        # a step in flight does not contain the latest arrivals
        self.traffic(self.plan is not None, seed, busy=False)
        bound = sum(
            sequence.width * self.model.limit(sequence.request) for sequence in self.model.alive()
        )
        c = self.state.config
        crowd = sum(sequence.width for sequence in self.model.alive())
        for _ in range(1 if c.mixed_steps else 2 if c.chunked_prefill else 1 + crowd):
            self.traffic(bound, seed, busy=False)
            if not self.model.alive():
                break
        assert not self.state.waiting
        assert (
            self.state.host_pool is None
            or self.state.host_pool.num_free == self.state.config.host_blocks
        ), "host blocks leaked"
        assert not self.state.running.seqs, "requests are left after the bound"
        assert self.state.pool.num_free == self.state.config.num_blocks, "blocks leaked"


class SchedulerMachine(RuleBasedStateMachine):
    tally: ClassVar[Counter[str]]

    def start(self, config: SchedulerConfig) -> None:
        self.driver = Driver(config, self.tally)

    @rule(
        prompt=shares,
        output=shares,
        min_tokens=st.integers(0, 4),
        stops=st.frozensets(st.sampled_from(STOPS)),
        family=st.integers(0, 2),
        forks=st.integers(0, 3),
        beams=st.booleans(),
    )
    def submit_what_fits(self, prompt: float, output: float, **options: Any) -> None:
        self.driver.submit_new(*self.driver.fit(prompt, output), **options)

    @rule(prompt_len=st.integers(0, 45), max_tokens=st.integers(0, 45))
    def submit_anything(self, prompt_len: int, max_tokens: int) -> None:
        self.driver.submit_new(prompt_len, max_tokens, 0, frozenset(STOPS))

    @rule(prompt=shares, family=st.integers(0, 2))
    def submit_what_samples_nothing(self, prompt: float, family: int) -> None:
        self.driver.submit_new(self.driver.fit(prompt, 0.0)[0], 0, 0, frozenset(STOPS), family)

    @rule(number=st.integers(0, 20))
    def submit_a_name_again(self, number: int) -> None:
        self.driver.submit(Request(f"r{number % (self.driver.names + 1)}", 1, 1))

    @precondition(lambda self: self.driver.plan is None)
    @rule(seed=seeds, drafting=st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    def schedule(self, seed: int, drafting: float) -> None:
        self.driver.schedule(seed, drafting)

    @precondition(lambda self: self.driver.plan is not None)
    @rule(sampled=st.lists(tokens, min_size=6, max_size=6), seed=seeds)
    def commit(self, sampled: list[int], seed: int) -> None:
        self.driver.commit(sampled[: len(self.driver.plan.seqs)], seed)  # type: ignore[union-attr]

    @rule(number=st.integers(0, 30), reason=st.sampled_from(["abort", "stop"]))
    def cancel(self, number: int, reason: FinishReason) -> None:
        alive = self.driver.model.names()
        self.driver.cancel(alive[number] if number < len(alive) else f"r{number}", reason)

    @rule()
    def forget(self) -> None:
        self.driver.forget()

    @rule()
    def restart(self) -> None:
        self.driver.restart()

    @rule(pending=st.sampled_from(["restart", "keep"]))
    def update(self, pending: str) -> None:
        self.driver.update(pending)

    @rule(number=st.integers(10, 60), seed=seeds, drafting=st.sampled_from([0.0, 0.7]))
    def traffic(self, number: int, seed: int, drafting: float) -> None:
        self.driver.traffic(number, seed, drafting=drafting)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain(seed=0)
            assert all(hash(value) == before for value, before in self.driver.past), (
                "an old state changed"
            )


def run_machine(
    configs: st.SearchStrategy[SchedulerConfig], examples: int, steps: int, at_least: int
) -> Counter[str]:
    """Runs machines, `examples` at a time, until their schedulers made `at_least` steps -> a tally
    of events.
    """
    tally: Counter[str] = Counter()
    start = initialize(config=configs)(SchedulerMachine.start)
    machine = type("Machine", (SchedulerMachine,), {"tally": tally, "start": start})
    for _ in range(5):  # one draw of examples may have few steps
        drawn.run_machine(machine, examples, steps)
        if tally["step"] >= at_least:
            return tally
    raise AssertionError(f"only {tally} in five runs")


def test_random_transitions_match_the_reference_model():
    run_machine(configs, examples=15, steps=30, at_least=1_500)


def test_baseline_modes_match_the_reference_model():
    run_machine(baselines, examples=10, steps=30, at_least=1_000)


def small_config(draw: random.Random) -> SchedulerConfig:
    block_size = draw.randint(1, 6)
    host_blocks = draw.choice([0, draw.randint(4, 12)])
    return SchedulerConfig(
        block_size,
        num_blocks=draw.randint(4, 14),
        max_num_batched_tokens=draw.randint(4, 32),
        max_num_seqs=draw.randint(2, 6),
        max_model_len=40,
        host_blocks=host_blocks,
        empty_blocks=draw.choice([0, 0, 3]),
    )


@pytest.mark.parametrize(
    ("drivers", "at_least"), [(10, 3), pytest.param(50, 20, marks=pytest.mark.slow)]
)
def test_the_driver_reaches_every_kind_of_event(drivers: int, at_least: int):
    """The same checks on random configs from a fixed seed: the tally is the same on every
    machine.
    """
    draw = random.Random(0)
    tally: Counter[str] = Counter()
    for _ in range(drivers):
        driver = Driver(small_config(draw), tally)
        driver.traffic(60, draw.randrange(2**32))
        driver.traffic(60, draw.randrange(2**32), drafting=0.8)
        driver.drain(seed=0)
    for happened in (
        "drafted",
        "drafts cut",
        "all drafts right",
        "drafts past the end",
        "a draft in another block",
        "swapped",
        "resumed",
        "copied",
        "forked",
        "beams went on",
        "a beam had several children",
        "beams waited",
        "a group preempted",
        "found",
        "cached in the queue",
        "shared",
        "forgot",
        "restarted",
        "updated, restart",
        "updated, keep",
        "updated while some were swapped",
        "preempted",
        "cut",
        "stop",
        "length",
        "rejected",
        "cancelled",
        "cancelled in flight",
    ):
        assert tally[happened] >= at_least, f"{happened}: {tally}"


@pytest.mark.slow
def test_the_driver_reaches_every_kind_of_event_in_baseline_modes():
    """On random configs from a fixed seed. Pieces of equal size leave no holes, so other modes are
    drawn more often.
    """
    draw = random.Random(0)
    tally: Counter[str] = Counter()
    times = {"none": 8, "oracle": 6, "pow2": 6, "max": 2}
    for mode in itertools.chain(*([mode] * times[mode[2]] for mode in BASELINES)):
        config = config_of(
            mode,
            block_size=draw.randint(1, 4),
            num_blocks=draw.randint(8, 20),
            max_num_batched_tokens=draw.randint(4, 8) if mode[0] else draw.randint(16, 24),
            max_num_seqs=draw.randint(6, 8),
            max_model_len=40,
            host_blocks=draw.choice([0, draw.randint(4, 12)]),
        )
        driver = Driver(config, tally)
        driver.traffic(60, draw.randrange(2**32))
        driver.drain(seed=0)
    for happened in (
        "decodes waited",
        "prompts waited",
        "no whole prompt",
        "no piece",
        "reserved",
        "swapped",
        "resumed",
        "copied",
        "forked",
        "beams went on",
        "found",
        "preempted",
        "cut",
        "rejected",
        "cancelled in flight",
    ):
        assert tally[happened] >= 10, f"{happened}: {tally}"


@pytest.mark.slow
@pytest.mark.parametrize("configs", [configs, baselines], ids=["usual", "baselines"])
def test_random_transitions_match_the_reference_model_in_long_runs(configs):
    run_machine(configs, examples=40, steps=60, at_least=6_000)


@pytest.mark.default_cases("1-24-6-1", "2-9-7-1", "3-7-32-1", "4-5-7-1", "8-2-6-1")
@pytest.mark.parametrize("seeds", [1, 4])
@pytest.mark.parametrize("budget", [6, 7, 32])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 24), (2, 9), (3, 7), (4, 5), (8, 2)])
def test_every_request_ends_when_the_pool_has_blocks_for_little_more_than_one(
    block_size: int, num_blocks: int, budget: int, seeds: int
):
    config = SchedulerConfig(
        block_size, num_blocks, budget, max_num_seqs=6, max_model_len=block_size * num_blocks
    )
    tally: Counter[str] = Counter()
    for seed in range(seeds):
        driver = Driver(config, tally)
        driver.traffic(30, seed)
        for _ in range(10):
            driver.submit_new(*driver.fit(0.0, 0.999), 0, frozenset())
        driver.drain(seed)
    assert tally["preempted"] >= 6 * seeds, "too few preemptions"
    assert tally["length"] >= 10 * seeds

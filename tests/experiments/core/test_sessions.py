"""Sessions: turns that continue a conversation, drawn or recorded, in simulated and measured runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import strategies as st

from experiments.core.config import expand
from experiments.core.distributions import (
    ClosedLoop,
    ExponentialWait,
    Fixed,
    FixedWait,
    LognormalWait,
    Poisson,
    Uniform,
    UniformWait,
)
from experiments.core.drive import Recorder, drive
from experiments.core.records import (
    REJECTED,
    RequestRecord,
    RequestRecorder,
    request_records,
    step_records,
)
from experiments.core.replica_options import Change
from experiments.core.replicas import ReplicaCount, drive_replicas
from experiments.core.submit import Sender, with_arrivals
from experiments.core.workloads import (
    FIRST_ORDINARY_TOKEN,
    Mooncake,
    Sessions,
    Tools,
    WorkItem,
    Workload,
)
from pagedjax.host.types import EMPTY_PLAN, Finished, Request, Sampled, Seq, StepResult
from pagedjax.routing import ROUND_ROBIN
from pagedjax.routing.routers import PREFIX
from tests import drawn
from tests.experiments.core.summaries import BASE, GREEDY, simulated_run, summarize
from tests.experiments.core.test_replicas import Times, engines
from tests.experiments.core.test_workloads import make

SESSIONS = Sessions(
    "sessions",
    count=6,
    turns=Uniform("uniform", 1, 3),
    prompt=Uniform("uniform", 2, 5),
    output=Uniform("uniform", 1, 4),
    think=ExponentialWait("exponential", 3.0),
    tools=Tools(0.4, FixedWait("fixed", 1.5), Fixed("fixed", 6)),
    arrivals=Poisson("poisson", 0.5),
    shared_prefix=3,
)
RAW = {
    "kind": "sessions",
    "count": 12,
    "turns": {"dist": "uniform", "low": 1, "high": 4},
    "prompt": {"dist": "fixed", "value": 9},
    "output": {"dist": "uniform", "low": 2, "high": 9},
    "think": {"dist": "uniform", "low": 0.0, "high": 0.2},
    "arrivals": {"process": "poisson", "rate": 60.0},
}


class Adds:
    """Notes the prompts that engines get."""

    def __init__(self, engines_: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts: dict[str, tuple[int, ...]] = {}
        for engine in engines_:
            monkeypatch.setattr(engine, "add", self._noting(engine.add))

    def _noting(self, add):
        def noting_add(request_id: str, prompt: Sequence[int], *arguments, **options) -> None:
            self.prompts[request_id] = tuple(prompt)
            add(request_id, prompt, *arguments, **options)

        return noting_add


def assert_turns_continue(
    load: Workload, records: Sequence[RequestRecord], prompts: dict[str, tuple[int, ...]]
) -> None:
    """Each turn's prompt is the one before it, its answer and the new tokens, and it arrives after
    the answer and the wait.
    """
    by_id = {record.request_id: record for record in records}
    for item in load.items:
        record = by_id[item.request_id]
        assert record.prompt_tokens == len(prompts[item.request_id]) == item.prompt_tokens
        assert record.queue is not None
        assert record.queue >= 0, "nothing is computed before it arrives"
        if not item.follows:
            assert prompts[item.request_id] == tuple(item.prompt_token_ids)
            continue
        before = by_id[item.follows]
        answer = before.branches[0].token_ids
        conversation = prompts[item.follows] + answer + tuple(item.prompt_token_ids)
        assert prompts[item.request_id] == conversation
        assert before.end is not None
        assert record.arrival == max(item.arrival, before.end + item.think_s + item.tool_s)


@drawn.given(6, 60, seed=st.integers(0, 2**32), count=st.integers(1, 8), added=st.integers(1, 4))
def test_draws_of_sessions(seed: int, count: int, added: int):
    spec = replace(SESSIONS, count=count)
    load = make(spec, seed=seed)
    longer = make(replace(spec, count=count + added), seed=seed)
    assert longer.items[: len(load.items)] == load.items, "more sessions change none before them"
    history: dict[str, int] = {}
    for item in load.items:
        assert (item.turn == 0) == (not item.follows)
        assert item.history == history.get(item.follows, 0)
        history[item.request_id] = item.prompt_tokens + item.max_tokens
        assert (item.think_s == 0) or (item.tool_s == 0)
        if item.tool_s:
            assert len(item.prompt_token_ids) == 6, "the tool's result"
    assert load.describe()["sessions"] == count
    silent = make(replace(spec, think=None), seed=seed)
    assert [item._replace(think_s=0.0) for item in load.items] == list(silent.items)
    toolless = make(replace(spec, tools=None), seed=seed)
    assert [item.max_tokens for item in toolless.items] == [i.max_tokens for i in load.items]
    assert [item.session for item in toolless.items] == [item.session for item in load.items]


@pytest.mark.parametrize("replicas", [0, 1, 3])
@pytest.mark.parametrize("clients", [None, 2])
def test_simulated_turns_continue_their_conversations(replicas, clients, monkeypatch):
    arrivals = SESSIONS.arrivals if clients is None else ClosedLoop("closed_loop", clients)
    load = make(replace(SESSIONS, arrivals=arrivals, max_tokens=5), seed=1, vocab=1000)
    fleet = engines(max(1, replicas))
    adds = Adds(fleet, monkeypatch)
    if not replicas:
        engine = fleet[0]
        # `drive` ends a request at its drawn length itself
        _, results = drive(engine, load.items, GREEDY, engine.clock, engine.sleep, clients)
        records = request_records(results, load.items, 0.0)
    else:
        recorder = Recorder(fleet, load.items, 1)
        router = ROUND_ROBIN if replicas == 1 else PREFIX
        places = drive_replicas(fleet, router, 32, load.items, GREEDY, recorder, clients)
        records = recorder.recording(places).requests
    records = with_arrivals(records, load.items, clients)
    ended = [
        record._replace(
            branches=tuple(
                branch._replace(token_ids=(*branch.token_ids[:-1], FIRST_ORDINARY_TOKEN))
                if item.ends_at
                else branch
                for branch in record.branches
            )
        )
        for item, record in zip(load.items, records, strict=True)
    ]
    assert_turns_continue(load, ended, adds.prompts)
    if clients:
        times = sorted({record.arrival for record in records})
        open_sessions = [
            len({r.session for r in records if r.arrival <= time < _session_end(records, r)})
            for time in times
        ]
        assert max(open_sessions) == clients, "a client stays with its session"


def _session_end(records: Sequence[RequestRecord], record: RequestRecord) -> float:
    ends = [r.end for r in records if r.session == record.session]
    return max(end for end in ends if end is not None)


def test_a_failed_replica_forgets_the_answer(monkeypatch):
    """The answer of a request that is computed anew is not twice in the next prompt."""
    work = [
        WorkItem("other", 0.0, (20,) * 5, 9),
        WorkItem("a", 0.0, (20,) * 5, 6, session="s"),
        WorkItem("b", 0.0, (21, 22), 2, session="s", turn=1, follows="a", history=11),
    ]
    fleet = engines(2)
    adds = Adds(fleet, monkeypatch)
    present = ReplicaCount(2, (Change(3.0, fail=1),))  # the replica of "a"
    drive_replicas(fleet, ROUND_ROBIN, 32, work, GREEDY, Times(), None, present)
    assert len(adds.prompts["b"]) == 13
    assert adds.prompts["b"][:5] == (20,) * 5
    assert adds.prompts["b"][-2:] == (21, 22)


def test_measured_turns_continue_their_conversations(tiny_llm, monkeypatch):
    spec = replace(
        SESSIONS,
        count=4,
        think=UniformWait("uniform", 0.0, 0.01),
        tools=None,
        arrivals=Poisson("poisson", 500.0),
        shared_prefix=16,
    )
    load = make(spec, vocab=tiny_llm.tokenizer.vocab_size)
    engine = tiny_llm.engine
    adds = Adds([engine], monkeypatch)
    start, results = drive(engine, load.items, GREEDY)
    records = with_arrivals(request_records(results, load.items, start), load.items, None)
    assert_turns_continue(load, records, adds.prompts)
    size = engine.config.block_size
    summary = summarize(records, step_records(results, start, size), size)
    assert summary["prefix_hit_share"] > 0.2, "the conversation so far is in the cache"
    # the same tokens as without sessions: each whole prompt on its own
    alone = [
        WorkItem(f"alone-{name}", 0.0, prompt, _limit(load, name))
        for name, prompt in adds.prompts.copy().items()
    ]
    start, results = drive(engine, alone, GREEDY)
    tokens = {
        record.request_id.removeprefix("alone-"): record.branches[0].token_ids
        for record in request_records(results, alone, start)
    }
    assert tokens == {record.request_id: record.branches[0].token_ids for record in records}


def _limit(load: Workload, name: str) -> int:
    return next(item.max_tokens for item in load.items if item.request_id == name)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"records": "sums"},
        {"replicas": {"count": 2, "router": "prefix"}},
        {"pools": {"prefill": {"count": 1}, "decode": {"count": 1}}},
        {"sampling": {"temperature": 0.8, "ignore_eos": True, "n": 2}},
    ],
    ids=["engine", "sums", "replicas", "pools", "branches"],
)
def test_runs_of_sessions(change):
    measured = simulated_run({**BASE, "workload": RAW, **change})
    assert measured.failed is None
    arrivals = [request.arrival for request in measured.requests]
    assert arrivals == sorted(arrivals)
    by_turn = {(r.session, r.turn): r for r in measured.requests}
    for request in measured.requests:
        before = by_turn.get((request.session, request.turn - 1))
        if before is not None:
            assert before.end is not None
            assert request.arrival >= before.end
            assert request.prompt_tokens == before.prompt_tokens + before.max_tokens + 9
    assert measured.workload.describe()["last_arrival_s"] == arrivals[-1]
    if "pools" not in change:
        assert measured.summary["prefix_hit_share"] > 0.3


def lines(*rows: tuple[float, int, int, list[int]]) -> str:
    return "\n".join(
        json.dumps(
            {
                "timestamp": 1000 * time,
                "input_length": prompt,
                "output_length": output,
                "hash_ids": ids,
            }
        )
        for time, prompt, output, ids in rows
    )


TALKS = lines(
    (0, 1100, 20, [0, 1, 2]),
    (1, 600, 20, [0, 9]),  # one block alone is shared
    (2, 1300, 10, [0, 1, 3]),  # continues the first: 1100 + 20 < 1300
    (3, 1130, 10, [0, 1, 5]),  # nothing is left to continue: a session of its own
    (4, 1140, 5, [0, 1, 6]),  # asks the last one again: no turn, because 1130 + 10 = 1140
    (5, 1320, 5, [0, 1, 3]),  # continues the third, whose whole blocks are [0, 1]
)


def test_requests_of_a_mooncake_file_become_turns():
    spec = Mooncake("mooncake", "m.jsonl", sessions=True)
    load = make(spec, TALKS, vocab=5000)
    follows = {item.request_id: item.follows for item in load.items}
    assert follows == {
        "r00000": "",
        "r00001": "",
        "r00002": "r00000",
        "r00003": "",
        "r00004": "",
        "r00005": "r00004",
    }
    plain = make(replace(spec, sessions=False), TALKS, vocab=5000)
    assert [i.prompt_tokens for i in load.items] == [i.prompt_tokens for i in plain.items]
    third = load.items[2]
    assert (third.history, len(third.prompt_token_ids), third.arrival) == (1120, 180, 2.0)
    assert tuple(third.prompt_token_ids) == tuple(plain.items[2].prompt_token_ids)[1120:]
    two_rounds = make(replace(spec, rounds=2), TALKS, vocab=5000)
    assert [i.follows for i in two_rounds.items[6:8]] == ["", ""], "a round has its own prompts"
    assert two_rounds.items[8].follows == "r00006"
    waiting = make(
        replace(spec, think=LognormalWait("lognormal", 0.0, 1.0, 9.0)), TALKS, vocab=5000
    )
    assert waiting.items[2].arrival == 0.0
    assert 0 < waiting.items[2].think_s <= 9.0


def test_a_simulated_run_of_a_recorded_session_finds_the_answer_in_the_cache(tmp_path):
    (tmp_path / "m.jsonl").write_text(TALKS, encoding="utf-8")
    engine = {"max_num_batched_tokens": 2048, "max_model_len": 2048, "max_num_seqs": 4}
    raw = {
        **BASE,
        "engine": {**engine, "block_size": 16},
        "cache_tokens": 16384,
        "workload": {"kind": "mooncake", "file": "m.jsonl", "sessions": True},
    }
    summary = simulated_run(raw, tmp_path).summary
    # blocks of 16: [0] of r1, [0, 1] of r3 and r4, and the conversations of r2 (1120) and r5 (1145)
    hits = 512 + 1024 + 1024 + (1120 - 1) // 16 * 16 + (1145 - 1) // 16 * 16
    assert summary["prefix_hit_share"] == pytest.approx(
        hits / (1100 + 600 + 1300 + 1130 + 1140 + 1320)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sampling": {"temperature": 0.0}, "simulate": None},
            "ignore_eos is false; set it to true",
        ),
        (
            {"sampling": {"ignore_eos": True, "stop_token_ids": [3]}, "simulate": None},
            "stop_token_ids is given; leave it out",
        ),
        ({"workload": {**RAW, "count": 0}}, r"workload\.count is 0; it must be at least 1"),
        (
            {"workload": {**RAW, "think": {"dist": "fixed", "value": -1}}},
            r"think\.value is -1\.0; it",
        ),
        (
            {"workload": {**RAW, "think": {"dist": "uniform", "low": 2, "high": 1}}},
            r"high is 1\.0; it must be at least low \(2\.0\)",
        ),
        (
            {
                "workload": {
                    **RAW,
                    "tools": {
                        "share": 2,
                        "seconds": {"dist": "fixed", "value": 1},
                        "result": {"dist": "fixed", "value": 1},
                    },
                }
            },
            r"share is 2\.0; it must be from 0 to 1",
        ),
    ],
)
def test_sessions_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        expand({**BASE, "workload": RAW, **change}, folder=Path())


def test_waits_without_sessions_are_refused():
    with pytest.raises(
        ValueError, match="think is given and sessions is false; set sessions: true"
    ):
        Mooncake("mooncake", "m.jsonl", think=FixedWait("fixed", 1.0))


def test_a_rejected_turn_ends_its_session():
    """The second turn is turned away: the third one is not sent, and the client is free."""
    work = [
        WorkItem("a", 0.0, (20,), 1, session="s"),
        WorkItem("b", 0.0, (20,), 1, session="s", turn=1, follows="a", history=2, think_s=1.0),
        WorkItem("c", 0.0, (20,), 1, session="s", turn=2, follows="b", history=4),
        WorkItem("d", 0.0, (20,), 1),
    ]
    sender = Sender(work, GREEDY, clients=1)
    results = [result_of("a", 1.0, "length"), result_of("b", 3.0, REJECTED)]
    recorder = RequestRecorder(work, 0.0)
    times = []
    for result in results:
        times.append(sender.next())
        item, _ = sender.take_next()
        recorder.add(result)
        assert sender.end_branches(result, result.finished) == [item.request_id]
    assert (times, sender.next()) == ([0.0, 2.0], 3.0)
    assert sender.take_next()[0].request_id == "d"
    assert not sender.has_unsent
    recorder.add(result_of("d", 4.0, "length"))
    records = with_arrivals(recorder.records(), work, 1)
    assert [record.branches[0].finish_reason for record in records] == [
        "length",
        REJECTED,
        REJECTED,
        "length",
    ]
    assert [record.rejected_at for record in records] == [None, 3.0, 3.0, None]
    assert [record.e2e for record in records] == [1.0, None, None, 1.0]
    assert records[3].arrival == 3.0


def result_of(request_id: str, finished: float, reason: str) -> StepResult:
    """A step in which a request ended, with a token if it was not rejected."""
    seqs = () if reason == REJECTED else (Seq(Request(request_id, 1, 1), 0, 2, 1),)
    plan = EMPTY_PLAN._replace(seqs=seqs)
    tokens = () if reason == REJECTED else (Sampled(0, (request_id,), (5,)),)
    events = (*tokens, Finished(0, request_id, cast(Any, reason), len(tokens)))
    return StepResult(plan, events, finished - 1, finished, 1.0, 1, 0)

"""Frames match the states they were made from: every picture, every block gained or lost, every log
entry.
"""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from immutables import Map

from pagedjax.host import blocks, scheduler
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import FCFS, vtc
from pagedjax.host.types import Request, Verified
from pagedjax.host.views import held
from pagedjax.viewer import frames, picture, read_recording, text
from pagedjax.viewer.drafts import drafts_of
from pagedjax.viewer.picture import Picture
from tests import drawn
from tests.engine.runs import sampled
from tests.host.test_event_log import SMALL
from tests.viewer.runs import (
    GOLDENS,
    Writer,
    any_run,
    brute_force_empty,
    drafting_run,
    names,
    pictures,
    random_run,
    without_why,
)

runs = {
    "seed": st.integers(0, 2**32 - 1),
    "blocks_": st.integers(6, 14),
    "host": st.sampled_from([0, 4, 8]),
}
WAYS = [
    {},
    {"mixed_steps": False},
    {"reservation": "pow2", "num_blocks": 16, "host_blocks": 0},
    {"chunked_prefill": False},
    {"views": (View(1, (0,)),)},
    {"views": (ALL, View(2)), "num_blocks": 30},
]
WAYS += [{"views": (View(1, (0,)),)}, {"views": (ALL, View(2)), "num_blocks": 30}]


def check(run_frames: list, transitions: list) -> None:
    """Every frame, as it comes out of JSON, against the state that the scheduler was in."""
    steps = [transition for transition in transitions if transition.kind == "schedule"]
    called = names(run_frames)
    for frame, view in pictures(json.loads(json.dumps(run_frames))):
        if view.at_rest:
            assert not view.rows
            continue
        state = steps[0].state
        plan = steps.pop(0).plan
        idle = blocks.idle_ids(state.pool)
        assert view.step == plan.step
        tables = {called[n]: table for n, table in view.tables.items()}
        assert tables == {seq.request_id: seq.blocks for seq in state.running.seqs}
        owners = Counter(block for table in view.tables.values() for block in table if block)
        assert owners == dict(state.pool.owners)
        assert set(view.published) - set(owners) == set(idle)
        assert set(view.published) == set(state.pool.hashes)
        assert [called[n] for n in view.waiting] == [seq.request_id for seq in state.waiting]
        assert {called[n]: b for n, b in view.away} == {
            s.request_id: held(s.blocks) for s in state.waiting if s.blocks
        }
        ids = [seq.request_id for seq in plan.seqs]
        rows = list(zip(ids, plan.starts, plan.counts, plan.lengths, strict=True))
        assert [(called[n], *row[:3]) for n, *row in view.rows] == rows
        assert [drafts_of(row) for row in view.rows] == list(plan.drafts or (0,) * len(rows))
        empty = brute_force_empty(state, plan)
        assert view.counts == (plan.num_tokens, plan.blocks_used, len(idle), empty)
        packed = {seq.arrival for seq in plan.seqs}
        assert {called[n]: computed for n, computed, _ in view.still} == {
            s.request_id: s.computed for s in scheduler.running(state) if s.arrival not in packed
        }
        assert len(frame.get("sampled", plan.seqs)) == len(plan.seqs)
        reasons = whys(view)
        without_row = {n for n, *_ in view.still} | set(view.waiting)
        assert reasons.keys() == without_row
        order = {entry[1] for entry in reasons.values()} - {None}
        assert order <= {n for n, (_, rival) in reasons.items() if rival is None}
    assert steps == []
    kinds = ["commit", *(change.kind for change in transitions)]
    last = [kind for kind in kinds if kind in ("schedule", "commit")][-1]
    # else the run ends within a step
    assert run_frames[-1].get("rest", False) == (last == "commit")


def whys(view: Picture) -> dict[int, tuple[str, int | None]]:
    """The sentence of each request without a row, and the request that is before it."""
    reasons: dict[int, tuple[str, int | None]] = {}
    for sentence, rival, numbers, _ in view.why:
        reasons |= dict.fromkeys(numbers or (), (sentence, rival))
    for sentence, rival, numbers, _ in view.why:
        if numbers is None:
            without_reason = {n for n, *_ in view.still} | set(view.waiting)
            reasons |= dict.fromkeys(without_reason - reasons.keys(), (sentence, rival))
    return reasons


def folded(transitions: list) -> list[dict]:
    return list(read_recording.fold(transitions, policy=FCFS))


def log_of(run_frames: list) -> list:
    """The entries of the frames' logs, each with its step."""
    return [
        (frame["step"], *entry)
        for frame in run_frames
        for entry in (*frame.get("before", ()), *frame.get("after", ()))
    ]


@drawn.examples(6, 60)
def test_every_frame_shows_the_state_while_its_step_ran(tmp_path, number):
    def holds(seed: int, blocks_: int, host: int, way: dict) -> None:
        config = {"num_blocks": blocks_, "host_blocks": host, **way}
        transitions = random_run(tmp_path / "run.jsonl", seed, **config)
        check(folded(transitions), transitions)

    drawn.check(number, holds, **runs, way=st.sampled_from(WAYS))


@drawn.examples(6, 60)
def test_every_frame_of_a_run_with_drafts_shows_its_state(tmp_path, number):
    def holds(seed: int, blocks_: int, host: int, budget: int) -> None:
        config = {"num_blocks": blocks_ + 4, "host_blocks": host, "max_num_batched_tokens": budget}
        transitions = drafting_run(tmp_path / "run.jsonl", seed, **config)
        check(folded(transitions), transitions)

    drawn.check(number, holds, **runs, budget=st.integers(4, 20))


@drawn.examples(6, 60)
def test_frames_count_the_drafts_of_every_row(tmp_path, number):
    """Each row has its drafts, the accepted ones, and the tokens that were kept; the totals are
    sums over steps.
    """

    def holds(seed: int) -> None:
        transitions = drafting_run(tmp_path / "run.jsonl", seed)
        run_frames = [frame for frame, view in pictures(folded(transitions)) if not view.at_rest]
        plans = [transition.plan for transition in transitions if transition.plan]
        commits = [transition.events for transition in transitions if transition.kind == "commit"]
        total = [0, 0]
        for frame, plan, events in zip(run_frames, plans, commits, strict=True):
            accepted: dict[str, int] = {}
            for event in events:
                if isinstance(event, Verified):
                    accepted |= dict(zip(event.request_ids, event.accepted, strict=True))
            tokens = sampled([SimpleNamespace(events=events)])
            names = [seq.request_id for seq in plan.seqs]
            verified = [accepted.get(name) for name in names] if accepted else []
            assert frame.get("accepted", []) == verified
            expected = []
            for name in names:
                row = tokens.get(name, [])
                if name in accepted:
                    assert len(row) == accepted[name] + 1
                    expected.append(row)
                else:
                    expected.append(row[0] if row else None)
            assert frame.get("sampled", [None] * len(names)) == expected
            rows = zip(names, plan.drafts, strict=False)
            total[0] += sum(k for name, k in rows if name in accepted)
            total[1] += sum(accepted.values())
            assert frame.get("verified", total) == total
            assert ("verified" in frame) == bool(accepted)

    drawn.check(number, holds, seed=st.integers(0, 2**32 - 1))


def run_by_hand(requests, steps, blocks_: int) -> list[dict]:
    """The frames of requests in blocks of 2; steps: (drafts that are offered, samples)."""
    config = SMALL._replace(block_size=2, num_blocks=blocks_, max_num_batched_tokens=8)
    fold = frames.begin(config)
    state = scheduler.init(config)
    for request in requests:
        state = scheduler.submit(state, request)
        fold = frames.passed(fold, state)
    run_frames = []
    for offered, samples in steps:
        state, plan = scheduler.schedule(state, FCFS, offered)
        fold = frames.scheduled(fold, state, plan)
        state, events = scheduler.commit(state, plan, samples or [7] * len(plan.seqs))
        fold, frame = frames.committed(fold, state, events)
        run_frames.append(frame)
    return run_frames


def test_drafts_by_hand(tmp_path):
    """Two of three drafts of a are accepted; the third needs a block, which is given back."""
    steps = [({}, [7]), ({"a": 3}, [(8, 9, 5)]), ({}, [6])]
    run_frames = run_by_hand([Request("a", 3, 9)], steps, blocks_=6)
    assert [view.rows for _, view in pictures(run_frames)] == [
        ((0, 0, 3, 3),),
        ((0, 3, 4, 4, 3),),
        ((0, 6, 1, 7),),
    ]
    assert [frame.get("sampled") for frame in run_frames] == [[7], [[8, 9, 5]], [6]]
    assert [frame.get("accepted") for frame in run_frames] == [None, [2], None]
    assert [view.verified for _, view in pictures(run_frames)] == [(0, 0), (3, 2), (3, 2)]
    assert run_frames[1]["after"] == [["freed", 0, [4]]]
    assert text.generated(run_frames) == {0: [7, 8, 9, 5, 6]}


def test_a_recording_without_drafts_gives_the_same_frames_as_before():
    """The recording and its frames are of the version before drafts, but for the ids of blocks, which
    are those of a queue now: an old recording opens, and nothing is new.
    """
    run = read_recording.read(GOLDENS / "run.jsonl")
    run_frames = json.loads(json.dumps(run.frames))
    assert sum("why" in frame for frame in run_frames) > 3
    assert without_why(run_frames) == json.loads((GOLDENS / "frames.json").read_text())


@drawn.examples(6, 60)
def test_a_page_can_start_from_a_whole_picture(tmp_path, number):
    """The whole picture for a late page equals the sum of all frames."""

    def holds(seed: int, blocks_: int, host: int, at: int) -> None:
        config = {"num_blocks": blocks_, "host_blocks": host}
        run_frames = folded(any_run(tmp_path / "run.jsonl", seed, **config))
        after = [view for _, view in pictures(run_frames)]
        at = min(at, len(run_frames) - 1)
        late = picture.apply(Picture(), json.loads(json.dumps(picture.whole(after[at]))))
        assert late == after[at]
        for frame, expected in zip(run_frames[at + 1 :], after[at + 1 :], strict=True):
            late = picture.apply(late, frame)
            assert late == expected

    drawn.check(number, holds, **runs, at=st.integers(0, 60))


def blocks_of(view: Picture) -> set[tuple[int, int]]:
    """(request, block) of all tables."""
    return {(n, block) for n, table in view.tables.items() for block in table}


@drawn.examples(6, 60)
def test_the_log_accounts_for_every_block(tmp_path, number):
    def holds(seed: int, blocks_: int, host: int) -> None:
        config = {"num_blocks": blocks_, "host_blocks": host}
        old = Picture()
        since = []
        for frame, new in pictures(folded(any_run(tmp_path / "run.jsonl", seed, **config))):
            log = since + frame.get("before", [])
            came = {(e[1], b) for e in log if e[0] in ("shared", "allocated") for b in e[2]}
            came |= {(e[1], e[3]) for e in log if e[0] == "copied"}
            assert blocks_of(new) - blocks_of(old) <= came
            owned, still_owned = ({b for _, b in blocks_of(view)} for view in (old, new))
            freed = {b for e in log if e[0] in ("freed", "kept") for b in e[2]}
            assert owned - still_owned <= freed
            # it was free
            allocated = {b for e in log if e[0] == "allocated" for b in e[2]}
            assert allocated & owned <= freed
            lost = {b for e in log if e[0] == "evicted" for b in e[2]}
            assert set(old.published) - set(new.published) <= lost or ["forgot", None] in log
            old = new
            since = frame.get("after", [])

    drawn.check(number, holds, **runs)


@drawn.examples(6, 60)
def test_log_entries_of_a_request_are_in_order(tmp_path, number):
    """Submitted, admitted, working, ended; a preempted request is admitted again before any other
    entry.
    """
    works = {"shared", "allocated", "copied", "cached", "beamed", "forked"}
    changes = {"admitted": True, "resumed": True, "preempted": False, "ended": False}

    def holds(seed: int, blocks_: int, host: int) -> None:
        config = {"num_blocks": blocks_, "host_blocks": host}
        run_frames = folded(random_run(tmp_path / "run.jsonl", seed, **config))
        log = log_of(run_frames)
        for n, *_, first in (record for frame in run_frames for record in frame.get("came", ())):
            entries = [kind for _, kind, owner, *_ in log if owner == n]
            if first is None:
                assert entries[0] == "submitted"
            assert entries.count("ended") <= 1
            inside = first is not None  # a branch begins on the blocks of the first one
            for event in entries:
                inside = changes.get(event, inside)
                assert inside or event not in works, entries
            if "ended" in entries:
                assert set(entries[entries.index("ended") + 1 :]) <= {"freed", "kept"}

    drawn.check(number, holds, **runs)


def test_log_entries_of_a_preempted_request(tmp_path):
    """By hand: a and b fill three blocks of 2 with their prompts; b is preempted and admitted again
    twice.
    """
    run_frames = run_by_hand([Request(name, 2, 3) for name in "ab"], [({}, None)] * 5, blocks_=3)
    assert [entry for entry in log_of(run_frames) if entry[2] == 1] == [
        (0, "submitted", 1),
        (0, "admitted", 1, 2, 0),
        (0, "allocated", 1, [2]),
        (1, "preempted", 1, False),
        (1, "freed", 1, [2]),
        (3, "admitted", 1, 3, 0),
        (3, "allocated", 1, [2, 3]),
        (4, "ended", 1, "length", 3),
        (4, "freed", 1, [2, 3]),
    ]


def test_a_reused_id_is_another_request(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = Writer(path, SMALL._replace(num_blocks=6))
    for _ in range(2):
        writer.submit(Request("same", 2, 1))
        writer.commit(writer.schedule(), [5])
    writer.recorder.close()
    run_frames = read_recording.read(path).frames
    assert [record[:2] for frame in run_frames for record in frame.get("came", ())] == [
        [0, "same"],
        [1, "same"],
    ]
    assert [frame.get("rest", False) for frame in run_frames] == [False, True, False, True]


def test_a_run_that_ends_within_a_step_shows_that_step(tmp_path):
    path = tmp_path / "run.jsonl"
    random_run(path, 3)
    lines = path.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if line.startswith('{"schedule"'))
    path.write_text("".join(lines[: last + 1]) + '{"commit":{"sam')
    cut = read_recording.read(path)
    assert cut.truncated
    assert "rest" not in cut.frames[-1]
    assert "sampled" not in cut.frames[-1]


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ((), (), None),
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 3), [1, 1, []]),
        ((1, 2), (1, 5, 2), [1, 1, [5]]),
        ((1, 1), (1,), [1, 0, []]),
        ((), (4,), [0, 0, [4]]),
        (((1, 2), (3, 4)), ((1, 2), (5, 6), (3, 4)), [1, 1, [[5, 6]]]),
    ],
)
def test_a_splice_contains_only_the_changes(old, new, change):
    assert picture.splice(old, new) == change
    assert picture.spliced(old, change) == new


@drawn.given(30, 100, st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_applying_a_splice_gives_the_new_sequence(old, new):
    assert picture.spliced(tuple(old), picture.splice(tuple(old), tuple(new))) == tuple(new)


def test_a_table_that_lost_its_hole_and_all_behind_it_has_changed():
    changes = frames._table_changes(Map({1: (5, 0, 4), 2: (5, 6)}), {1: (5,), 2: (5, 6, 7)})
    assert changes == [[1, 1, []], [2, 2, [7]]]


def test_a_step_shows_the_memory_of_its_policy_and_who_was_rejected(tmp_path, monkeypatch):
    def reject(memory, waiting):
        return [seq.request_id for seq in waiting if seq.request.service_class == "late"]

    policy = vtc()._replace(name="mine", reject=reject)
    path = tmp_path / "run.jsonl"
    writer = Writer(path, SMALL, policy)
    writer.submit(Request("a", 3, 2, user="alice"))
    writer.submit(Request("b", 3, 2, service_class="late"))
    for _ in range(2):
        plan = writer.schedule()
        writer.commit(plan, [1] * len(plan.seqs))
    writer.recorder.close()
    run = read_recording.read(path, {"mine": policy})
    first, second, *_ = [view for _, view in pictures(run.frames) if not view.at_rest]
    assert first.memory == "(no user): 0, 1 waiting\nalice: 0, 1 waiting"
    assert second.memory == "alice: 5, 0 waiting"
    assert picture.apply(Picture(), picture.whole(second)).memory == second.memory
    assert ["ended", 1, "rejected", 0] in [
        entry for frame in run.frames for entry in frame.get("after", ())
    ]
    monkeypatch.setattr(frames, "MOST_TEXT", 9)
    assert frames.memory_text(writer.state, policy) == "alice: 5, ..."

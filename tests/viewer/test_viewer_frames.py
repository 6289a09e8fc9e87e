"""Frames match the states they were made from: every picture, every block gained or lost, every log
entry.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import strategies as st
from immutables import Map

from pagedjax.host import blocks, event_log, scheduler
from pagedjax.host.event_log import Commit, Schedule, Submit
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.policies import FCFS
from pagedjax.host.types import Request, Sampled, Verified
from pagedjax.host.views import held
from pagedjax.viewer import frames, picture, read_recording, text
from pagedjax.viewer.drafts import drafts_of
from pagedjax.viewer.picture import Picture
from tests import drawn
from tests.host.test_event_log import SMALL
from tests.viewer.runs import (
    GOLDENS,
    any_run,
    brute_force_empty,
    drafting_run,
    names,
    pictures,
    random_run,
)

runs = {
    "seed": st.integers(0, 2**32 - 1),
    "blocks_": st.integers(6, 14),
    "host": st.sampled_from([0, 4, 8]),
}
WAYS = [
    {},
    {"mixed_steps": False},
    {"reservation": "pow2", "num_blocks": 16},
    {"chunked_prefill": False},
]
WAYS += [{"views": (View(1, (0,)),)}, {"views": (ALL, View(2)), "num_blocks": 30}]


def check(run_frames: list, transitions: list) -> None:
    """Every frame, as it comes out of JSON, against the state that the scheduler was in."""
    steps = [transition for transition in transitions if transition.kind == "schedule"]
    called = names(run_frames)
    for frame, view in pictures(json.loads(json.dumps(run_frames))):
        if view.rest:
            assert not view.rows
            continue
        state = steps[0].state
        plan = steps.pop(0).plan
        assert view.step == plan.step
        tables = {called[n]: table for n, table in view.tables.items()}
        assert tables == {seq.request_id: seq.blocks for seq in state.running.seqs}
        owners = Counter(block for table in view.tables.values() for block in table if block)
        assert owners == dict(state.pool.owners)
        assert set(view.published) - set(owners) == set(blocks.idle_ids(state.pool))
        assert set(view.published) == set(state.pool.hashes)
        assert [called[n] for n in view.waiting] == [seq.request_id for seq in state.waiting]
        assert {called[n]: b for n, b in view.away} == {
            s.request_id: held(s.blocks) for s in state.waiting if s.blocks
        }
        rows = [
            (s.request_id, *row)
            for s, *row in zip(plan.seqs, plan.starts, plan.counts, plan.lengths, strict=True)
        ]
        assert [(called[n], *row[:3]) for n, *row in view.rows] == rows
        assert [drafts_of(row) for row in view.rows] == list(plan.drafts or (0,) * len(rows))
        empty = brute_force_empty(state, plan)
        assert view.counts == (
            plan.num_tokens,
            plan.blocks_used,
            len(blocks.idle_ids(state.pool)),
            empty,
        )
        still = {called[n]: computed for n, computed, _ in view.still}
        packed = {seq.arrival for seq in plan.seqs}
        assert still == {
            s.request_id: s.computed for s in scheduler.running(state) if s.arrival not in packed
        }
        assert len(frame.get("sampled", plan.seqs)) == len(plan.seqs)
    assert steps == []
    *_, last = [
        "commit",
        *(change.kind for change in transitions if change.kind in ("schedule", "commit")),
    ]
    # else the run ends within a step
    assert run_frames[-1].get("rest", False) == (last == "commit")


@drawn.examples(12, 60)
def test_every_frame_shows_the_state_while_its_step_ran(tmp_path: Path, number: int):
    def holds(seed: int, blocks_: int, host: int, way: dict) -> None:
        config = {
            "num_blocks": blocks_,
            "host_blocks": host if way.get("reservation") is None else 0,
        } | way
        transitions = random_run(tmp_path / "run.jsonl", seed, **config)
        check(list(read_recording.fold(transitions)), transitions)

    drawn.check(number, holds, **runs, way=st.sampled_from(WAYS))


@drawn.examples(12, 60)
def test_every_frame_of_a_run_with_drafts_shows_its_state(tmp_path: Path, number: int):
    def holds(seed: int, blocks_: int, host: int, budget: int) -> None:
        config = {"num_blocks": blocks_ + 4, "host_blocks": host, "max_num_batched_tokens": budget}
        transitions = drafting_run(tmp_path / "run.jsonl", seed, **config)
        check(list(read_recording.fold(transitions)), transitions)

    drawn.check(number, holds, **runs, budget=st.integers(4, 20))


@drawn.examples(12, 60)
def test_frames_count_the_drafts_of_every_row(tmp_path: Path, number: int):
    def holds(seed: int) -> None:
        check_counts(tmp_path, seed)

    drawn.check(number, holds, seed=st.integers(0, 2**32 - 1))


def check_counts(tmp_path: Path, seed: int) -> None:
    """Each row has its drafts, the accepted ones, and the tokens that were kept; the totals are
    sums over steps.
    """
    transitions = drafting_run(tmp_path / "run.jsonl", seed)
    run_frames = [
        frame for frame, view in pictures(list(read_recording.fold(transitions))) if not view.rest
    ]
    plans = [transition.plan for transition in transitions if transition.plan]
    commits = [transition.events for transition in transitions if transition.kind == "commit"]
    total = [0, 0]
    for frame, plan, events in zip(run_frames, plans, commits, strict=True):
        names = [seq.request_id for seq in plan.seqs]
        (right,) = [
            dict(zip(e.request_ids, e.accepted, strict=True))
            for e in events
            if isinstance(e, Verified)
        ] or [{}]
        (pairs,) = [
            list(zip(e.request_ids, e.token_ids, strict=True))
            for e in events
            if isinstance(e, Sampled)
        ] or [[]]
        assert frame.get("accepted", []) == ([right.get(name) for name in names] if right else [])
        tokens = [[token for owner, token in pairs if owner == name] for name in names]
        single = [row[0] if row else None for row in tokens]
        expected = [
            row if name in right else token
            for name, row, token in zip(names, tokens, single, strict=True)
        ]
        assert frame.get("sampled", [None] * len(names)) == expected
        assert all(
            len(row) == right[name] + 1
            for name, row in zip(names, tokens, strict=True)
            if name in right
        )
        total[0] += sum(k for name, k in zip(names, plan.drafts, strict=False) if name in right)
        total[1] += sum(right.values())
        assert frame.get("verified", total) == total
        assert ("verified" in frame) == bool(right)


def test_drafts_by_hand(tmp_path: Path):
    """Two of three drafts of a are accepted; the third needs a block, which is given back."""
    config = SMALL._replace(block_size=2, num_blocks=6, max_num_batched_tokens=8)
    fold = frames.begin(config)
    state = scheduler.submit(scheduler.init(config), Request("a", 3, 9))
    fold = frames.passed(fold, state)
    run_frames = []
    for offered, sampled in (({}, [7]), ({"a": 3}, [(8, 9, 5)]), ({}, [6])):
        state, plan = scheduler.schedule(state, FCFS, offered)
        fold = frames.scheduled(fold, state, plan)
        state, events = scheduler.commit(state, plan, sampled)
        fold, frame = frames.committed(fold, state, events)
        run_frames.append(frame)
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
    """The recording and its frames are of the version before drafts: an old recording opens, and
    nothing is new.
    """
    run = read_recording.read(GOLDENS / "run.jsonl")
    assert json.loads(json.dumps(run.frames)) == json.loads((GOLDENS / "frames.json").read_text())


@drawn.examples(12, 60)
def test_a_page_can_start_from_a_whole_picture(tmp_path: Path, number: int):
    """The whole picture for a late page equals the sum of all frames."""

    def holds(seed: int, blocks_: int, host: int, at: int) -> None:
        run_frames = list(
            read_recording.fold(
                any_run(tmp_path / "run.jsonl", seed, num_blocks=blocks_, host_blocks=host)
            )
        )
        after = [view for _, view in pictures(run_frames)]
        at = min(at, len(run_frames) - 1)
        late = picture.apply(Picture(), json.loads(json.dumps(picture.whole(after[at]))))
        assert late == after[at]
        for frame, expected in zip(run_frames[at + 1 :], after[at + 1 :], strict=True):
            late = picture.apply(late, frame)
            assert late == expected

    drawn.check(number, holds, **runs, at=st.integers(0, 60))


@drawn.examples(12, 60)
def test_the_log_accounts_for_every_block(tmp_path: Path, number: int):
    def holds(seed: int, blocks_: int, host: int) -> None:
        run_frames = list(
            read_recording.fold(
                any_run(tmp_path / "run.jsonl", seed, num_blocks=blocks_, host_blocks=host)
            )
        )
        old = Picture()
        since = []
        for frame, new in pictures(run_frames):
            log = since + frame.get("before", [])
            came = Counter((e[1], b) for e in log if e[0] in ("shared", "allocated") for b in e[2])
            came += Counter((e[1], e[3]) for e in log if e[0] == "copied")
            gained = {
                (n, b)
                for n, table in new.tables.items()
                for b in table
                if b not in old.tables.get(n, ())
            }
            assert gained <= set(came)
            was, owned = (
                {b for table in view.tables.values() for b in table} for view in (old, new)
            )
            freed = {b for e in log if e[0] in ("freed", "kept") for b in e[2]}
            assert was - owned <= freed
            # it was free
            assert all(b not in was or b in freed for e in log if e[0] == "allocated" for b in e[2])
            lost = {b for e in log if e[0] == "evicted" for b in e[2]}
            assert set(old.published) - set(new.published) <= lost or ["forgot", None] in log
            old = new
            since = frame.get("after", [])

    drawn.check(number, holds, **runs)


@drawn.examples(12, 60)
def test_log_entries_of_a_request_are_in_order(tmp_path: Path, number: int):
    """Submitted, admitted, working, ended; a preempted request is admitted again before any other
    entry.
    """

    def holds(seed: int, blocks_: int, host: int) -> None:
        run_frames = list(
            read_recording.fold(
                random_run(tmp_path / "run.jsonl", seed, num_blocks=blocks_, host_blocks=host)
            )
        )
        log = [
            entry
            for frame in run_frames
            for part in ("before", "after")
            for entry in frame.get(part, ())
        ]
        works = {"shared", "allocated", "copied", "cached", "beamed", "forked"}
        for n, *_, first in (record for frame in run_frames for record in frame.get("came", ())):
            entries = [entry[0] for entry in log if entry[1] == n]
            if first is None:
                assert entries[0] == "submitted"
            assert entries.count("ended") <= 1
            inside = first is not None  # a branch begins on the blocks of the first one
            for event in entries:
                inside = {
                    "admitted": True,
                    "resumed": True,
                    "preempted": False,
                    "ended": False,
                }.get(event, inside)
                assert inside or event not in works, entries
            if "ended" in entries:
                assert set(entries[entries.index("ended") + 1 :]) <= {"freed", "kept"}

    drawn.check(number, holds, **runs)


def test_log_entries_of_a_preempted_request(tmp_path: Path):
    """By hand: a and b fill three blocks of 2 with their prompts; b is preempted and admitted again
    twice.
    """
    config = SMALL._replace(block_size=2, num_blocks=3, max_num_batched_tokens=8)
    fold = frames.begin(config)
    state = scheduler.init(config)
    run_frames = []
    for name in "ab":
        state = scheduler.submit(state, Request(name, 2, 3))
        fold = frames.passed(fold, state)
    while state.waiting or state.running.seqs:
        state, plan = scheduler.schedule(state, FCFS)
        fold = frames.scheduled(fold, state, plan)
        state, events = scheduler.commit(state, plan, [7] * len(plan.seqs))
        fold, frame = frames.committed(fold, state, events)
        run_frames.append(frame)
    story = [
        (f["step"], *e)
        for f in run_frames
        for part in ("before", "after")
        for e in f.get(part, ())
        if e[1] == 1
    ]
    assert story == [
        (0, "submitted", 1),
        (0, "admitted", 1, 2, 0),
        (0, "allocated", 1, [2]),
        (1, "preempted", 1, False),
        (1, "freed", 1, [2]),
        (3, "admitted", 1, 3, 0),
        (3, "allocated", 1, [1, 2]),
        (4, "ended", 1, "length", 3),
        (4, "freed", 1, [1, 2]),
    ]


def test_a_reused_id_is_another_request(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    config = SMALL._replace(num_blocks=6)
    with_two = event_log.Recorder(path, config)
    state = scheduler.init(config)
    for _ in range(2):
        request = Request("same", 2, 1)
        state = scheduler.submit(state, request)
        with_two.write(Submit(request))
        state, plan = scheduler.schedule(state, FCFS)
        with_two.write(Schedule(plan))
        state, events = scheduler.commit(state, plan, [5])
        with_two.write(Commit(plan, [5], {}, {}, events))
    with_two.close()
    run_frames = read_recording.read(path).frames
    assert [record[:2] for frame in run_frames for record in frame.get("came", ())] == [
        [0, "same"],
        [1, "same"],
    ]
    assert [frame.get("rest", False) for frame in run_frames] == [False, True, False, True]


def test_a_run_that_ends_within_a_step_shows_that_step(tmp_path: Path):
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
def test_a_splice_contains_only_the_changes(old: tuple, new: tuple, change: list | None):
    assert picture.splice(old, new) == change
    assert picture.spliced(old, change) == new


@drawn.given(30, 100, st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_applying_a_splice_gives_the_new_sequence(old: list, new: list):
    assert picture.spliced(tuple(old), picture.splice(tuple(old), tuple(new))) == tuple(new)


def test_a_table_that_lost_its_hole_and_all_behind_it_has_changed():
    changes = frames._table_changes(Map({1: (5, 0, 4), 2: (5, 6)}), {1: (5,), 2: (5, 6, 7)})
    assert changes == [[1, 1, []], [2, 2, [7]]]

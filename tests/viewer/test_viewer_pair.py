"""Two runs on one page: the same request has one number, and the first different decision is named."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import strategies as st

from pagedjax import viewer
from pagedjax.commands import cli
from pagedjax.host import replay
from pagedjax.host.policies import FCFS, SHORTEST, Policy
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Plan, Request
from pagedjax.viewer.pair import pair, renumbered
from pagedjax.viewer.picture import Picture
from tests import drawn
from tests.refusals import refused
from tests.viewer.runs import Writer, any_run, names, pictures

SIZES = SchedulerConfig(
    block_size=4, num_blocks=20, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=64
)
LENGTHS = {"long": 30, "middle": 12, "short": 4}


def write(
    path: Path,
    lengths: dict[str, int],
    policy: Policy = FCFS,
    config: SchedulerConfig = SIZES,
    token: int = 5,
    **options,
) -> Path:
    """Records prompts of these lengths until all have ended."""
    writer = Writer(path, config, policy, **options)
    for name, length in lengths.items():
        writer.submit(Request(name, length, 6), [token] * length)
    while writer.state.ids:
        plan = writer.schedule()
        writer.commit(plan, [7] * len(plan.seqs))
    writer.recorder.close()
    return path


@pytest.fixture
def fcfs(tmp_path: Path) -> Path:
    return write(tmp_path / "fcfs.jsonl", LENGTHS)


@pytest.fixture
def shortest(tmp_path: Path) -> Path:
    """Another policy, another order of arrival, and another request."""
    lengths = {"short": 4, "extra": 2, "middle": 12, "long": 30}
    return write(tmp_path / "shortest.jsonl", lengths, SHORTEST)


def test_a_request_has_one_number_in_both_runs(fcfs, shortest):
    runs = pair(viewer.read(fcfs), viewer.read(shortest))
    assert names(list(runs.first.frames)) == {0: "long", 1: "middle", 2: "short"}
    assert names(list(runs.second.frames)) == {2: "short", 3: "extra", 1: "middle", 0: "long"}
    assert runs.only == ((), (3,))
    assert pair(viewer.read(shortest), viewer.read(fcfs)).only == ((1,), ())


def test_an_id_that_was_used_again_is_matched_in_turn(tmp_path):
    for name in "ab":
        writer = Writer(tmp_path / f"{name}.jsonl", SIZES)
        for length in (3, 5) if name == "a" else (3, 5, 9):
            writer.submit(Request("same", length, 1))
            writer.commit(writer.schedule(), [5])
            if length == 9:
                writer.commit(writer.schedule(), [5])
        writer.recorder.close()
    runs = pair(*(viewer.read(tmp_path / f"{name}.jsonl") for name in "ab"))
    assert runs.only == ((), (2,))


def mapped(view: Picture, numbers: list[int]) -> Picture:
    """The picture with other numbers."""

    def heads(entries):
        return tuple((numbers[n], *fields) for n, *fields in entries)

    return view._replace(
        waiting=tuple(numbers[n] for n in view.waiting),
        rows=heads(view.rows),
        still=heads(view.still),
        away=heads(view.away),
        tables=view.tables.__class__({numbers[n]: table for n, table in view.tables.items()}),
        ended=tuple(numbers[n] for n in view.ended),
        why=tuple(
            (
                sentence,
                None if rival is None else numbers[rival],
                None if requests is None else [numbers[n] for n in requests],
                limit,
            )
            for sentence, rival, requests, limit in view.why
        ),
        requests=view.requests.__class__(
            {
                numbers[n]: (numbers[n], *r[1:6], None if r[6] is None else numbers[r[6]], *r[7:])
                for n, r in view.requests.items()
            }
        ),
    )


@drawn.examples(5, 60)
def test_renumbered_frames_show_the_same_run(tmp_path, number):
    def holds(seed: int, num_blocks: int, shift: int) -> None:
        any_run(tmp_path / "run.jsonl", seed, num_blocks, host_blocks=4)
        run_frames = list(viewer.read(tmp_path / "run.jsonl").frames)
        count = len(names(run_frames))
        numbers = [(n * 7 + shift) % (7 * count + 1) for n in range(count)]
        new_frames = [renumbered(frame, numbers) for frame in run_frames]
        new = json.loads(json.dumps(new_frames))
        old = zip(pictures(json.loads(json.dumps(run_frames))), pictures(new), strict=True)
        for (frame, view), (new_frame, new_view) in old:
            assert new_view == mapped(view, numbers)
            for part in ("before", "after"):
                entries = zip(frame.get(part, ()), new_frame.get(part, ()), strict=True)
                for (kind, n, *fields), (new_kind, new_n, *new_fields) in entries:
                    assert (new_kind, new_n) == (kind, None if n is None else numbers[n])
                    if kind == "forked":
                        assert new_fields == [[numbers[branch] for branch in fields[0]]]
                    elif kind == "beamed":
                        assert new_fields == [numbers[fields[0]], fields[1]]
                    else:
                        assert new_fields == fields

    drawn.check(
        number,
        holds,
        seed=st.integers(0, 2**32 - 1),
        num_blocks=st.integers(6, 14),
        shift=st.integers(0, 50),
    )


def decisions(path: Path, policy: Policy) -> list[object]:
    """What each step decides, by the ids of the requests."""

    def decision(plan: Plan) -> object:
        rows = zip(plan.seqs, plan.starts, plan.counts, strict=True)
        return {seq.request_id: row for seq, *row in rows}, set(plan.preempted)

    transitions = replay.replay(path, {policy.name: policy})
    return [decision(transition.plan) for transition in transitions if transition.plan]


@pytest.mark.parametrize("blocks", [9, 10, 12, 20])
def test_the_first_step_that_decides_otherwise_is_where_the_runs_part(tmp_path, fcfs, blocks):
    smaller = SIZES._replace(num_blocks=blocks)
    second = write(tmp_path / "other.jsonl", LENGTHS, config=smaller)
    runs = pair(viewer.read(fcfs), viewer.read(second))
    pairs = zip(decisions(fcfs, FCFS), decisions(second, FCFS), strict=False)
    parted_steps = [step for step, (a, b) in enumerate(pairs) if a != b]
    assert (not parted_steps) == (blocks == 20)
    assert runs.parting == ((parted_steps[0], parted_steps[0]) if parted_steps else None)


def test_a_run_that_ends_earlier_parts_at_its_end(tmp_path, fcfs):
    lines = fcfs.read_text().splitlines(keepends=True)
    commits = [i for i, line in enumerate(lines) if line.startswith('{"commit"')]
    (tmp_path / "cut.jsonl").write_text("".join(lines[: commits[4] + 1]))
    runs = pair(viewer.read(fcfs), viewer.read(tmp_path / "cut.jsonl"))
    assert runs.parting == (5, None)


def test_runs_without_a_common_request_are_refused(tmp_path, fcfs):
    second = write(tmp_path / "other.jsonl", {"x": 3})
    with refused(
        r"fcfs.jsonl and other.jsonl have no request id in common \('long', 'middle', ...; 'x'\); "
        "show two runs that got the same prompts, of one model"
    ):
        pair(viewer.read(fcfs), viewer.read(second))


def test_runs_of_other_prompts_are_refused(tmp_path, fcfs):
    second = write(tmp_path / "other.jsonl", LENGTHS | {"middle": 13})
    with refused(
        "request 'middle' has a prompt of 12 tokens in fcfs.jsonl and of 13 in other.jsonl; "
        "show two runs that got the same prompts, of one model"
    ):
        pair(viewer.read(fcfs), viewer.read(second))
    runs = [
        viewer.read(write(tmp_path / f"{token}.jsonl", LENGTHS, token=token, prompts=True))
        for token in (5, 6)
    ]
    with refused("the prompt of request 'long' has token 5 at 0 in 5.jsonl and 6 in 6.jsonl; "):
        pair(*runs)


def test_view_writes_one_page_of_two_recordings(fcfs, shortest, tmp_path, capsys):
    assert cli.main(["view", str(fcfs), str(shortest)]) == 0
    page = tmp_path / "fcfs-shortest.html"
    assert capsys.readouterr().out == f"{page}\n"
    (packed,) = re.findall(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    data = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert (data["about"]["policy"], data["second"]["about"]["policy"]) == ("fcfs", "shortest")
    assert data["only"] == [[], [3]]
    assert data["parting"] == [0, 0]
    assert len(data["second"]["frames"]) == len(viewer.read(shortest).frames)
    assert cli.main(["view", str(fcfs), str(shortest), "-o", str(shortest)]) == 2
    assert "is the recording itself" in capsys.readouterr().err

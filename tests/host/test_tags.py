"""Tags of requests: the scheduler, the event log and the viewer carry them along."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from pagedjax import viewer
from pagedjax.host import replay, scheduler
from pagedjax.host.event_log import Commit, Recorder, Schedule, Submit, line_of
from pagedjax.host.policies import FCFS
from pagedjax.host.scheduler import SchedulerConfig
from pagedjax.host.types import Request

CONFIG = SchedulerConfig(
    block_size=2, num_blocks=20, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=12
)
TAGGED = Request("a", 3, 2, forks=("b",), tags=("adapter", "grammar \u00e9"))


def recording(path: Path, *requests: Request) -> list[replay.Transition]:
    """Records one step of these requests."""
    state = scheduler.init(CONFIG)
    with closing(Recorder(path, CONFIG)) as recorder:
        for request in requests:
            state = scheduler.submit(state, request)
            recorder.write(Submit(request))
        state, plan = scheduler.schedule(state, FCFS)
        recorder.write(Schedule(plan))
        sampled = [7] * len(plan.seqs)
        recorder.write(Commit(plan, sampled, {}, {}, scheduler.commit(state, plan, sampled)[1]))
    return list(replay.replay(path))


def test_a_log_contains_tags_only_if_there_are_any():
    assert "tags" not in line_of(Submit(TAGGED._replace(tags=())), {})
    assert json.loads(line_of(Submit(TAGGED), {}))["submit"]["tags"] == list(TAGGED.tags)


def test_a_recording_with_tags_replays_byte_for_byte(tmp_path: Path):
    *_, last = recording(tmp_path / "run.jsonl", TAGGED, Request("c", 3, 2))
    assert replay.verify(tmp_path / "run.jsonl").identical
    tags = {seq.request_id: seq.request.tags for seq in scheduler.running(last.state)}
    assert tags == {"a": TAGGED.tags, "b": TAGGED.tags, "c": ()}, (
        "branches keep the tags of their request"
    )


def test_the_viewer_shows_tags_only_if_there_are_any(tmp_path: Path):
    recording(tmp_path / "run.jsonl", TAGGED, Request("c", 3, 2))
    records = {
        record[1]: record[7:] for record in viewer.read(tmp_path / "run.jsonl").frames[0]["came"]
    }
    assert records == {"a": [list(TAGGED.tags)], "b": [list(TAGGED.tags)], "c": []}

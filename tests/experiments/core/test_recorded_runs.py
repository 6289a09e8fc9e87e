"""`kind: recorded`: a recording is replayed with its prompts, its times and its outputs, under any
policy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.capacity import rate_of
from experiments.core.config import expand
from experiments.core.drive import measure
from experiments.core.recorded_runs import recorded_requests
from experiments.core.workloads import RecordedRun, Workload, build
from pagedjax import LLM, SamplingParams
from tests.engine.runs import greedy, sampled, steps
from tests.experiments.core.summaries import BASE, simulated_run
from tests.refusals import refused

VOCAB = 320
SIZES: dict[str, Any] = {  # of `tiny_llm`
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "token_buckets": (8, 64),
    "num_blocks": 256,
}
EXPERIMENT: dict[str, Any] = {
    "name": "replayed",
    "engine": {**SIZES, "max_model_len": 512},
    # all at once, because programs were compiled while it was recorded
    "workload": {"kind": "recorded", "file": "run.jsonl", "time_scale": 0},
    "warmup": {"requests": 2, "max_tokens": 2},
    "record": True,
}
# name -> (prompt tokens, parameters): more requests than run at a time
REQUESTS = {
    f"q{i}": (3 + 5 * (11 - i), SamplingParams(seed=i, max_tokens=2 + i % 7)) for i in range(11)
}


@pytest.fixture(scope="module")
def recording(tiny_llm, tmp_path_factory) -> Path:
    """Of requests that end by their length, by a stop token, by a cancellation, or not at all."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    engine = tiny_llm.engine
    engine.reset()
    engine.record(path, times=True, prompts=True)
    for i, (name, (length, params)) in enumerate(REQUESTS.items()):
        prompt = np.random.default_rng(i).integers(3, VOCAB, length).tolist()
        engine.add(name, prompt, params, priority=i % 3, user=f"u{i % 2}", predicted=7)
    stops = greedy(40, stop_token_ids=tuple(range(0, VOCAB, 4)))
    engine.add("stopped", [9, 8, 7], stops)
    engine.add("cancelled", [4, 5, 6], greedy(40))
    engine.add("never begun", [4, 5, 6], greedy(40))
    engine.cancel("never begun")
    results = []
    while len(sampled(results).get("cancelled", ())) < 3:
        results.append(engine.step())
    engine.cancel("cancelled")
    for _ in steps(engine):
        pass
    engine.add("unfinished", [1, 2, 3], greedy(40))
    for _ in range(4):
        engine.step()
    text = path.read_text("ascii")
    engine.cancel("unfinished")
    engine.record(None)
    path.write_text(text, "ascii")  # without the last cancellation
    return path


def tokens_of(content: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Of each request of a recording that got tokens, its output by its prompt."""
    requests = recorded_requests("a recording", content)
    return {request.prompt: request.output for request in requests if request.output}


def workload_of(path: Path, **fields: Any) -> Workload:
    spec = RecordedRun(kind="recorded", file=path.name, **fields)
    return build(spec, path.read_text("ascii"), 0, VOCAB, lambda text: ())


def test_requests_are_those_of_the_recording(recording):
    workload = workload_of(recording)
    assert workload.left_out == workload.describe()["left_out"] == 1
    items = workload.items
    assert len(items) == len(REQUESTS) + 3
    for i, (item, (length, params)) in enumerate(zip(items, REQUESTS.values(), strict=False)):
        assert len(item.prompt_token_ids) == length
        assert item.max_tokens == item.longest_output == params.max_tokens
        assert (item.priority, item.user, item.predicted) == (i % 3, f"u{i % 2}", 7)
    ends = [(item.max_tokens, item.ends_at) for item in items[-3:]]
    assert [limit for limit, _ in ends] == [40] * 3
    assert all(0 < end < 40 for _, end in ends)
    assert ends[2][1] == 4
    arrivals = [item.arrival for item in items]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0 < arrivals[-1]
    halved = workload_of(recording, time_scale=0.5, limit=3).items
    assert [item.arrival for item in halved] == pytest.approx([t / 2 for t in arrivals[:3]])


def test_a_search_of_a_capacity_scales_its_gaps():
    spec = RecordedRun(kind="recorded", file="run.jsonl", time_scale=0.5)
    assert rate_of(spec) == (2.0, "times as recorded", "workload.time_scale")


def test_measured_runs_of_two_policies_have_its_tokens_and_schedules_of_their_own(
    tiny, tiny_llm, recording
):
    expected = tokens_of(recording.read_text("ascii"))
    schedules = []
    for policy in ("fcfs", "priority"):
        engine = {**EXPERIMENT["engine"], "policy": policy}
        (point,) = expand({**EXPERIMENT, "engine": engine}, folder=recording.parent)
        llm = tiny_llm if policy == "fcfs" else LLM(tiny, progress=False, policy=policy, **SIZES)
        run = measure(llm, point, 0)
        assert run.failed is None
        assert tokens_of(run.logs[0]) == expected
        assert run.summary["finished"] == {"length": len(REQUESTS), "stop": 3}
        schedules.append([(step.tokens, step.sequences) for step in run.steps])
        tiny_llm.reset_prefix_cache()
    assert schedules[0] != schedules[1]


def test_simulated_runs_have_its_lengths(recording, tmp_path):
    """And so has a simulated run of their own recordings, whose tokens mean nothing."""
    raw = {
        **BASE,
        "engine": {**BASE["engine"], "max_num_seqs": 3},
        "workload": EXPERIMENT["workload"],
        "record": True,
    }
    run = simulated_run(raw, recording.parent)
    outputs = [len(request.branches[0].token_times) for request in run.requests]
    assert outputs == [item.longest_output for item in workload_of(recording).items]
    (tmp_path / "run.jsonl").write_text(run.logs[0])
    second_run = simulated_run(raw, tmp_path)
    assert second_run.requests == run.requests


HEADER = {"pagedjax_replay": 2, "pagedjax": "0.2.0", "policy": "fcfs", "config": {}}
SUBMIT = {
    "request_id": "a",
    "max_tokens": 4,
    "priority": 0,
    "user": "",
    "forks": [],
    "beams": False,
}
NOTES = {"at": 0.5, "prompt": [5, 6]}
COMMIT = {"commit": {"events": [{"event": "Sampled", "request_ids": ["a"], "token_ids": [7]}]}}
RECORD = r"record the run with llm\.engine\.record\(PATH, times=True, prompts=True\)"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"a": 1}], "line 1 is no header of a recording of format 2.*" + RECORD),
        ([HEADER, {"submit": SUBMIT, "at": 1}], "line 2 submits 'a' without prompts; " + RECORD),
        ([HEADER, {"submit": SUBMIT, "prompt": [5]}], "line 2 submits 'a' without times; "),
        (
            [HEADER, {"submit": {**SUBMIT, "forks": ["b"]}, **NOTES}],
            "'a', which has branches or beams, .*; record a run of requests with n=1",
        ),
        ([HEADER, {"adopt": {}}], "line 2 takes a sequence over from another engine.*" + RECORD),
        ([HEADER, COMMIT], r"line 2 is no line of a recording \(KeyError: 'a'\); " + RECORD),
        ([HEADER, [1]], "line 2 is no line of a recording"),
        ([HEADER, {"submit": SUBMIT, **NOTES}], "run.jsonl has no request that got a token; "),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, lines, message):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with refused(message):
        workload_of(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"n": 2}}, "gives the tokens of outputs: trace_decode_token_ids .*n is 2"),
        (
            {"engine": {"reservation": "oracle", "enable_prefix_caching": False}},
            "engine.reservation is 'oracle', which takes the limit for the length; set it",
        ),
        (
            {"sampling": {"trace_decode_token_ids": [5]}},
            "trace_decode_token_ids: .*; a workload of kind recorded gives the tokens",
        ),
        (
            {"workload": {**EXPERIMENT["workload"], "time_scale": -1}},
            r"time_scale is -1\.0; it must",
        ),
    ],
)
def test_options_that_do_not_go_with_a_recording_are_refused(recording, changes, message):
    with refused(message):
        expand({**EXPERIMENT, **changes}, folder=recording.parent)

"""Policies with memory in an engine: recordings, lookahead, and steps that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedjax import BeamSearchParams, SamplingParams
from pagedjax.engine import state as engine_state
from pagedjax.host.policies import Policy, deadline, early_rejection, mlfq, srtf, vtc
from pagedjax.host.replay import verify
from tests.engine.test_lookahead import make, play
from tests.refusals import refused

POLICIES = {
    policy.name.partition("(")[0]: policy
    for policy in (
        vtc(output_weight=3.0),
        mlfq(quantum=1, ratio=2, patience=20),
        srtf(patience=20, margin=1, default=8),
        deadline(default_s=1.0),
        early_rejection(ttft_s=1e-5, itl_s=1.0),
    )
}


@pytest.fixture(scope="module")
def engines(tiny):
    """Without lookahead and with it. They have one program, that of test_speculation.py."""
    return tuple(make(tiny, depth, compilation="eager").engine for depth in (0, 2))


@pytest.fixture
def with_policy(engines, monkeypatch):
    def give(policy: Policy):
        for engine in engines:
            submit = type(engine)._submit

            def submitted(request, engine=engine, submit=submit):
                number = int(request.names[0][1:])
                user = "xyz"[number % 3]
                submit(engine, request._replace(user=user, predicted=1 + 7 * number % 20))

            monkeypatch.setattr(engine, "_submit", submitted)
            monkeypatch.setattr(engine, "runtime", replace(engine.runtime, policy=policy))
        return engines

    return give


@pytest.mark.parametrize("name", POLICIES)
def test_a_measured_recording_replays_byte_for_byte(with_policy, tmp_path, name):
    policy = POLICIES[name]
    path = tmp_path / "run.jsonl"
    run = play(with_policy(policy)[0], 3, path, of_prompts=False)
    report = verify(path, {policy.name: policy})
    assert report.identical, report.difference
    assert (b'"now":' in path.read_bytes()) == policy.timed
    assert bool(run.preempted) == (name in ("mlfq", "srtf"))
    assert ("rejected" in report.finished) == (name == "early_rejection")


@pytest.mark.parametrize("name", ["vtc", "mlfq"])
def test_lookahead_changes_no_decision_of_a_policy_with_memory(with_policy, tmp_path, name):
    runs = [
        play(engine, 3, tmp_path / f"{i}.jsonl", of_prompts=False)
        for i, engine in enumerate(with_policy(POLICIES[name]))
    ]
    assert runs[1].results == runs[0].results
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "0.jsonl").read_bytes()
    assert runs[1].late < runs[1].steps, "no step was predicted"


def test_a_failed_step_rolls_the_memory_back(with_policy, monkeypatch):
    engine, _ = with_policy(POLICIES["mlfq"])
    engine.reset()
    engine.add("r1", [3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    before = engine.scheduler_state

    def failing(*arguments):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine_state, "send", failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step()
    after = engine.scheduler_state
    assert after.memory == before.memory
    assert after.news[:-1] == before.news
    assert type(after.news[-1]).__name__ == "Preempted"
    while engine.has_work:
        engine.step()


def test_a_rejected_prompt_has_no_tokens_and_the_others_go_on(tiny_llm, monkeypatch):
    def reject(memory, waiting):
        return [seq.request_id for seq in waiting if seq.request.priority]

    policy = Policy("mine", lambda memory, waiting, *_: waiting, init=int, reject=reject)
    engine = tiny_llm.engine
    monkeypatch.setattr(engine, "runtime", replace(engine.runtime, policy=policy))
    params = SamplingParams(max_tokens=3, ignore_eos=True, n=2, temperature=1.0, seed=1)
    outputs = tiny_llm.generate([[3, 4], [5, 6]], params, priority=[1, 0], use_tqdm=False)
    branches = [[(len(b.token_ids), b.finish_reason) for b in out.outputs] for out in outputs]
    assert branches == [[(0, "rejected")] * 2, [(3, "length")] * 2]
    beams = BeamSearchParams(beam_width=2, max_tokens=3)
    with refused("the policy rejected request .*; send it again later, or take a policy that rej"):
        tiny_llm.generate([[3, 4]], beams, priority=1, use_tqdm=False)
    assert not engine.has_work
    engine.reset()

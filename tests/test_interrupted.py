"""A step that fails, or is interrupted, has not been: nothing is lost, and no content is found that is not there."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from pagedjax import LLM, BeamSearchParams, SamplingParams, readout, replay, scheduler
from pagedjax.types import Preempted, Sampled
from pagedjax.undisturbed import undisturbed
from pagedjax.viewer import run as viewer

PROMPTS = {f"r{n}": np.random.default_rng(n).integers(3, 320, n).tolist() for n in (3, 9, 17, 24, 40)}
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
MODES = {
    "plain": {},
    "scarce": {"num_blocks": 14},
    "swap": {"num_blocks": 14, "preemption": "swap", "swap_space_gib": 0.001},
    "ahead": {"lookahead": 2},
    "dispatch": {"steps_per_dispatch": 3},
}


def make(tiny, **config):
    sizes = {"block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64, "token_buckets": (8, 64)}
    return LLM(tiny, progress=False, **(sizes | {"num_blocks": 100} | config))


class Breaks(Exception):
    pass


def run(engine, monkeypatch, broken=()):
    """All requests to their end -> (tokens by id, beams, preemptions).

    Args:
        broken: after how many steps one fails -> (whose function raises, its name, whether after it has run).
    """
    for i, (name, prompt) in enumerate(PROMPTS.items()):
        engine.add(name, prompt, DRAWN, forks=[f"{name}/1", f"{name}/2"] if i == 1 else ())
    engine.add("beams", PROMPTS["r17"][:11], BEAMS, forks=["beams/1", "beams/2"])
    tokens: dict[str, list[int]] = {}
    found, done, preempted, left = [], 0, 0, dict(broken)
    while engine.has_work:
        place = left.pop(done, None)
        if place:
            holder, name, late = place
            whole = getattr(holder, name)

            def breaks(*args, whole=whole, late=late, **kwargs):
                if late:
                    whole(*args, **kwargs)
                raise Breaks

            with monkeypatch.context() as patched:
                patched.setattr(holder, name, breaks)
                with pytest.raises(Breaks):
                    engine.step()
            scheduler.check(engine.state)
            assert not engine.state.running.seqs
            continue
        result = engine.step()
        scheduler.check(engine.state)
        done += 1
        assert done < 500, "no progress"
        found += result.beams
        preempted += sum(isinstance(event, Preempted) for event in result.events)
        for event in result.events:
            if isinstance(event, Sampled):
                for name, token in zip(event.request_ids, event.token_ids, strict=True):
                    tokens.setdefault(name, []).append(token)
    assert not left, "some step was never reached"
    assert engine.state.pool.num_free == engine.config.num_blocks
    return tokens, [(b.request_id, [s.token_ids for s in b.sequences]) for b in found], preempted


@pytest.mark.parametrize("mode", MODES)
def test_what_ran_is_computed_again_and_says_the_same(tiny, monkeypatch, tmp_path, mode):
    expected = run(make(tiny).engine, monkeypatch)
    engine = make(tiny, **MODES[mode]).engine
    engine.record(tmp_path / "run.jsonl")
    broken = {
        0: (engine, "_send", True),  # the device has it, and the shell does not know
        2: (readout, "filled", False),
        5: (scheduler, "schedule", False),
        9: (readout, "choose", True),
        14: (scheduler, "commit", True),
        15: (readout, "logprobs", False),
    }
    if mode in ("ahead", "dispatch"):  # not every step is sent in its own turn
        del broken[0]
    tokens, beams, preempted = run(engine, monkeypatch, broken)
    engine.record(None)
    assert (tokens, beams) == expected[:2]
    assert preempted > 2 or "num_blocks" not in MODES[mode]
    assert replay.verify(tmp_path / "run.jsonl").identical
    text = (tmp_path / "run.jsonl").read_text()
    assert text.count('{"restart":{}}') == len(broken)
    assert text.count('{"schedule"') == text.count('{"commit"')


def test_content_that_a_failed_step_overwrote_is_not_found(tiny, monkeypatch):
    """The step evicts what was cached, runs, and fails: the state from before it would still promise that content."""
    llm = make(tiny, num_blocks=8)
    prompt, tail, other = PROMPTS["r24"], [7, 8, 9], PROMPTS["r40"][:39]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (alone,) = llm.generate([prompt + tail], greedy, use_tqdm=False)
    assert alone.num_cached_tokens == 0
    (again,) = llm.generate([prompt + tail], greedy, use_tqdm=False)
    assert again.num_cached_tokens == 24, "it is cached, and this test shows something"

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(readout, "filled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([other], greedy, use_tqdm=False)
    assert not llm.engine.has_work
    (after,) = llm.generate([prompt + tail], greedy, use_tqdm=False)
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids
    assert after.num_cached_tokens == 0


def test_a_viewer_shows_who_went_back_to_the_queue(tiny, monkeypatch, tmp_path):
    engine = make(tiny).engine
    engine.record(tmp_path / "run.jsonl")
    run(engine, monkeypatch, {3: (readout, "filled", False)})
    engine.record(None)
    frames = viewer.read(tmp_path / "run.jsonl").frames
    stopped = [entry for frame in frames for entry in frame.get("before", ()) if entry[0] == "preempted"]
    assert len(stopped) >= len(PROMPTS)
    assert not any(swapped for *_, swapped in stopped)


def test_an_interrupt_waits_for_the_end_of_what_belongs_together():
    steps = []

    @undisturbed()
    def together():
        os.kill(os.getpid(), signal.SIGINT)
        steps.append("whole")

    with pytest.raises(KeyboardInterrupt):
        together()
    assert steps == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_handlers_that_python_did_not_set_are_left_alone(monkeypatch):
    ran = []

    def body():
        with undisturbed():
            ran.append(threading.current_thread())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    body()
    assert len(ran) == 2

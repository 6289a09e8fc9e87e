"""A failed or interrupted step is rolled back: no request is lost, and no overwritten block is
found.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Container

import numpy as np
import pytest

from pagedjax import BeamSearchParams, SamplingParams
from pagedjax.device import cache
from pagedjax.engine import readers, requests
from pagedjax.engine import state as engine_state
from pagedjax.engine.interrupts import deferred
from pagedjax.engine.session import GenerationRequest
from pagedjax.host import replay, scheduler
from pagedjax.host.event_log import Cancel, Commit, Entry, Submit
from pagedjax.viewer import read_recording as viewer
from tests.engine.runs import check_idle, greedy, sampled, small_llm
from tests.refusals import refused

PROMPTS = {
    f"r{n}": np.random.default_rng(n).integers(3, 320, n).tolist() for n in (3, 9, 17, 24, 40)
}
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, logprobs=1)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
MODES = {
    "plain": {},
    "scarce": {"block_size": 8, "num_blocks": 14},
    "swap": {"block_size": 8, "num_blocks": 14, "preemption": "swap", "swap_space_gib": 0.001},
    "ahead": {"lookahead": 2},
}


class Breaks(Exception):
    pass


def run(engine, monkeypatch, broken=()):
    """All requests to their end -> (tokens by id, beams, preemptions).

    Args:
        broken: after how many steps one fails -> (whose function raises, its name, whether after it
            has run).
    """
    for i, (name, prompt) in enumerate(PROMPTS.items()):
        engine.add(name, prompt, DRAWN, forks=[f"{name}/1", f"{name}/2"] if i == 1 else ())
    engine.add("beams", PROMPTS["r17"][:11], BEAMS, forks=["beams/1", "beams/2"])
    results = []
    failures_left = dict(broken)
    while engine.has_work:
        place = failures_left.pop(len(results), None)
        if place:
            with monkeypatch.context() as patched:
                break_function(patched, *place)
                with pytest.raises(Breaks):
                    engine.step()
            scheduler.check(engine.scheduler_state)
            assert not engine.scheduler_state.running.seqs
            continue
        results.append(engine.step())
        scheduler.check(engine.scheduler_state)
        assert len(results) < 500, "no progress"
    assert not failures_left, "some step was never reached"
    check_idle(engine)
    beams = [beams for result in results for beams in result.beams]
    sequences = [(b.request_id, [s.token_ids for s in b.sequences]) for b in beams]
    return sampled(results), sequences, sum(len(result.plan.preempted) for result in results)


def break_function(monkeypatch, holder, name: str, late: bool) -> None:
    original = getattr(holder, name)

    def breaks(*args, **kwargs):
        if late:
            original(*args, **kwargs)
        raise Breaks

    monkeypatch.setattr(holder, name, breaks)


@pytest.fixture
def expected(tiny, monkeypatch):
    return run(small_llm(tiny).engine, monkeypatch)[:2]


@pytest.mark.default_cases("plain")
@pytest.mark.parametrize("mode", MODES)
def test_a_failed_step_is_computed_again_with_the_same_tokens(
    tiny, expected, monkeypatch, tmp_path, mode
):
    engine = small_llm(tiny, **MODES[mode]).engine
    engine.record(tmp_path / "run.jsonl")
    broken = {
        0: (engine_state, "send", True),  # the device has it, and the shell does not know
        2: (requests, "hashes_of_filled", False),
        5: (scheduler, "schedule", False),
        9: (readers, "read", True),
        14: (scheduler, "commit", True),
        15: (readers, "read", False),
    }
    if mode == "ahead":  # not every step is sent in its own turn
        del broken[0]
    tokens, beams, preempted = run(engine, monkeypatch, broken)
    engine.record(None)
    assert (tokens, beams) == expected
    assert preempted > 2 or "num_blocks" not in MODES[mode]
    assert replay.verify(tmp_path / "run.jsonl").identical
    text = (tmp_path / "run.jsonl").read_text()
    assert text.count('{"restart":{}}') == len(broken)
    assert text.count('{"schedule"') == text.count('{"commit"')


@pytest.mark.slow
def test_blocks_that_a_failed_step_overwrote_are_not_found(tiny, monkeypatch):
    """The step evicts what was cached, runs, and fails: the state from before it would still
    promise that content.
    """
    llm = small_llm(tiny, block_size=8, num_blocks=8)
    prompt = [*PROMPTS["r24"], 7, 8, 9]
    (alone,) = llm.generate([prompt], greedy(6))
    (repeated,) = llm.generate([prompt], greedy(6))
    assert (alone.num_cached_tokens, repeated.num_cached_tokens) == (0, 24)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(requests, "hashes_of_filled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPTS["r40"][:39]], greedy(6))
    assert not llm.engine.has_work
    (after,) = llm.generate([prompt], greedy(6))
    assert after.outputs[0].token_ids == alone.outputs[0].token_ids
    assert after.num_cached_tokens == 0


class Interrupting:
    """In place of a recorder: presses Ctrl-C while the state is replaced, at some lines of a kind,
    counted from 1.
    """

    def __init__(self, lines: Container[int], kind: type[Entry] = Commit) -> None:
        self.lines = lines
        self.kind = kind
        self.count = 0

    def write(self, entry: Entry) -> None:
        if isinstance(entry, self.kind):
            self.count += 1
            if self.count in self.lines:
                signal.raise_signal(signal.SIGINT)


def step_after_ctrl_c(engine, monkeypatch) -> list[int]:
    """A step that is interrupted is run again -> the numbers of such steps, as they come."""
    step = engine.step
    interrupts = []

    def again():
        try:
            return step()
        except KeyboardInterrupt:
            interrupts.append(engine.scheduler_state.step)
            return step()

    monkeypatch.setattr(engine, "step", again)
    return interrupts


def test_ctrl_c_while_the_state_is_replaced_keeps_the_result_for_the_next_call(
    tiny, expected, monkeypatch, interruptible
):
    engine = small_llm(tiny).engine
    engine._recorder = Interrupting(range(4, 500, 4))
    interrupts = step_after_ctrl_c(engine, monkeypatch)
    assert run(engine, monkeypatch)[:2] == expected
    assert len(interrupts) > 3


def interrupted_engine(tiny):
    """An engine whose last step was interrupted when it had its result."""
    engine = small_llm(tiny).engine
    engine._recorder = Interrupting({1})
    engine.add("a", PROMPTS["r9"], SamplingParams(temperature=0, max_tokens=1))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    return engine


def test_ctrl_c_in_the_last_step_keeps_its_result_for_the_next_call(tiny, interruptible):
    engine = interrupted_engine(tiny)
    assert not engine.scheduler_state.running.seqs
    assert engine.has_work, "a loop over has_work receives the result"
    kinds = [type(event).__name__ for event in engine.step().events]
    assert kinds == ["Admitted", "Sampled", "Finished"]
    assert not engine.has_work
    assert engine.step() is None


def test_ctrl_c_in_generate_loses_no_text_of_a_stream(tiny, interruptible):
    """Both are served by the same steps: the one that was interrupted must have reached the other."""
    llm = small_llm(tiny)
    prompt = "she sells sea shells"
    expected = "".join(llm.stream(prompt, greedy(30)))
    stream = llm.stream(prompt, greedy(30))
    step = llm.engine.step
    text = ""
    for piece in stream:
        text += piece
        calls = itertools.count(1)

        def pressed(calls=calls):
            if next(calls) == 3:
                signal.raise_signal(signal.SIGINT)
            return step()

        llm.engine.step = pressed
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPTS["r9"]], greedy(30))
        llm.engine.step = step
    assert text == expected
    assert not llm.engine.has_work


@pytest.mark.parametrize("kind", [Submit, Cancel])
def test_ctrl_c_leaves_no_request_without_an_owner(tiny, monkeypatch, interruptible, kind):
    """While requests are queued, and while those of a call that failed are cancelled."""
    llm = small_llm(tiny)
    calls = {
        "generate": lambda: llm.generate(list(PROMPTS.values()), DRAWN),
        "stream": lambda: next(llm.stream("she sells", DRAWN)),
        "add": lambda: llm.session.add(
            [GenerationRequest(prompt, DRAWN) for prompt in PROMPTS.values()]
        ),
        "refused": lambda: llm.session.add(
            [GenerationRequest(prompt, DRAWN) for prompt in ([1, 2], [3, 4], [])]
        ),
    }
    lines = {
        "generate": (1, 3, 5),
        "stream": (1,),
        "add": (1, 5) if kind is Submit else (),
        "refused": (1, 2) if kind is Cancel else (),
    }
    monkeypatch.setattr(llm.session, "step", lambda: 1 / 0)
    for name, call in calls.items():
        for line in lines[name]:
            llm.engine._recorder = Interrupting({line}, kind)
            with pytest.raises(KeyboardInterrupt):
                call()
            assert not llm.engine.has_work
            assert not llm.session.branches


def test_an_interrupt_before_the_state_is_replaced_rolls_the_step_back(tiny, expected, monkeypatch):
    engine = small_llm(tiny).engine
    original = engine._set
    broken = []

    def interrupted(after):
        number = after.scheduler.step
        if after.result is not None and number in (3, 7, 11) and number not in broken:
            broken.append(number)
            raise KeyboardInterrupt
        original(after)

    monkeypatch.setattr(engine, "_set", interrupted)
    step_after_ctrl_c(engine, monkeypatch)
    assert run(engine, monkeypatch)[:2] == expected
    assert len(broken) == 3


@pytest.mark.parametrize("name", ["update_params", "sleep", "record"])
def test_a_result_that_was_not_taken_is_named(tiny, tmp_path, interruptible, name):
    engine = interrupted_engine(tiny)
    arguments = {"update_params": (tiny.model.params,), "record": (tmp_path / "run.jsonl",)}
    with refused(r"did not get the result; call step\(\) once, which returns it, before"):
        getattr(engine, name)(*arguments.get(name, ()))
    assert engine.step() is not None


class Full:
    """A disk that takes a few lines more."""

    name = "run.jsonl"

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def write(self, text: str) -> None:
        self.lines -= 1
        if self.lines < 0:
            raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_only_the_recording(tiny, expected, monkeypatch, tmp_path):
    engine = small_llm(tiny).engine
    engine.record(tmp_path / "run.jsonl")
    monkeypatch.setattr(engine._recorder, "_file", Full(14))
    with pytest.warns(
        RuntimeWarning, match="run.jsonl is not written any further: .*No space left on device"
    ):
        assert run(engine, monkeypatch)[:2] == expected
    engine.record(None)


def test_a_cache_that_cannot_be_allocated_is_allocated_by_a_later_step(tiny, monkeypatch):
    engine = small_llm(tiny).engine
    engine.add("early", PROMPTS["r3"], DRAWN)
    with monkeypatch.context() as patched:
        patched.setattr(requests, "hashes_of_filled", lambda *_: 1 / 0)
        patched.setattr(cache, "init", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.cancel("early")
    engine.reset_prefix_cache()
    assert set(run(engine, monkeypatch)[0]) > set(PROMPTS)
    assert engine._state.cache is not None


def test_the_viewer_shows_requests_that_return_to_the_queue(tiny, monkeypatch, tmp_path):
    engine = small_llm(tiny).engine
    engine.record(tmp_path / "run.jsonl")
    run(engine, monkeypatch, {3: (requests, "hashes_of_filled", False)})
    engine.record(None)
    frames = viewer.read(tmp_path / "run.jsonl").frames
    entries = [entry for frame in frames for entry in frame.get("before", ())]
    swapped = [entry[-1] for entry in entries if entry[0] == "preempted"]
    assert len(swapped) >= len(PROMPTS)
    assert not any(swapped)


@pytest.mark.parametrize("interrupts", [1, 3])
def test_a_deferred_interrupt_waits_for_the_end_of_the_block_and_a_second_one_does_not(
    interruptible, interrupts
):
    steps = []

    @deferred()
    def together():
        for step in range(interrupts):
            signal.raise_signal(signal.SIGINT)
            steps.append(step)

    with pytest.raises(KeyboardInterrupt):
        together()
    assert steps == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_foreign_handlers_are_unchanged(monkeypatch):
    ran = []

    def body():
        with deferred():
            ran.append(threading.current_thread())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    body()
    assert len(ran) == 2

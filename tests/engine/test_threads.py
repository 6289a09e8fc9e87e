"""Several threads call one `LLM`: the answers are those of calls in turn, and steps serve all
threads.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from pagedjax import LLM, BeamSearchParams, LoRARequest, SamplingParams
from pagedjax.engine.interrupts import Turns
from tests.engine.runs import check_idle, greedy, small_llm, token_ids
from tests.weights.tiny_adapters import tiny_adapter

TIMEOUT = 300  # seconds; these calls take some, and more on a slow machine


def drawn_call(number: int) -> dict[str, Any]:
    """One of several kinds of calls. Draws have seeds: without one they depend on the order of
    calls.
    """
    draw = random.Random(number)
    prompts = [
        [draw.randrange(3, 300) for _ in range(draw.randint(1, 40))]
        for _ in range(draw.randint(1, 3))
    ]
    max_tokens = draw.randint(1, 16)
    params: Any = greedy(max_tokens)
    if number % 4 == 0:
        params = [replace(params, temperature=1.0, seed=i, n=2) for i in range(len(prompts))]
    elif number % 7 == 0:
        params = BeamSearchParams(2, max_tokens)
    streams = number % 2 == 1 and isinstance(params, SamplingParams)
    leaves = streams and number % 3 == 0
    return {"prompts": prompts, "params": params, "streams": streams, "leaves": leaves}


def answer(llm: LLM, call: dict[str, Any]) -> Any:
    prompts = call["prompts"]
    if not call["streams"]:
        outputs = llm.generate(prompts, call["params"])
        return [[branch.token_ids for branch in output.outputs] for output in outputs]
    stream = llm.stream(prompts[0], call["params"])
    if call["leaves"]:
        first = next(stream, "")
        stream.close()
        return first[:1]
    return "".join(stream)


def test_the_answers_are_those_of_calls_in_turn(tiny_llm):
    calls = [drawn_call(number) for number in range(60)]
    assert sum(call["streams"] for call in calls) > 20
    assert sum(call["leaves"] for call in calls) > 5
    expected = [answer(tiny_llm, call) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(answer, tiny_llm, call) for call in calls]
        assert [future.result(TIMEOUT) for future in futures] == expected
    check_idle(tiny_llm.engine)
    assert not tiny_llm.session.branches


def test_steps_are_shared_and_short_calls_do_not_wait_for_long_ones(tiny_llm):
    running = threading.Event()

    def stream() -> float:
        for _ in tiny_llm.stream([5, 6], greedy(300)):
            running.set()
        return time.perf_counter()

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(stream)
        assert running.wait(TIMEOUT)
        tiny_llm.generate([[7, 8]], greedy(4))
        assert time.perf_counter() < long.result(TIMEOUT)


@pytest.mark.slow
def test_pooling_adapters_and_changes_go_with_generation(tiny, tiny_folder, tmp_path):
    llm = small_llm(tiny, enable_lora=True, max_loras=2)
    folders = [tiny_adapter(tmp_path / str(i), tiny_folder, 4, seed=i) for i in range(3)]

    def adapted(i: int) -> Any:
        request = LoRARequest(f"a{i % 3}", lora_path=str(folders[i % 3]))
        return token_ids(llm, [[5, 6, 7, 8]], greedy(6), lora_request=request)

    expected = [adapted(i) for i in range(3)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(adapted, range(18))) == expected * 6
        resets = [pool.submit(llm.reset_prefix_cache) for _ in range(5)]
        assert list(pool.map(adapted, range(6))) == expected * 2
        assert [reset.result(TIMEOUT) for reset in resets] == [None] * 5


def test_ctrl_c_ends_the_call_of_the_main_thread_alone(tiny_llm, interruptible):
    (expected,) = token_ids(tiny_llm, [[5, 6]], greedy(200))
    running = threading.Event()
    interrupted = threading.Event()

    def press() -> None:
        running.wait(TIMEOUT)
        # again, because Python ignores what is raised in a callback of its garbage collection
        for _ in range(10):
            os.kill(os.getpid(), signal.SIGINT)
            if interrupted.wait(5):
                return

    def stream_for_ever() -> None:
        while True:
            for _ in tiny_llm.stream([9, 10], greedy(200)):
                running.set()

    with ThreadPoolExecutor(2) as pool:
        other_call = pool.submit(token_ids, tiny_llm, [[5, 6]] * 2, greedy(200))
        pool.submit(press)
        with pytest.raises(KeyboardInterrupt):
            stream_for_ever()
        interrupted.set()
        assert other_call.result(TIMEOUT) == [expected] * 2
    check_idle(tiny_llm.engine)
    assert not tiny_llm.session.branches
    assert token_ids(tiny_llm, [[5, 6]], greedy(200)) == [expected]


def test_turns_are_taken_in_turn_and_may_be_nested():
    turns = Turns()
    order = []
    ready = threading.Event()

    def enter() -> None:
        ready.set()
        with turns, turns:
            order.append("other")

    thread = threading.Thread(target=enter)
    for i in range(1000):
        with turns:
            if i == 10:
                thread.start()
                assert ready.wait(TIMEOUT)
                time.sleep(0.2)  # it waits at the lock now
            order.append("main")
    thread.join(TIMEOUT)
    assert order.index("other") < 20
    assert len(order) == 1001


def test_a_turn_that_ctrl_c_interrupts_is_given_back(interruptible):
    turns = Turns()
    entered = threading.Event()

    def hold() -> None:
        with turns:
            entered.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(TIMEOUT)
    pressed = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    pressed.start()
    with pytest.raises(KeyboardInterrupt), turns:
        raise AssertionError("Ctrl-C came before the lock")
    thread.join(TIMEOUT)
    second = threading.Thread(target=turns.__enter__)
    second.start()
    second.join(TIMEOUT)
    assert not second.is_alive()

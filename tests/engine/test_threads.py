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
from typing import Any

import pytest

from pagedjax import LLM, BeamSearchParams, LoRARequest, SamplingParams
from pagedjax.engine.interrupts import Turns
from tests.engine.runs import greedy
from tests.weights.tiny_adapters import tiny_adapter

LIMIT = 300  # seconds for what takes some: machines may be slow


def a_call(number: int) -> dict[str, Any]:
    """One of several kinds of calls. Draws have seeds: without one they depend on the order of
    calls.
    """
    draw = random.Random(number)
    prompts = [
        [draw.randrange(3, 300) for _ in range(draw.randint(1, 40))]
        for _ in range(draw.randint(1, 3))
    ]
    options = {"max_tokens": draw.randint(1, 16), "ignore_eos": True}
    if number % 4 == 0:
        params: Any = [
            SamplingParams(temperature=1.0, seed=i, n=2, **options) for i in range(len(prompts))
        ]
    elif number % 7 == 0:
        params = BeamSearchParams(2, options["max_tokens"])
    else:
        params = SamplingParams(temperature=0.0, **options)
    streams = number % 2 == 1 and isinstance(params, SamplingParams)
    return {
        "prompts": prompts,
        "params": params,
        "streams": streams,
        "leaves": streams and number % 3 == 0,
    }


def answer(llm: LLM, call: dict[str, Any]) -> Any:
    prompts, params = call["prompts"], call["params"]
    if not call["streams"]:
        outputs = llm.generate(prompts, params)
        return [[branch.token_ids for branch in output.outputs] for output in outputs]
    stream = llm.stream(prompts[0], params)
    if call["leaves"]:
        first = next(stream, "")
        stream.close()
        return first[:1]
    return "".join(stream)


def in_threads(llm: LLM, calls: list[dict[str, Any]], threads: int = 4) -> list[Any]:
    with ThreadPoolExecutor(threads) as pool:
        return [each.result(LIMIT) for each in [pool.submit(answer, llm, call) for call in calls]]


def test_the_answers_are_those_of_calls_in_turn(tiny_llm):
    calls = [a_call(number) for number in range(120)]
    assert sum(call["streams"] for call in calls) > 40
    assert sum(call["leaves"] for call in calls) > 10
    expected = [answer(tiny_llm, call) for call in calls]
    assert in_threads(tiny_llm, calls) == expected
    state = tiny_llm.engine.scheduler_state
    assert state.pool.num_free == state.config.num_blocks
    assert not tiny_llm.session.branches


def test_steps_are_shared_and_short_calls_do_not_wait_for_long_ones(tiny_llm):
    lengths = {"long": 300, "short": 4}
    ended: dict[str, float] = {}
    began = threading.Event()

    def generate(name: str) -> None:
        params = greedy(lengths[name])
        if name == "long":
            for _ in tiny_llm.stream([5, 6], params):
                began.set()
        else:
            assert began.wait(LIMIT)
            tiny_llm.generate([[7, 8]], params)
        ended[name] = time.perf_counter()

    threads = [threading.Thread(target=generate, args=(name,)) for name in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert ended["short"] < ended["long"]


def test_pooling_adapters_and_changes_go_with_generation(tiny, tiny_folder, tmp_path):
    sizes = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": (8, 64),
        "num_blocks": 256,
    }
    llm = LLM(tiny, progress=False, enable_lora=True, max_loras=2, **sizes)
    folders = [tiny_adapter(tmp_path / str(i), tiny_folder, 4, seed=i) for i in range(3)]
    params = greedy(6)

    def adapted(i: int) -> Any:
        request = LoRARequest(f"a{i % 3}", lora_path=str(folders[i % 3]))
        (output,) = llm.generate([[5, 6, 7, 8]], params, lora_request=request)
        return output.outputs[0].token_ids

    expected = [adapted(i) for i in range(3)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(adapted, range(18))) == expected * 6
        cleared = [pool.submit(llm.reset_prefix_cache) for _ in range(5)]
        assert list(pool.map(adapted, range(6))) == expected * 2
        assert [each.result(LIMIT) for each in cleared] == [None] * 5


def test_ctrl_c_ends_the_call_of_the_main_thread_alone(tiny_llm, interruptible):
    params = greedy(200)
    expected = tiny_llm.generate([[5, 6]], params)[0].outputs[0].token_ids
    running, interrupted = threading.Event(), threading.Event()

    def press() -> None:
        running.wait(LIMIT)
        # again, because Python ignores what is raised in a callback of its garbage collection
        for _ in range(10):
            os.kill(os.getpid(), signal.SIGINT)
            if interrupted.wait(5):
                return

    def other() -> Any:
        tokens = tiny_llm.generate([[5, 6]] * 2, params)
        return [output.outputs[0].token_ids for output in tokens]

    def stream_for_ever() -> None:
        while True:
            for _ in tiny_llm.stream([9, 10], params):
                running.set()

    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(other)
        pool.submit(press)
        with pytest.raises(KeyboardInterrupt):
            stream_for_ever()
        interrupted.set()
        assert others.result(LIMIT) == [expected] * 2
    assert not tiny_llm.session.branches
    state = tiny_llm.engine.scheduler_state
    assert state.pool.num_free == state.config.num_blocks
    assert tiny_llm.generate([[5, 6]], params)[0].outputs[0].token_ids == expected


def test_turns_are_taken_in_turn_and_may_be_nested():
    turns, order = Turns(), []

    def enter(name: str, ready: threading.Event) -> None:
        ready.set()
        with turns, turns:
            order.append(name)

    ready = threading.Event()
    thread = threading.Thread(target=enter, args=("other", ready))
    for i in range(1000):
        with turns:
            if i == 10:
                thread.start()
                assert ready.wait(LIMIT)
                time.sleep(0.2)  # it waits at the lock now
            order.append("main")
    thread.join(LIMIT)
    assert order.index("other") < 20
    assert len(order) == 1001


def test_a_turn_that_ctrl_c_interrupts_is_given_back(interruptible):
    turns, held = Turns(), threading.Event()

    def hold() -> None:
        with turns:
            held.set()
            time.sleep(0.3)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT)
    pressed = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    pressed.start()
    with pytest.raises(KeyboardInterrupt), turns:
        raise AssertionError("Ctrl-C came before the lock")
    thread.join(LIMIT)
    entered = threading.Thread(target=turns.__enter__)
    entered.start()
    entered.join(LIMIT)
    assert not entered.is_alive()

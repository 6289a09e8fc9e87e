"""Programs that are compiled behind the steps: the same tokens from larger programs, and every step
is consistent.
"""

from __future__ import annotations

import gc
import itertools
import logging
import subprocess
import sys
import threading
import weakref
from collections import defaultdict
from pathlib import Path

import chex
import numpy as np
import pytest

from pagedjax import LLM, Engine, EngineConfig, SamplingParams
from pagedjax.device.batch import StepShape
from pagedjax.engine import background, compilations, runtime, state
from pagedjax.engine.processes import engines
from tests.engine.runs import answers, greedy, small_llm, steps
from tests.refusals import refused

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (2, 4, 16),
    "num_blocks": 64,
}
PROMPTS = [list(range(3, 8)), list(range(20, 31)), [7, 9]]
GREEDY = greedy(6, logprobs=2)
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True, logprobs=2
)
MIXED = [
    GREEDY,
    SAMPLED,
    SamplingParams(temperature=1.0, frequency_penalty=1.0, seed=9, max_tokens=8, ignore_eos=True),
]


class Gate:
    """Holds the compilation of each program behind the steps until the test opens it.

    opened: by the tokens of a program, the event that lets its compilation begin.
    begun: the programs whose compilation has been asked for, in order.
    """

    def __init__(self) -> None:
        self.opened = defaultdict(threading.Event)
        self.begun: list[int] = []
        self.failing: set[int] = set()

    def around(self, compiler):
        def make(*args, **options):
            build = compiler(*args, **options)
            if options.get("states"):
                return build  # compiled at its first use

            def held(shape, config):
                self.begun.append(shape.tokens)
                if shape.tokens != SIZES["token_buckets"][-1]:
                    assert self.opened[shape.tokens].wait(60)
                if shape.tokens in self.failing:
                    raise RuntimeError("no memory for this program")
                return build(shape, config)

            return held

        return make

    def open(self, *sizes: int) -> None:
        for size in sizes or SIZES["token_buckets"]:
            self.opened[size].set()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(runtime, "_compiler", gate.around(runtime._compiler))
    set_times(monkeypatch, pause=0.0)
    yield gate
    gate.open()


def set_times(monkeypatch, **seconds: float) -> None:
    for name, value in seconds.items():
        monkeypatch.setattr(background, name.upper(), value)


def make(one_layer, **config) -> tuple[LLM, background.BackgroundPrograms]:
    llm = small_llm(one_layer, **{"compilation": "background", **SIZES, **config})
    return llm, llm.engine.background


def padded(llm: LLM, prompts=PROMPTS, params=MIXED) -> list[int]:
    """Run requests -> the sizes of all steps."""
    names = llm.engine.new_ids(len(prompts))
    for name, prompt, request_params in zip(names, prompts, params, strict=True):
        llm.engine.add(name, prompt, request_params)
    results = list(steps(llm.engine))
    assert {result.compilations for result in results} == {0}
    return [result.padded_tokens for result in results]


def outputs(llm: LLM):
    """Tokens, and the log-probabilities as arrays."""
    branches = answers(llm, PROMPTS, MIXED)
    places = [place for branch in branches for place in branch.logprobs or ()]
    logprobs = [top.logprob for place in places for top in place.values()]
    return [branch.token_ids for branch in branches], np.array(logprobs, np.float32)


@pytest.fixture(scope="module")
def expected(one_layer):
    """What an engine gives whose programs were all compiled first."""
    return outputs(small_llm(one_layer, **SIZES))


def test_the_program_for_log_probabilities_of_prompts_is_compiled_when_one_is_wanted(one_layer):
    llm = small_llm(one_layer, **SIZES)
    engine = llm.engine
    counts = []
    for number in range(2):
        engine.add(str(number), PROMPTS[2], greedy(3, prompt_logprobs=1))
        results = list(steps(engine))
        counts.append([result.compilations for result in results])
        assert results[0].logprobs[0].prompt
        assert [result.padded_tokens for result in results] == [16, 2, 2]
    assert sum(counts[1]) == 0
    shape = StepShape(16, 4, prompt_logprobs=True, plain=True, logprobs=False)
    assert list(engine.runtime.prompt_programs) == [shape]


@pytest.mark.default_cases("{}")
@pytest.mark.parametrize(
    "config", [{}, {"lookahead": 2}, {"attention_impl": "xla", "linear_impl": "xla"}], ids=str
)
def test_requests_are_answered_by_the_largest_program_and_later_by_their_own(
    one_layer, gate, expected, config
):
    llm, programs = make(one_layer, **config)
    assert (len(programs), programs.missing) == (1, 2)
    tokens, logprobs = outputs(llm)
    assert tokens == expected[0]
    chex.assert_trees_all_close(logprobs, expected[1], atol=1e-5)
    # the compiled kernels compute a token alike, whatever the program's size
    if "attention_impl" not in config:
        chex.assert_trees_all_equal(logprobs, expected[1])
    assert set(padded(llm)) == {16}
    before = compilations.counts()
    gate.open()
    programs.join(60)
    assert compilations.counts() == before, "what is compiled behind a step is not its own"
    assert programs.missing == 0
    assert gate.begun == [16, 4, 2]
    llm.engine.reset_prefix_cache()
    assert outputs(llm)[0] == expected[0]
    llm.engine.reset_prefix_cache()
    assert set(padded(llm)) > {4, 16}


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_program_that_comes_in_while_a_step_runs_serves_the_next_one(
    one_layer, gate, expected, lookahead
):
    llm, programs = make(one_layer, lookahead=lookahead)
    largest = programs[StepShape(16, 4)]
    present = []

    def and_another_comes_in(*args):
        gate.open(4)
        while 4 not in programs.present.tokens:
            programs.join(0.01)
        present.append(programs.present.tokens)
        return largest(*args)

    programs[StepShape(16, 4)] = and_another_comes_in
    assert padded(llm, [[3]], [SAMPLED]) == [16, *[4] * 5]
    assert present == [(4, 16)]
    llm.engine.reset_prefix_cache()
    assert outputs(llm)[0] == expected[0]


def test_a_failed_compilation_is_logged_and_survived(one_layer, gate, expected, caplog):
    gate.failing = {4}
    llm, programs = make(one_layer)
    with caplog.at_level(logging.INFO, "pagedjax.engine"):
        gate.open()
        programs.join(60)
    assert "the program for 4 tokens cannot be compiled" in caplog.text
    assert "2 of 3 programs are there" in caplog.text
    assert programs.missing == 1
    assert outputs(llm)[0] == expected[0]
    llm.engine.reset_prefix_cache()
    assert 4 not in padded(llm)


@pytest.mark.parametrize(
    ("pause", "patience", "begins"), [(60.0, 60.0, False), (0.1, 60.0, True), (60.0, 0.1, True)]
)
def test_a_compilation_waits_for_a_pause_but_not_for_ever(
    one_layer, gate, monkeypatch, pause, patience, begins
):
    set_times(monkeypatch, pause=pause, patience=patience, loaded=0.0)
    monkeypatch.setattr(compilations, "counts", lambda: compilations.Counts(0, 0))
    gate.open()
    llm, programs = make(one_layer)
    programs.join(60 if begins else 0.5)
    assert (programs.missing == 0) == begins
    before = programs.stepped_at
    sizes = set(padded(llm))
    assert sizes > {4, 16} if begins else sizes == {16}
    assert programs.stepped_at > before
    programs.stop()  # it does not wait for the pause
    programs.join(30)
    assert not programs.compiling


@pytest.mark.parametrize("on_disk", [True, False])
def test_programs_on_disk_are_fetched_without_a_pause(one_layer, gate, monkeypatch, on_disk):
    set_times(monkeypatch, pause=60.0, patience=60.0, loaded=60.0)
    numbers = itertools.count() if on_disk else itertools.repeat(0)
    monkeypatch.setattr(
        compilations, "counts", lambda: compilations.Counts(next(numbers), next(numbers))
    )
    gate.open()
    _, programs = make(one_layer)
    programs.join(60 if on_disk else 0.5)
    assert programs.missing == (0 if on_disk else 2)
    programs.stop()


def test_stopping_begins_no_other_program(one_layer, gate):
    _, programs = make(one_layer)
    while len(gate.begun) < 2:
        programs.join(0.01)
    programs.stop()
    assert programs.compiling  # the one under way
    gate.open()
    programs.join(60)
    assert not programs.compiling
    assert (len(programs), gate.begun) == (2, [16, 4])


def test_an_engine_that_is_dropped_is_not_kept_by_its_thread(one_layer, gate):
    llm, programs = make(one_layer)
    thread = programs._thread
    reference = weakref.ref(programs)
    del llm, programs
    gate.open(4)
    thread.join(60)
    gc.collect()
    assert reference() is None
    assert len(gate.begun) < 3


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.slow
def test_python_ends_while_a_program_is_compiled(one_layer_folder):
    program = (
        "import sys\nfrom pagedjax import LLM\n"
        "llm = LLM(sys.argv[1], progress=False, compilation='background', num_blocks=64)\n"
        "print(llm.engine.background.compiling, flush=True)\n"
    )
    process = run_python(program, str(one_layer_folder))
    assert (process.returncode, process.stdout, process.stderr) == (0, "True\n", "")


def test_python_ends_while_a_program_is_traced():
    """A trace that goes on at the end of Python keeps its constants."""
    script = """
import threading, time
import jax, jax.numpy as jnp
from pagedjax.device.batch import Shapes
from pagedjax.engine.background import BackgroundPrograms

traces = threading.Event()

def branch(x, y):
    z = x + y  # y is a constant of the branch
    traces.set()
    time.sleep(1)
    return z

def build(shape, config):
    step = jax.jit(lambda x, y: jax.lax.cond(x[0] > 0, lambda x: branch(x, y), lambda x: x, x))
    compiled = step.lower(jnp.ones(3), jnp.ones(3)).compile()
    print("compiled", flush=True)
    return compiled

programs = BackgroundPrograms(build, None, {}, Shapes((1,), 1, 1, 1, 1, 1), True)
programs.start()
traces.wait(60)
"""
    process = run_python(script)
    assert (process.returncode, process.stdout) == (0, "compiled\n"), process.stderr
    assert "cannot be compiled" not in process.stderr


def test_an_engine_compiles_everything_first(one_layer):
    engine = Engine(one_layer.model, EngineConfig(**SIZES))
    assert engine.config.compilation == "eager"
    assert engine.background is None
    assert len(engine.runtime.programs) == 3
    assert state.present_shapes(engine.runtime) == engine.runtime.shapes


def test_it_is_refused_in_several_processes(one_layer, monkeypatch):
    monkeypatch.setattr(engines.jax, "process_count", lambda: 2)
    with refused("all processes must run the same program for a step; set compilation='eager'"):
        engines.make_engine(one_layer.model, EngineConfig(compilation="background", **SIZES))


@pytest.mark.parametrize(
    ("sizes", "most_seqs", "order"),
    [
        (
            (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            64,
            [64, 8, 512, 2, 32, 256, 1024, 1, 4, 16, 128],
        ),
        ((2, 4, 8), 3, [4, 2, 8]),
        ((8,), 64, [8]),
        ((), 64, []),
    ],
)
def test_the_order_keeps_every_step_near_a_bucket(sizes, most_seqs, order):
    shapes = [StepShape(size, size) for size in sizes]
    assert [shape.tokens for shape in background.in_order(shapes, most_seqs)] == order


def test_a_buckets_program_for_decodes_is_compiled_behind_its_other_one():
    order = [
        StepShape(4, 4),
        StepShape(4, 4, True),
        StepShape(2, 2),
        StepShape(2, 2, True),
        StepShape(8, 4),
    ]
    shapes = [order[i] for i in (3, 1, 2, 0, 4)]
    assert background.in_order(shapes, 4) == order

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
from pagedjax.engine import background, compilations, runtime, step
from pagedjax.engine.processes import engines
from pagedjax.host.replay import verify
from tests import quick_compiler

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (2, 4, 16),
    "num_blocks": 64,
}
PROMPTS = [list(range(3, 8)), list(range(20, 31)), [7, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
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
    found = Gate()
    monkeypatch.setattr(runtime, "_compiler", found.around(runtime._compiler))
    monkeypatch.setattr(background, "PAUSE", 0.0)
    yield found
    found.open()


def make(one_layer, **config) -> LLM:
    return LLM(one_layer, progress=False, **{"compilation": "background", **SIZES, **config})


def programs_of(llm: LLM) -> background.BackgroundPrograms:
    found = llm.engine.background
    assert found is not None
    return found


def steps(llm: LLM, prompts=PROMPTS, params=MIXED):
    """Run requests -> the results of all steps."""
    names = llm.engine.new_ids(len(prompts))
    for name, prompt, one in zip(names, prompts, params, strict=True):
        llm.engine.add(name, prompt, one)
    while llm.engine.has_work:
        result = llm.engine.step()
        assert result is not None
        yield result


def outputs(llm: LLM):
    """Tokens, and the log-probabilities as arrays."""
    found = llm.generate(PROMPTS, MIXED, use_tqdm=False)
    tokens = [one.outputs[0].token_ids for one in found]
    positions = [position for one in found for position in one.outputs[0].logprobs or ()]
    return tokens, np.array(
        [top.logprob for position in positions for top in position.values()], np.float32
    )


@pytest.fixture(scope="module")
def expected(one_layer):
    """What an engine gives whose programs were all compiled first."""
    return outputs(LLM(one_layer, progress=False, **SIZES))


@pytest.mark.default_cases("{}")
@pytest.mark.parametrize(
    "config", [{}, {"lookahead": 2}, {"attention_impl": "xla", "linear_impl": "xla"}], ids=str
)
def test_requests_are_answered_by_the_largest_program_and_later_by_their_own(
    one_layer, gate, expected, config
):
    llm = make(one_layer, **config)
    programs = programs_of(llm)
    assert (len(programs), programs.missing) == (1, 2)
    tokens, logprobs = outputs(llm)
    assert tokens == expected[0]
    chex.assert_trees_all_close(logprobs, expected[1], atol=1e-5)
    # the compiled kernels compute a token alike, whatever the program's size
    if "attention_impl" not in config:
        chex.assert_trees_all_equal(logprobs, expected[1])
    assert {result.padded_tokens for result in steps(llm)} == {16}
    gate.open()
    programs.join(60)
    assert programs.missing == 0
    assert gate.begun == [16, 4, 2]
    llm.engine.reset_prefix_cache()
    assert outputs(llm)[0] == expected[0]
    llm.engine.reset_prefix_cache()
    assert {result.padded_tokens for result in steps(llm)} > {4, 16}


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_program_that_comes_in_while_a_step_runs_serves_the_next_one(
    one_layer, gate, expected, lookahead
):
    llm = make(one_layer, lookahead=lookahead)
    programs = programs_of(llm)
    largest, seen = programs[StepShape(16, 4)], []

    def and_another_comes_in(*args):
        gate.open(4)
        while 4 not in programs.present.tokens:
            programs.join(0.01)
        seen.append(programs.present.tokens)
        return largest(*args)

    programs[StepShape(16, 4)] = and_another_comes_in
    found = list(steps(llm, [[3]], [SAMPLED]))
    assert seen == [(4, 16)]
    assert [result.padded_tokens for result in found] == [16, *[4] * 5]
    llm.engine.reset_prefix_cache()
    assert outputs(llm)[0] == expected[0]


@pytest.mark.slow
def test_what_is_compiled_behind_a_step_is_not_counted_as_its_own(one_layer, gate):
    llm = make(one_layer)
    before = compilations.counts()
    gate.open()
    programs_of(llm).join(60)
    assert programs_of(llm).missing == 0
    assert compilations.counts() == before
    assert {result.compilations for result in steps(llm)} == {0}


def test_a_failed_compilation_is_logged_and_survived(one_layer, gate, expected, caplog):
    gate.failing = {4}
    llm = make(one_layer)
    with caplog.at_level(logging.INFO, "pagedjax.engine"):
        gate.open()
        programs_of(llm).join(60)
    assert "the program for 4 tokens cannot be compiled" in caplog.text
    assert "2 of 3 programs are there" in caplog.text
    assert programs_of(llm).missing == 1
    assert outputs(llm)[0] == expected[0]
    llm.engine.reset_prefix_cache()
    assert 4 not in {result.padded_tokens for result in steps(llm)}


@pytest.mark.slow
def test_recordings_do_not_depend_on_which_programs_exist(one_layer, gate, tmp_path):
    written = []
    for name, compilation in (("behind", "background"), ("first", "eager")):
        if compilation == "eager":
            gate.open()
        llm = make(one_layer, compilation=compilation)
        llm.engine.record(tmp_path / name)
        outputs(llm)
        llm.engine.record(None)
        assert verify(tmp_path / name).steps > 5
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("pause", "patience", "begins"), [(60.0, 60.0, False), (0.1, 60.0, True), (60.0, 0.1, True)]
)
def test_a_compilation_waits_for_a_pause_but_not_for_ever(
    one_layer, gate, monkeypatch, pause, patience, begins
):
    monkeypatch.setattr(background, "PAUSE", pause)
    monkeypatch.setattr(background, "PATIENCE", patience)
    monkeypatch.setattr(background, "LOADED", 0.0)
    nothing_on_disk(monkeypatch)
    gate.open()
    llm = make(one_layer)
    programs = programs_of(llm)
    programs.join(60 if begins else 0.5)
    assert (programs.missing == 0) == begins
    before = programs.stepped_at
    padded = {result.padded_tokens for result in steps(llm)}
    assert padded > {4, 16} if begins else padded == {16}
    assert programs.stepped_at > before
    programs.stop()  # it does not wait for the pause
    programs.join(30)
    assert not programs.compiling


def nothing_on_disk(monkeypatch) -> None:
    monkeypatch.setattr(compilations, "counts", lambda: compilations.Counts(0, 0))


@pytest.mark.parametrize("on_disk", [True, False])
def test_programs_on_disk_are_fetched_without_a_pause(one_layer, gate, monkeypatch, on_disk):
    monkeypatch.setattr(background, "PAUSE", 60.0)
    monkeypatch.setattr(background, "PATIENCE", 60.0)
    monkeypatch.setattr(background, "LOADED", 60.0)
    if on_disk:
        numbers = itertools.count()
        monkeypatch.setattr(
            compilations, "counts", lambda: compilations.Counts(next(numbers), next(numbers))
        )
    else:
        nothing_on_disk(monkeypatch)
    gate.open()
    programs = programs_of(make(one_layer))
    programs.join(60 if on_disk else 0.5)
    assert programs.missing == (0 if on_disk else 2)
    programs.stop()


def test_stopping_begins_no_other_program(one_layer, gate):
    llm = make(one_layer)
    programs = programs_of(llm)
    while len(gate.begun) < 2:
        programs.join(0.01)
    programs.stop()
    assert programs.compiling  # the one under way
    gate.open()
    programs.join(60)
    assert not programs.compiling
    assert (len(programs), gate.begun) == (2, [16, 4])


def test_an_engine_that_is_dropped_is_not_kept_by_its_thread(one_layer, gate):
    llm = make(one_layer)
    thread, kept = programs_of(llm)._thread, weakref.ref(programs_of(llm))
    del llm
    gate.open(4)
    thread.join(60)
    gc.collect()
    assert kept() is None
    assert len(gate.begun) < 3


@pytest.mark.slow
def test_python_ends_while_a_program_is_compiled(one_layer_folder):
    program = (
        "import sys\nfrom pagedjax import LLM\n"
        "llm = LLM(sys.argv[1], progress=False, compilation='background', num_blocks=64)\n"
        "print(llm.engine.background.compiling, flush=True)\n"
    )
    words = [sys.executable, "-c", program, str(one_layer_folder)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert done.stderr == ""


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
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "compiled\n", done.stderr
    assert "cannot be compiled" not in done.stderr


def test_an_llm_compiles_behind_its_steps_where_it_can_and_an_engine_everything_first(one_layer):
    default = quick_compiler.of_users("default_compilation")
    assert default({}) == "background"
    assert default({"speculative": {"method": "ngram"}}) == "eager"
    engine = Engine(one_layer.model, EngineConfig(**SIZES))
    assert engine.config.compilation == "eager"
    assert engine.background is None
    assert len(engine.runtime.programs) == 3
    assert step.present_shapes(engine.runtime) == engine.runtime.shapes


def test_it_is_refused_with_drafts_and_in_several_processes(one_layer, monkeypatch):
    with pytest.raises(ValueError, match="compilation is 'background' and speculative is 'ngram'"):
        EngineConfig(compilation="background", speculative={"method": "ngram"})  # type: ignore[arg-type]
    monkeypatch.setattr(engines.jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError,
        match="all processes must run the same program for a step; set compilation='eager'",
    ):
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
    shapes = [
        StepShape(2, 2, True),
        StepShape(4, 4, True),
        StepShape(2, 2),
        StepShape(4, 4),
        StepShape(8, 4),
    ]
    order = [
        StepShape(4, 4),
        StepShape(4, 4, True),
        StepShape(2, 2),
        StepShape(2, 2, True),
        StepShape(8, 4),
    ]
    assert background.in_order(shapes, 4) == order

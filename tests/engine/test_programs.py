"""How an engine's programs are made: all at once in threads, or each when a step first wants it."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import chex
import pytest

from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.device import step
from pagedjax.engine import compilations, kept_programs, programs
from pagedjax.engine.resolve import resolve, shapes
from tests import mappings
from tests.engine.runs import greedy, small_llm, steps, token_ids
from tests.refusals import refused

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (4, 16),
    "num_blocks": 64,
}
GREEDY = greedy(5)


@pytest.mark.parametrize("num_blocks", [64, 7])
def test_each_bucket_is_compiled_largest_first_and_only_the_largest_twice(config, num_blocks):
    """Twice if the engine then fits itself to fewer blocks."""
    fitted = replace(config, num_blocks=num_blocks)
    built = []

    def build(tokens, c):
        built.append((tokens, c.num_blocks))
        return tokens, c.num_blocks

    compiled = programs.compile_all(build, config.token_buckets, config, lambda largest: fitted)
    assert compiled == ({t: (t, num_blocks) for t in (4, 8, 16)}, fitted)
    assert list(compiled[0]) == [4, 8, 16]
    assert built[0] == (16, 64)
    expected = {(16, 64), *((t, num_blocks) for t in (4, 8, 16))}
    assert sorted(built) == sorted(expected)


@pytest.fixture(scope="module")
def config(one_layer):
    return resolve(EngineConfig(**SIZES | {"token_buckets": (4, 8, 16)}), one_layer.model)


def test_the_first_error_cancels_the_other_compilations(config, monkeypatch):
    monkeypatch.setattr(programs, "THREADS", 1)
    built = []

    def build(tokens, c):
        built.append(tokens)
        if tokens == 8:
            raise RuntimeError("no program of 8")
        threading.Event().wait(0 if tokens == 16 else 0.5)  # until the error is raised

    with pytest.raises(RuntimeError, match="no program of 8"):
        programs.compile_all(build, (1, 2, 3, 4, 8, 16), config, lambda largest: config)
    assert built[:2] == [16, 8]
    assert len(built) < 6
    built.clear()

    def unfit(largest):
        raise ValueError("does not fit")

    with refused("does not fit"):
        programs.compile_all(build, config.token_buckets, config, unfit)
    assert built == [16]


def test_programs_are_compiled_in_parallel(config, monkeypatch):
    monkeypatch.setattr(programs.os, "cpu_count", lambda: 2)
    barrier = threading.Barrier(2, timeout=30)  # broken unless two are inside at once

    def build(tokens, c):
        if tokens != 16:
            barrier.wait()

    programs.compile_all(build, config.token_buckets, config, lambda largest: config)


@pytest.mark.slow
def test_lazy_compiles_a_bucket_at_its_first_step_with_the_same_tokens(one_layer):
    prompts = [list(range(3, 8)), list(range(20, 31))]
    eager, lazy = (
        small_llm(one_layer, compilation=compilation, **SIZES) for compilation in ("eager", "lazy")
    )
    assert len(eager.engine.runtime.programs) == 2
    assert lazy.startup["compilations"] <= 1  # zeros for the cache
    engine = lazy.engine
    lines = [line.split(maxsplit=2) for line in str(engine.memory).splitlines()]
    assert ["activations", "peak", "unknown  until the largest step is compiled"] in lines
    assert engine.memory.left == engine.memory.free - engine.memory.cache

    sizes = []
    for name in "ab":  # a cached block makes the second one shorter
        engine.add(name, prompts[0], GREEDY)
        result = engine.step()
        assert result.compilations == (result.padded_tokens not in sizes)
        sizes.append(result.padded_tokens)
        engine.cancel(name)
    assert sizes[0] == 16

    engine.reset()
    assert token_ids(eager, prompts, GREEDY) == token_ids(lazy, prompts, GREEDY)
    before = compilations.compilations()
    lazy.generate(prompts, GREEDY)
    assert compilations.compilations() == before


def test_a_lazy_engine_has_small_programs_for_steps_without_options(one_layer):
    """One is compiled for the first request, another one for the first with log-probabilities, and
    the whole one for the first with an option; all give a request the same tokens.
    """
    llm = small_llm(one_layer)
    compiled = llm.engine.runtime.programs
    shape = llm.engine.runtime.shapes.steps[-1]
    drawn = SamplingParams(temperature=0.9, seed=4, max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    tokens_alone = token_ids(llm, prompts, [GREEDY, drawn])
    smallest = shape._replace(plain=True, logprobs=False)
    assert set(compiled) == {smallest}
    with_logprobs = shape._replace(plain=True)
    tokens = token_ids(llm, [*prompts, prompts[0]], [GREEDY, drawn, greedy(4, logprobs=1)])
    assert set(compiled) == {smallest, with_logprobs}
    assert tokens[:2] == tokens_alone
    with_options = [greedy(4, logprobs=1), greedy(4, frequency_penalty=0.5)]
    tokens = token_ids(llm, [*prompts, *prompts], [GREEDY, drawn, *with_options])
    assert set(compiled) == {smallest, with_logprobs, shape}
    assert tokens[:2] == tokens_alone


@pytest.mark.parametrize(
    ("compilation", "batch_invariant", "plain"),
    [
        ("lazy", False, True),
        ("lazy", True, False),
        ("background", False, False),
        ("eager", False, False),
    ],
)
def test_which_engines_have_small_programs(config, one_layer, compilation, batch_invariant, plain):
    options = replace(config, compilation=compilation, batch_invariant=batch_invariant)
    assert shapes(options, one_layer.model).plain == plain


def test_a_failed_compilation_leaves_the_state_unchanged(one_layer, monkeypatch):
    engine = small_llm(one_layer, compilation="lazy", **SIZES).engine
    engine.add("a", [3, 4, 5], GREEDY)
    state = engine.scheduler_state

    def build(tokens, c):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runtime.programs, "_build", build)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
    assert engine.scheduler_state == state
    assert list(steps(engine))


def test_an_unknown_compilation_is_refused():
    with refused("compilation is 'later'; it must be one of 'eager', 'lazy'"):
        EngineConfig(compilation="later")  # type: ignore[arg-type]


def test_the_start_up_summary_names_stages_and_programs(one_layer, capsys):
    figures = {
        "import": 1.0,
        "load": 2.04,
        "compile": 3.0,
        "warmup": 0.26,
        "compilations": 13,
        "cached": 12,
    }
    stages = "import 1.0 s, load 2.0 s, compile 3.0 s, warm-up 0.3 s"
    counts = "13 programs, 12 of them from the cache on disk"
    assert programs.summary(figures) == f"start-up: {stages}; {counts}"
    llm = LLM(one_layer, progress=True, compilation="eager", **SIZES)
    assert programs.summary(llm.startup) in capsys.readouterr().err
    assert set(llm.startup) == set(figures)
    assert llm.startup["cached"] <= llm.startup["compilations"] <= 4


def test_a_step_is_traced_once_for_each_bucket_and_never_after_start_up(one_layer, monkeypatch):
    """Counted by chex in the function that every step samples with; one trace more raises."""
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(step.sample, n=len(SIZES["token_buckets"]))
    monkeypatch.setattr(step, "sample", counted)
    llm = small_llm(one_layer, compilation="eager", **SIZES)
    prompts = [list(range(3, 3 + n)) for n in (2, 7, 14)]
    mixed = [
        GREEDY,
        SamplingParams(top_p=0.5, seed=1, max_tokens=4),
        SamplingParams(frequency_penalty=1.0, logprobs=2),
    ]
    assert len(llm.generate(prompts, mixed)) == 3
    with pytest.raises(AssertionError, match="traced > 2 times"):
        # the count is not blind: another engine traces again
        small_llm(one_layer, compilation="eager", **SIZES)


@pytest.mark.slow
@pytest.mark.skipif(not mappings.used(), reason="this system does not count memory mappings")
def test_an_engine_that_is_dropped_gives_its_memory_mappings_back(one_layer, monkeypatch):
    """Else a sweep of many engines ends in a segmentation fault, when Linux gives the process no
    more of them.
    """

    def mapped() -> tuple[int, int]:
        """By this process while an engine lives, and after it."""
        llm = small_llm(one_layer, compilation="eager", **SIZES)
        llm.generate([[3, 4, 5]], GREEDY)
        while_it_lives = mappings.used()
        del llm
        gc.collect()
        return while_it_lives, mappings.used()

    monkeypatch.setattr(
        kept_programs, "program", lambda facts, arguments, device, compile_: compile_()
    )
    _, before = mapped()  # JAX keeps programs of single operations, once for each shape
    alive, after = zip(*(mapped() for _ in range(3)), strict=True)
    assert min(alive) - before > 100 * len(SIZES["token_buckets"])
    assert max(after) - before < (min(alive) - before) / 10

"""Programs that are found by what they are made from: in memory, on disk, and never for other code
or other shapes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from pagedjax import Engine, EngineConfig
from pagedjax.device import attention, sampling
from pagedjax.device.models.decoder import Block
from pagedjax.device.row_features import RowFeature
from pagedjax.device.row_features import chain as chain_of
from pagedjax.engine import compilations, kept_programs, runtime
from tests import quick_compiler
from tests.engine.runs import greedy, sampled, steps
from tests.fresh_python import output_of

SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "token_buckets": (8,), "num_blocks": 256}
GREEDY = greedy(6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of programs, and no program in memory."""
    monkeypatch.setattr(compilations, "folder", lambda: tmp_path)
    forget(monkeypatch)
    return tmp_path


def forget(monkeypatch) -> None:
    """Programs of this process are those of this test, found as for users."""
    monkeypatch.setattr(kept_programs, "_programs", {})
    monkeypatch.setattr(kept_programs, "program", quick_compiler.of_users("program"))


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The names of functions that JAX compiles, or loads from its own cache."""
    names: list[str] = []
    event = "/jax/core/compile/backend_compile_duration"

    def listen(name: str, seconds: float, fun_name: str = "", **details: object) -> None:
        if name == event:
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def engine_of(tiny, **options) -> Engine:
    features = options.pop("row_features", ())
    return Engine(tiny.model, EngineConfig(**SIZES | options), row_features=features)


def steps_compiled(names: list[str]) -> int:
    return sum("step" in name for name in names)


def tokens_of(engine: Engine) -> list[int]:
    engine.add("a", [3, 4, 5], GREEDY)
    return sampled(steps(engine))["a"]


def test_a_program_is_found_in_memory_and_then_on_disk(tiny, folder, compiled, monkeypatch):
    first = engine_of(tiny)
    tokens = tokens_of(first)
    assert steps_compiled(compiled) <= 1
    compiled.clear()
    second = engine_of(tiny)
    assert list(second.runtime.programs.values()) == list(first.runtime.programs.values())
    assert (second.startup["compilations"], second.startup["cached"]) >= (1, 1)
    assert steps_compiled(compiled) == 0
    files = list(folder.glob(f"{kept_programs.PREFIX}*"))
    if not files:  # JAX has found the program in its own cache, and such a one is not written
        return
    forget(monkeypatch)
    third = engine_of(tiny)
    assert list(third.runtime.programs.values()) != list(first.runtime.programs.values())
    assert steps_compiled(compiled) == 0
    assert tokens_of(third) == tokens == tokens_of(second)


def test_a_program_written_to_disk_computes_the_same_and_a_damaged_file_is_made_again(
    folder, monkeypatch
):
    traced: list[str] = []
    salt = time.time_ns() % 2**20  # the program is in no cache of JAX

    def program(values: jax.Array) -> jax.Array:
        traced.append("step")
        return values * 2 + salt

    values = np.arange(7.0, dtype=np.float32)
    device = jax.devices()[0]
    compile_program = lambda: jax.jit(lambda x: program(x)).lower(values).compile()  # noqa: E731
    facts = ["a program of a test", str(folder)]
    first = kept_programs.program(facts, (values,), device, compile_program)
    (file,) = folder.iterdir()
    forget(monkeypatch)
    second = kept_programs.program(facts, (values,), device, compile_program)
    assert traced == ["step"]
    chex.assert_trees_all_equal(second(values), first(values))
    content = file.read_bytes()
    for damaged in (b"", content[:-1], content[:40] + b"x" + content[41:]):
        file.write_bytes(damaged)
        forget(monkeypatch)
        traced.clear()
        repaired = kept_programs.program(facts, (values,), device, compile_program)
        assert traced == ["step"]
        chex.assert_trees_all_equal(repaired(values), first(values))
        file.write_bytes(content)


def test_the_key_has_what_a_program_is_made_from(monkeypatch):
    values = np.zeros(3, np.float32)
    device = jax.devices()[0]
    key = lambda facts, arguments: kept_programs._key(facts, arguments, device)  # noqa: E731
    plain = key(["fact"], (values,))
    different = [
        key(["other fact"], (values,)),
        key(["fact", ""], (values,)),
        key(["fact"], (values.astype(np.int32),)),
        key(["fact"], (values[:2],)),
        key(["fact"], [values]),
        key(["fact"], (values, None)),
        kept_programs._key(["fact"], (values,), jax.devices()[1]),
    ]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    different.append(key(["fact"], (values,)))
    monkeypatch.undo()
    assert key(["fact"], (values + 1,)) == plain
    assert plain not in different
    assert len(set(different)) == len(different)


def test_settings_of_jax_are_in_the_key():
    before = kept_programs._settings()
    assert before == kept_programs._settings()
    with jax.default_matmul_precision("highest"):
        assert kept_programs._settings() != before
    assert kept_programs._settings() == before


@pytest.mark.parametrize("name", ["best_tokens", "CPU_TILE", "History"])
def test_code_that_was_replaced_is_compiled_and_not_kept(folder, monkeypatch, name):
    assert kept_programs._as_imported()
    value = 4 if name.isupper() else lambda *arguments: getattr(sampling, name)(*arguments)
    monkeypatch.setattr(sampling, name, value)
    made = [
        kept_programs.program(["fact"], (), jax.devices()[0], lambda: object()) for _ in range(2)
    ]
    assert made[0] is not made[1]
    assert list(folder.iterdir()) == []
    monkeypatch.undo()
    assert kept_programs._as_imported()


def test_a_method_that_was_replaced_is_seen(monkeypatch):
    from pagedjax.device.row_features import RowChain

    monkeypatch.setattr(RowChain, "apply", lambda *arguments: None)
    assert not kept_programs._as_imported()


@pytest.mark.slow
def test_options_of_ones_own_are_traced(tiny, folder, monkeypatch):
    feature = RowFeature(
        "nothing", "logits", {"x": np.float32(0)}, lambda p, _: None, lambda x, *_: x, ("nothing",)
    )
    facts_of = []
    monkeypatch.setattr(
        kept_programs,
        "program",
        lambda facts, *arguments: facts_of.append(facts) or arguments[-1](),
    )
    tokens = tokens_of(engine_of(tiny, row_features=(feature,)))
    assert facts_of == [None]
    assert len(tokens) == GREEDY.max_tokens


def test_layers_attention_and_products_of_ones_own_are_traced(tiny):
    """Two files may have classes and functions of one name."""

    class Own(Block):
        pass

    attend = attention.attend("xla", 1.0)
    chain = chain_of((), 320)
    config = tiny.model.config
    assert runtime._is_built_in(attend, chain, [config])
    assert not runtime._is_built_in(attend, chain, [config, replace(config, block=Own)])
    assert not runtime._is_built_in(attend, chain, [replace(config, linear=f"{__file__}:MINE")])
    for changed in (
        {"name": "mine"},
        {"write": print},
        {"probabilities": print},
        {"attend": print},
    ):
        assert not runtime._is_built_in(
            replace(attend, impl=attend.impl._replace(**changed)), chain, [config]
        )


def test_old_files_are_removed_first(folder, monkeypatch):
    monkeypatch.setattr(kept_programs, "MAX_BYTES", 250)
    for age, name in enumerate(("new", "middle", "old")):
        file = folder / f"{kept_programs.PREFIX}{name}"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 - age, 1000 - age))
    other = folder / "jit_step-cache"
    other.write_bytes(bytes(1000))
    kept_programs._remove_old(folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "jit_step-cache",
        "step-middle",
        "step-new",
    ]


START = """
import sys
import jax
traced = []
def listen(name, seconds, fun_name="", **more):
    if name == "/jax/core/compile/jaxpr_trace_duration":
        traced.append(fun_name)
jax.monitoring.register_event_duration_secs_listener(listen)
from pagedjax import LLM, SamplingParams
llm = LLM(sys.argv[1], progress=False, compilation="lazy", max_num_seqs=2, token_buckets=(8,), max_num_batched_tokens=8)
out = llm.generate([3, 4, 5], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
print(sum("step" in name for name in traced), *out[0].outputs[0].token_ids)
"""


@pytest.mark.slow
def test_a_warm_start_traces_no_step(tiny_folder, tmp_path):
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    command = [sys.executable, "-c", START, str(tiny_folder)]
    options = {
        "capture_output": True,
        "text": True,
        "timeout": 600,
        "check": True,
        "cwd": Path(__file__).parents[2],
    }
    cold, warm = (
        subprocess.run(command, env=environment, **options).stdout.split() for _ in range(2)
    )
    assert int(cold[0]) > 0
    assert int(warm[0]) == 0
    assert warm[1:] == cold[1:]


SOLVE = """
import sys
from pathlib import Path
import jax
import numpy as np
from pagedjax.engine import compilations, kept_programs

folder = Path(sys.argv[1])
compilations.folder = lambda: folder
jax.config.update("jax_enable_compilation_cache", False)
matrix = np.tril(np.ones((1, 4, 4), np.float32))

def compiled():
    assert not list(folder.iterdir()), "it is on disk"
    solve = lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)
    return jax.jit(solve).lower(matrix, matrix).compile()

device = jax.devices("cpu")[0]
solve = kept_programs.program(["solve"], (matrix, matrix), device, compiled)
print(np.asarray(solve(matrix, matrix)).tolist())
"""


def test_a_program_from_disk_solves_triangles_in_a_process_that_traced_none(tmp_path):
    """As the step of a model with a gated delta rule does, whose engine starts again."""
    first, second = (output_of(SOLVE, tmp_path) for _ in range(2))
    assert first == second == f"{[np.eye(4).tolist()]}\n"
    assert len(list(tmp_path.iterdir())) == 1

"""The bounded cache of compiled programs on disk: for our own compilations only, and JAX keeps its
options.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pagedjax import LLM, SamplingParams, llm
from pagedjax.engine import compilations, kept_programs

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "token_buckets": (8,), "num_blocks": 32}


def options() -> dict:
    return {name: getattr(jax.config, name) for name in OPTIONS}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A home folder, and JAX as a user starts it: without a cache. Returns the folder of programs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    # no program of an engine of another test, which JAX would not be asked for
    monkeypatch.setattr(
        kept_programs, "program", lambda facts, arguments, device, compile_: compile_()
    )
    before = options()
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    compilation_cache.reset_cache()
    yield tmp_path / ".cache" / "pagedjax" / "xla"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def programs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-cache"))


def compile_one(size: int) -> None:
    """Compile a program that no other size shares."""
    jax.jit(lambda x: jnp.sin(x) * size).lower(jax.ShapeDtypeStruct((size,), jnp.float32)).compile()


@pytest.mark.slow
def test_jax_options_are_set_while_an_llm_compiles_and_restored_after(tiny, folder, monkeypatch):
    before = options()
    during = []
    make_engine = llm.make_engine

    def make_noted_engine(*args, **config):
        during.append(options())
        return make_engine(*args, **config)

    monkeypatch.setattr(llm, "make_engine", make_noted_engine)
    LLM(tiny, progress=False, compilation="eager", **SIZES)
    assert options() == before
    assert during == [dict(zip(OPTIONS, (str(folder), compilations.MAX_BYTES, 0.0), strict=True))]
    files = programs(folder)
    assert files
    compile_one(1001)
    assert programs(folder) == files  # the user's own program is not kept


def test_lazy_programs_are_kept_too(tiny, folder):
    lazy = LLM(tiny, progress=False, compilation="lazy", **SIZES)
    before = options()
    files = len(programs(folder))
    lazy.generate([5, 6, 7], SamplingParams(max_tokens=2))
    assert len(programs(folder)) > files
    assert options() == before


@pytest.mark.default_cases("lazy")
@pytest.mark.parametrize("compilation", ["eager", "lazy"])
def test_the_cache_can_be_switched_off(tiny, folder, compilation):
    config = {"compilation_cache": False, "compilation": compilation, **SIZES}
    LLM(tiny, progress=False, **config).generate([5, 6, 7], SamplingParams(max_tokens=2))
    assert not folder.exists()


def test_the_cache_of_jax_itself_is_left_alone(folder, tmp_path):
    cache = tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    before = options()
    with compilations.disk_cache():
        assert options() == before
        compile_one(1002)
    assert programs(cache)
    assert not folder.exists()


@pytest.mark.parametrize("bounded", [True, False])
def test_the_oldest_program_is_dropped_at_the_bound(folder, monkeypatch, bounded):
    """Earlier versions kept programs without a bound, and without the times of their last use."""
    with compilations.disk_cache():
        compile_one(1003 + bounded)
    (first,) = programs(folder)
    if not bounded:
        for file in folder.glob("*-atime"):
            file.unlink()
    monkeypatch.setattr(compilations, "MAX_BYTES", int(2.5 * first.stat().st_size))
    for size in (1005, 1006, 1007):
        with compilations.disk_cache():
            compile_one(size + 3 * bounded)
    assert len(programs(folder)) == 2
    assert not first.exists()


def test_blocks_that_overlap_restore_the_options_after_the_last_of_them(folder):
    before = options()
    first = compilations.disk_cache()
    second = compilations.disk_cache()
    first.__enter__()
    within = options()
    with compilations.disk_cache(False):
        assert options() == within
    second.__enter__()
    first.__exit__(None, None, None)
    assert options() == within != before
    assert compilations.disk_cache_active()
    second.__exit__(None, None, None)
    assert options() == before
    assert not compilations.disk_cache_active()


def test_options_are_restored_after_an_error(folder):
    before = options()
    with pytest.raises(ZeroDivisionError), compilations.disk_cache():
        raise ZeroDivisionError
    assert options() == before

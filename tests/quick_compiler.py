"""How engines of tests are compiled, which takes most of their time.

- Most tests are about an engine and not about XLA's optimisations, so the engines of the default
  run are compiled with few of them. A module or test that compares bits has the mark `optimised`;
  its engines are compiled as for users. So are those of tests with SmolLM2.
- A newer JAX (that of Python 3.12) chooses emitters for a whole process. Tests that are `optimised`
  have those of users there if XLA_FLAGS is set to nothing: `XLA_FLAGS= python -m pytest -m
  "optimised and not slow"`.
- The mark `few_optimisations` is for modules that compile much themselves and do not compare bits
  of what XLA compiles. All that JAX compiles there has the options of tests' engines.
- An `LLM` of a test compiles a program when a step first needs it, unless the test gives
  `compilation`.
- An engine gets the program of an earlier one of the process, if all that the program depends on is
  equal (`engine/kept_programs.py`), or of an earlier run (.cache/). So a new test takes sizes that
  others have, such as those of `tiny_llm`. A test that replaces a function of `pagedjax.device` or
  of a kernel gets programs of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

# Two to five times as fast as the default. The emitters of fusions are those of earlier versions of
# XLA.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# It has the choice of emitters in XLA_FLAGS alone. JAX 0.12 has no earlier emitters, and ignores it:
# engines of tests take twice as long to compile.
NEWER_JAX = (0, 11)
NEWER_QUICK = {"xla_backend_optimization_level": 0}
EARLIER_EMITTERS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"

MAX_PROGRAMS = 100  # programs for later engines of the process, at most

_quick = False
_all_programs = False
_of_users: dict[str, Callable[..., Any]] = {}  # what tests replace, by its name
_latest: deque[Any] = deque(maxlen=MAX_PROGRAMS)


def choose_emitters() -> None:
    """Choose emitters for this process and those that it starts, unless XLA_FLAGS is set. Call it
    before JAX is imported.
    """
    if _version(metadata.version("jax")) >= NEWER_JAX:
        os.environ.setdefault("XLA_FLAGS", EARLIER_EMITTERS)


def _version(text: str) -> tuple[int, ...]:
    """The major and the minor number."""
    return tuple(int(number) for number in text.split(".")[:2])


def choose(quick: bool, all_programs: bool = False) -> None:
    """Engines that are made from now on are compiled with QUICK, or as users' engines are.

    Args:
        all_programs: all else is compiled with few optimisations, too.
    """
    global _quick
    _quick = quick
    _set_optimisations(few_optimisations=quick and all_programs)
    _replace("pagedjax.engine.programs", "compiler_options", _options)
    _replace("pagedjax.engine.kept_programs", "program", _program)
    _replace("pagedjax.llm", "default_compilation", lambda engine: "lazy")


def of_a_child() -> str:
    """Python code with which a process that a test starts compiles as this process does now."""
    return (
        "import pagedjax.engine.kept_programs, pagedjax.engine.programs, pagedjax.llm\n"
        f"from tests import quick_compiler\nquick_compiler.choose({_quick}, {_all_programs})\n"
    )


def of_users(name: str) -> Callable[..., Any]:
    """The function that users have in place of one of tests: `compiler_options`, `program`,
    `default_compilation`.
    """
    return _of_users[name]


def _replace(module: str, name: str, function: Callable[..., Any]) -> None:
    if module in sys.modules and name not in _of_users:
        _of_users[name] = getattr(sys.modules[module], name)
        setattr(sys.modules[module], name, function)


def _options(platform: str) -> dict[str, Any]:
    if not _quick or platform != "cpu":
        return of_users("compiler_options")(platform)
    return quick_options()


def quick_options() -> dict[str, Any]:
    """Options of this version of JAX."""
    return QUICK if sys.modules["jax"].__version_info__ < NEWER_JAX else NEWER_QUICK


def _program(*arguments: Any) -> Any:
    program = of_users("program")(*arguments)
    _latest.append(program)
    return program


@contextlib.contextmanager
def all_quickly() -> Iterator[None]:
    """Within it, all that is compiled is compiled with few optimisations, also what is no
    engine's.
    """
    _set_optimisations(few_optimisations=True)
    try:
        yield
    finally:
        _set_optimisations(few_optimisations=False)


def _set_optimisations(few_optimisations: bool) -> None:
    global _all_programs
    _all_programs = few_optimisations
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(
        few_optimisations
    ).lower()  # of processes that tests start
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_disable_most_optimizations", few_optimisations)
        _replace("jax._src.compiler", "get_compile_options", _options_of_any_program)


def _options_of_any_program(*arguments: Any, **options: Any) -> Any:
    """With the emitters of tests, which save three quarters of the time: JAX has no setting of
    them.
    """
    backend = options.get("backend")
    if _all_programs and backend is not None and backend.platform == "cpu":
        overrides = options.get("env_options_overrides") or {}
        options["env_options_overrides"] = quick_options() | overrides
    return of_users("get_compile_options")(*arguments, **options)

"""How engines of tests are compiled, which takes most of their time.

- Most tests are about an engine and not about XLA's optimisations, so the engines of the default run are compiled with
  few of them. A module or test that compares bits has the mark `optimised`; its engines are compiled as for users. So
  are those of slow tests, of tests with SmolLM2, and of all tests with a newer JAX (that of Python 3.12).
- A module with several engines of equal sizes uses the fixture `shared_programs`.
- Programs are kept in .cache/ by what is in them. A new test takes sizes that others have, such as those of `tiny_llm`.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

# Twice or three times as fast as the default. The emitters of fusions are those of earlier versions of XLA.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
NEWER_JAX = (0, 11)  # has no choice of emitters

_quick = False


def choose(quick: bool) -> None:
    """Engines that are made from now on are compiled with QUICK, or as users' engines are."""
    global _quick
    _quick = quick
    programs = sys.modules.get("pagedjax.engine.programs")
    if programs is None or getattr(programs.compiler_options, "of_tests", False):
        return
    of_users = programs.compiler_options

    def of_tests(platform: str) -> dict[str, Any]:
        quickly = _quick and platform == "cpu" and sys.modules["jax"].__version_info__ < NEWER_JAX
        return QUICK if quickly else of_users(platform)

    of_tests.of_tests = True  # type: ignore[attr-defined]
    programs.compiler_options = of_tests  # type: ignore[attr-defined]
    remember()
    if llm := sys.modules.get("pagedjax.llm"):
        llm._compilation = compile_when_needed  # type: ignore[attr-defined]


def compile_when_needed(engine: Any) -> str:
    """The default of `LLM` in tests: no thread compiles beside a test, and no program that it does not run."""
    return "lazy"


def remember(most: int = 150) -> None:
    """Keep programs for later engines of this process that need the same ones; see `engine/kept_programs.py`."""
    from pagedjax.engine import kept_programs

    find = kept_programs.program
    latest: deque[Any] = deque(maxlen=most)

    def found(*arguments: Any) -> Any:
        latest.append(find(*arguments))
        return latest[-1]

    if not getattr(find, "of_tests", False):
        found.of_tests = True  # type: ignore[attr-defined]
        kept_programs.program = found  # type: ignore[assignment]

"""How engines of tests are compiled, which takes most of their time.

- Most tests are about an engine and not about XLA's optimisations, so the engines of the default run are compiled with
  few of them. A module or test that compares bits has the mark `optimised`; its engines are compiled as for users. So
  are those of slow tests, of tests with SmolLM2, and of all tests with a newer JAX (that of Python 3.12).
- A module with several engines of equal sizes uses the fixture `shared_programs`.
- Programs are kept in .cache/ by what is in them. A new test takes sizes that others have, such as those of `tiny_llm`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from threading import Lock
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


def remembered(compiler: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """`runtime._compiler`, whose programs are made once for all that they depend on: not for sampling options of a test
    by the same name, and not for functions that a test replaces."""
    made: dict[Any, Any] = {}
    locks: defaultdict[Any, Lock] = defaultdict(Lock)  # engines are also made in threads

    def of(model: Any, draft_model: Any, c: Any, sizes: Any, options: Any, inputs: Any, leaves: Any, *more: Any) -> Any:
        build = compiler(model, draft_model, c, sizes, options, inputs, leaves, *more)
        kinds = [(x.shape, str(x.dtype), str(x.sharding)) for x in leaves]
        draft = draft_model and (draft_model.graphdef, draft_model.layers)
        names = [feature.name for feature in options.features]
        fixed = str((model.graphdef, model.config, draft, kinds, names, more, _quick))

        def one(shape: Any, config: Any) -> Any:
            key = fixed, shape, str(config)
            with locks[key]:
                if key not in made:
                    made[key] = build(shape, config)
            return made[key]

        return one

    return of

"""A command of pagedjax with the programs of tests: python -m tests.quickly serve ...

They are compiled quickly, when a step first needs them, or read from the folder of an engine with
the same sizes.
"""

from __future__ import annotations

import os
import sys

import pagedjax.engine.kept_programs
import pagedjax.engine.programs
import pagedjax.llm  # noqa: F401  (modules whose functions `quick_compiler` replaces)
from pagedjax.commands.cli import main
from tests import quick_compiler

OPTIMISED = "PAGEDJAX_TESTS_OPTIMISED"


def compile_quickly() -> None:
    """Compile the engines of this process quickly, from now on: each program when a step needs it,
    and with few optimisations, except with OPTIMISED in the environment.
    """
    quick = OPTIMISED not in os.environ
    if quick:
        quick_compiler.choose_emitters()
    quick_compiler.choose(quick)


if __name__ == "__main__":
    compile_quickly()
    sys.exit(main())

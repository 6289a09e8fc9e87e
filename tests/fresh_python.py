"""Python code in a process of its own, which has imported nothing yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def output_of(code: str, *arguments: object, timeout: float = 500, **environment: str) -> str:
    """Run code in the repository's root; it must end without an error. Returns what it printed.

    Args:
        environment: variables beside those of this process, as text.
    """
    child = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout

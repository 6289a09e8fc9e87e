"""A training process that kills itself, as the kernel kills one that has no memory left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests import quick_compiler

ROOT = Path(__file__).parents[3]


def killed(code: str, *arguments: object) -> str:
    """Run Python code that must end by SIGKILL, compiled as in this process. Returns what it
    printed.
    """
    child = [sys.executable, "-c", quick_compiler.of_a_child() + code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        child, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    return process.stdout

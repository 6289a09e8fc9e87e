"""Loading holds the model and about two of its largest parameters, in whatever format it is stored.

The process that loads is one of its own: `python -m tests.weights.test_load_memory FOLDER` prints what it measures.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from pagedjax.weights import open_checkpoint
from pagedjax.weights.convert import convert
from pagedjax.weights.pretrained import read_model
from tests.weights.tiny import tiny_gguf, tiny_llama

ROOT = Path(__file__).parents[2]
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FORMATS = ("safetensors", "gguf", "orbax")
# 217 MiB in float32; the fused gate and up, the embedding and the head are the largest with 32 MiB each
LARGE = {"layers": 3, "heads": 8, "kv_heads": 4, "head_dim": 64, "hidden": 512, "intermediate": 8192, "vocab": 16384}
# How many of the largest parameters, in float32 as they are read, may be on their way: two, one for each reader. The
# gguf package dequantises into pieces and joins them, so a reader may hold a quantised tensor almost twice. The rest
# is for small tensors and the interpreter. Seen on busy cores: 1.0 to 1.9, GGUF 1.3 to 1.8.
MOST = {"safetensors": 2.4, "gguf": 3.0, "orbax": 2.4}
MODEL = 6.8  # the whole of it, in the same unit


def measurable() -> bool:
    fields = STATUS.read_text() if STATUS.is_file() else ""
    return all(field in fields for field in ("VmHWM", "RssAnon", "RssFile")) and os.access(RESET, os.W_OK)


@pytest.mark.skipif(not measurable(), reason="no /proc that tells a process's peak of memory and lets it be reset")
def test_a_model_is_loaded_with_about_two_of_its_largest_parameters_beside_it(tmp_path):
    for name, sizes in {"small": {}, "large": LARGE}.items():
        source = tiny_llama(tmp_path / name / "safetensors", tied=False, **sizes)
        tiny_gguf(tmp_path / name / "gguf.gguf", source, matrices="Q8_0")
        convert(source, tmp_path / name / "orbax", "orbax")
    # glibc keeps freed pieces of up to 32 MiB for later, how many depends on how threads take turns. Above this size
    # each is mapped and goes back when freed, so that the peak is what was held.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.weights.test_load_memory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("everything first") > MODEL  # what a loader that does not go tensor by tensor would show
    wrong = {name: beside for name, beside in found.items() if not -0.2 < beside < MOST[name.split()[0]]}
    assert not wrong, found
    assert len(found) == 2 * len(FORMATS)


def measure(folder: Path) -> dict[str, float]:
    """How many of the largest parameters loading holds beside the model at its peak, by format and dtype."""
    found = {}
    for kind in FORMATS:
        small, large = (folder / size / (f"{kind}.gguf" if kind == "gguf" else kind) for size in ("small", "large"))
        for dtype in ("float32", "bfloat16"):
            load(small, dtype)  # what is imported or set up at first use is no part of it
            found[f"{kind} {dtype}"] = beside(lambda large=large, dtype=dtype: load(large, dtype))
    found["everything first"] = beside(lambda: everything_first(folder / "large" / "safetensors"))
    return found


def load(path: Path, dtype: str) -> Any:
    return jax.block_until_ready(read_model(open_checkpoint(path), dtype).params)


def everything_first(path: Path) -> Any:
    held = [tensor.read() for tensor in open_checkpoint(path).tensors.values()]
    params = load(path, "float32")
    del held
    return params


def beside(load: Callable[[], Any]) -> float:
    """Anonymous memory at the peak, without what was there before and what the parameters take.

    Pages of mapped files are left out (RssFile): the kernel takes them back when it needs them. Nothing maps weights
    here, so they are the libraries', the same before and after.
    """
    gc.collect()
    RESET.write_text("5")  # VmHWM, the peak of RSS, begins again at what it is now
    before = status()
    params = load()
    after = status()
    sizes = [(leaf.nbytes, leaf.size) for leaf in jax.tree.leaves(params)]
    peak = after["VmHWM"] - after["RssFile"] - before["RssAnon"]
    return (peak - sum(size for size, _ in sizes)) / (4 * max(count for _, count in sizes))


def status() -> dict[str, int]:
    """The sizes that the kernel tells of this process, in bytes."""
    rows = (line.split() for line in STATUS.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))

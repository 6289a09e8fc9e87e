"""Loading needs memory for the model and about two of its largest parameters, in every format.

A separate process loads the model: `python -m tests.weights.test_load_memory FOLDER DTYPES` prints
its measurements.
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
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
FORMATS = {
    "safetensors": ("float32", "bfloat16"),
    "gguf": ("bfloat16", "float32"),
    "orbax": ("float32", "bfloat16"),
}
# Matrices in their own bits: by the file, the dtype of all else, and the largest extra memory, in units
# of the largest parameter in float32. "int4" has no large parameter that is floats, so it needs less
# than one matrix of floats would take: the words of a file, the rows and their packed copy, twice.
# Measured on busy cores: gguf 0.9 to 1.1, int4 0.5 to 0.6, and 1.1 to 1.4 if int4 is widened.
STORED = {"gguf": ("float32", 2.0), "int4": ("bfloat16", 0.9)}
# Of so many loads the least counts: beside other jobs, one of int4 has needed 1.7. Floats of a matrix
# would be in each.
STORED_LOADS = 3
# 166 MiB in float32; the fused gate and up, the embedding and the head are the largest with 32 MiB
# each
LARGE = {
    "layers": 2,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "hidden": 512,
    "intermediate": 8192,
    "vocab": 16384,
}
# Largest extra memory, in units of the largest parameter in float32: two, one for each reader,
# which packs it into the model's memory. The rest is for small tensors and the interpreter.
# Measured on busy cores: 1.0 to 2.9.
MAX_OVERHEAD = 3.2
LARGEST = 4 * 512 * 2 * 8192  # bytes of the largest parameter in float32: gate and up
MODEL = 5.2  # the whole model, in the same unit


def measurable() -> bool:
    fields = STATUS.read_text() if STATUS.is_file() else ""
    return all(field in fields for field in ("VmHWM", "RssAnon", "RssFile")) and os.access(
        RESET, os.W_OK
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes",  # of each format
    [pytest.param(1, marks=pytest.mark.exhaustive), 2],
)
@pytest.mark.skipif(not measurable(), reason="no /proc with a peak of memory that can be reset")
def test_loading_needs_about_two_of_the_largest_parameters_besides_the_model(tmp_path, dtypes):
    for name, sizes in {"small": {}, "large": LARGE}.items():
        source = tiny_llama(tmp_path / name / "safetensors", tied=False, **sizes)
        tiny_gguf(tmp_path / name / "gguf.gguf", source, matrices="Q8_0")
        convert(source, tmp_path / name / "orbax", "orbax")
        few_tokens = tiny_llama(tmp_path / name / "few", tied=False, **sizes | {"vocab": 320})
        options: dict[str, Any] = {"dtype": "bfloat16", "weights": "int4-g32"}
        convert(few_tokens, tmp_path / name / "int4", "safetensors", **options)
    # glibc keeps freed blocks of up to 32 MiB; how many depends on thread timing. With this
    # threshold, larger blocks are mapped and returned to the system when freed, so the peak is the
    # memory in use.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.weights.test_load_memory", str(tmp_path), str(dtypes)]
    child = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, cwd=ROOT, check=False
    )
    assert child.returncode == 0, child.stderr
    overheads = json.loads(child.stdout)
    assert overheads.pop("everything first") > MODEL  # a loader that reads all tensors first
    for kind, (_, limit) in STORED.items():
        assert -0.2 < overheads.pop(f"{kind} stored") < limit, overheads
    wrong = {
        name: overhead for name, overhead in overheads.items() if not -0.2 < overhead < MAX_OVERHEAD
    }
    assert not wrong, overheads
    assert len(overheads) == dtypes * len(FORMATS)


def measure(folder: Path, dtypes: int) -> dict[str, float]:
    """Peak memory of loading besides the model, in largest parameters, by format and dtype."""
    overheads = {}
    for kind in FORMATS:
        small, large = (folder / size / file_of(kind) for size in ("small", "large"))
        for dtype in FORMATS[kind][:dtypes]:
            load(small, dtype)  # so that imports and set-up at first use are not measured
            overheads[f"{kind} {dtype}"] = beside(
                lambda large=large, dtype=dtype: load(large, dtype)
            )
    for kind, (dtype, _) in STORED.items():
        small, large = (folder / size / file_of(kind) for size in ("small", "large"))
        load(small, dtype, "stored")
        peaks = [
            beside(lambda large=large, dtype=dtype: load(large, dtype, "stored"))
            for _ in range(STORED_LOADS)
        ]
        overheads[f"{kind} stored"] = min(peaks)
    overheads["everything first"] = beside(
        lambda: everything_first(folder / "large" / "safetensors")
    )
    return overheads


def file_of(kind: str) -> str:
    return f"{kind}.gguf" if kind == "gguf" else kind


def load(path: Path, dtype: str, weight_dtype: str | None = None) -> Any:
    model = read_model(open_checkpoint(path), dtype, weight_dtype=weight_dtype)
    return jax.block_until_ready(model.params)


def everything_first(path: Path) -> Any:
    tensors = [tensor.read() for tensor in open_checkpoint(path).tensors.values()]
    params = load(path, "float32")
    del tensors
    return params


def beside(load: Callable[[], Any]) -> float:
    """Peak of anonymous memory, minus the memory in use before and that of the parameters.

    Pages of mapped files (RssFile) do not count: the kernel frees them when memory is needed. No
    weights are mapped here, so they are pages of libraries and do not change.
    """
    gc.collect()
    RESET.write_text("5")  # resets VmHWM, the peak of RSS, to the current RSS
    before = status()
    params = load()
    after = status()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    peak = after["VmHWM"] - after["RssFile"] - before["RssAnon"]
    return (peak - size) / LARGEST


def status() -> dict[str, int]:
    """The memory sizes of this process, in bytes."""
    rows = (line.split() for line in STATUS.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))

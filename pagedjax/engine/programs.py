"""The compiled steps of an engine, by their shapes: all are compiled before the first request, or
each when a step first needs it.

Tracing holds Python's lock and compiling does not, so several threads compile programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm

from pagedjax.device.batch import DraftShape, StepShape
from pagedjax.device.side_outputs import SideOutputs
from pagedjax.engine import compilations
from pagedjax.options.config import Resolved

Shape = StepShape | DraftShape
# (shape, config) -> its program, for config.num_blocks blocks
Build = Callable[[Shape, Resolved], Any]

# What XLA puts into a CUDA graph: XLA's defaults, and loops. Then a whole step is one graph, which
# the host launches once. Outside a graph the host waits for the condition of each branch and loop;
# sampling has some. A kernel that reads a slice of an array (`joined` of `device/batch.py`) would
# be in no graph if XLA fused it with that slice.
GPU_OPTIONS: dict[str, str | bool] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
THREADS = 4  # at most: each compilation uses several processors for a part of its time


def compiler_options(platform: str) -> dict[str, str | bool]:
    """Returns XLA's options for the programs of an engine on a platform of JAX."""
    return GPU_OPTIONS if platform == "gpu" else {}


def compile_all(
    build: Build,
    shapes: Sequence[Shape],
    config: Resolved,
    settle: Callable[[Any], Resolved],
    *,
    progress: bool = False,
) -> tuple[dict[Shape, Any], Resolved]:
    """Compile every program, the largest first and the others side by side.

    Args:
        shapes: the shapes of all programs, the largest step last.
        settle: (program of the largest step) -> the configuration that fits beside it. If it has
            another number of blocks, this program is compiled again.

    Returns:
        (programs by their shape, their configuration)
    """
    *smaller, largest = shapes
    with tqdm(
        desc="compiling", total=1 + len(smaller), unit="program", leave=False, disable=not progress
    ) as bar:
        programs = {largest: build(largest, config)}
        fitted = settle(programs[largest])
        if fitted.num_blocks != config.num_blocks:
            programs = {largest: build(largest, fitted)}
        bar.update()
        pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
        try:
            futures = {shape: pool.submit(build, shape, fitted) for shape in reversed(smaller)}
            for future in as_completed(futures.values()):
                future.result()
                bar.update()
        finally:
            # after an error, the compilations that have not begun are cancelled
            pool.shutdown(cancel_futures=True)
    programs = {shape: futures[shape].result() for shape in smaller} | programs
    return programs, fitted


class LazyPrograms(dict[Shape, Any]):
    """Programs by their shape; a missing program is compiled. `build` is that of `compile_all`."""

    def __init__(self, build: Build, config: Resolved) -> None:
        super().__init__()
        self._build = build
        self._config = config
        self._uses_disk_cache = compilations.disk_cache_active()

    def __missing__(self, shape: Shape) -> Any:
        with compilations.disk_cache(self._uses_disk_cache):
            self[shape] = self._build(shape, self._config)
        return self[shape]


class SidePrograms(dict[SideOutputs, LazyPrograms]):
    """Programs of steps with side outputs, by these outputs. Each program is compiled when a step
    first needs it.
    """

    def __init__(self, build: Callable[[SideOutputs], Build], config: Resolved) -> None:
        super().__init__()
        self._build = build
        self._config = config

    def __missing__(self, side_outputs: SideOutputs) -> LazyPrograms:
        self[side_outputs] = LazyPrograms(self._build(side_outputs), self._config)
        return self[side_outputs]


def summary(startup: dict[str, Any]) -> str:
    """Returns one line for people: seconds by stage, and the number of programs."""
    stages = {"import": "import", "load": "load", "compile": "compile", "warmup": "warm-up"}
    seconds = ", ".join(
        f"{name} {startup[stage]:.1f} s" for stage, name in stages.items() if stage in startup
    )
    count = f"{startup['compilations']} programs, {startup['cached']} of them"
    return f"start-up: {seconds}; {count} from the cache on disk"

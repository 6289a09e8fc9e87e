"""Compiles every kernel for a chip that need not be present, and prints the compiler's report.

    python -m pallas_kernels.aot --target h200
    python -m pallas_kernels.aot --target h100 --json --only decode
    python -m pallas_kernels.aot --target v5e           # or v4, v5p, v6e, tpu7x: see aot_tpu.py

For a GPU it needs JAX 0.11 with its CUDA plugin (pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt, of the same
version as JAX) and ptxas, on the PATH or from the package nvidia-cuda-nvcc. Nothing runs: XLA and Mosaic GPU compile
for the named chip down to machine code. The exit status is 1 if a kernel does not compile, spills registers to memory,
or has products (WGMMA) that ptxas lets wait for each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels import aot_linear, aot_tpu
from pallas_kernels.aot_linear import FloatProduct, Product
from pallas_kernels.tiles import TPUS, Tiles

# XLA's description of a GPU (GpuTargetConfigProto). Both are GH100 dies with 132 multiprocessors;
# the memory differs.
HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 l2_cache_size: 52428800
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
  driver_version: "13.0.0" registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA" device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }} runtime_version {{ major: 13 minor: 0 patch: 0 }}
"""


class Target(NamedTuple):
    """A GPU that is compiled for."""

    name: str
    bandwidth: int  # bytes a second
    memory: int  # bytes


TARGETS = {
    "h100": Target("NVIDIA H100 80GB HBM3", 3_350_000_000_000, 85_520_809_984),
    "h200": Target("NVIDIA H200", 4_800_000_000_000, 151_397_597_184),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled program: a kernel at one shape."""

    kernel: str
    head_size: int  # or the numbers of a row of latents
    block_size: int
    group: int  # query heads of a key head, or over latents
    dtype: str = "bfloat16"
    parts: bool = False  # one long row, split over the device
    queries: int = 1  # of a decoded row
    options: tuple[tuple[str, float], ...] = ()
    sinks: bool = False
    in_place: bool = False  # queries are read where they are

    def __str__(self) -> str:
        words = [
            self.kernel,
            f"D {self.head_size}",
            f"S {self.block_size}",
            f"G {self.group}",
            self.dtype,
        ]
        if self.queries > 1:
            words.append(f"Q {self.queries}")
        if self.parts:
            words.append("split")
        words += [name for name, _ in self.options]
        if self.sinks:
            words.append("sinks")
        if self.in_place:
            words.append("in place")
        return ", ".join(words)

    def function_and_shapes(self, tiles: Tiles) -> tuple[Callable[..., Any], list[Any]]:
        """Returns the kernel as a function, and the shapes of its arguments."""
        import jax
        import jax.numpy as jnp

        from pallas_kernels.paged_attention.pallas_gpu import chunks, decode, latents, overlapped
        from pallas_kernels.paged_attention.pallas_gpu.implementation import LATENT

        rows = 1 if self.parts else 64
        heads = 1 if self.kernel == "latents" else 8
        pages = 1024
        blocks = 32768 // self.block_size
        is_prompt = self.kernel in ("chunks", "overlapped")
        t = 2048 if is_prompt else rows
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        is_short = self.queries > 1
        tokens = (t, self.queries) if is_short else (t,)
        q = jax.ShapeDtypeStruct((*tokens, heads * self.group, self.head_size), self.dtype)
        cache = jax.ShapeDtypeStruct((pages, heads, self.block_size, self.head_size), self.dtype)
        options: dict[str, Any] = {"window": None, "soft_cap": None, **dict(self.options)}
        if self.kernel == "latents":
            call = partial(latents.attend, rank=LATENT[0], scale=0.07, tiles=tiles, **options)
            return call, [q, cache, ints(rows, blocks), ints(rows), ints(rows)]
        row_arrays = [ints(rows)] * (3 if is_prompt or is_short else 1)
        if self.kernel == "overlapped":
            call = overlapped.chunks  # its tiles are its own
        elif is_prompt:
            call = partial(chunks.chunks, tiles=tiles)
        else:
            call = partial(decode.decode_short if is_short else decode.decode, tiles=tiles)
        if self.in_place:
            options["in_place"] = True
        bound = partial(call, scale=self.head_size**-0.5, **options)
        arrays = [q, cache, cache, ints(rows, blocks), *row_arrays]
        if not self.sinks:
            return bound, arrays

        def with_sinks(sinks, *arrays):
            return bound(*arrays, sinks=sinks)

        sinks = jax.ShapeDtypeStruct((heads * self.group,), jnp.float32)
        return with_sinks, [sinks, *arrays]

    def memory(self, tiles: Tiles) -> tuple[int, int]:
        """Returns the bytes of shared memory that the kernel asks for, and the tiles in flight."""
        from pallas_kernels.paged_attention.pallas_gpu import chunks, decode, latents, overlapped
        from pallas_kernels.paged_attention.pallas_gpu.implementation import LATENT

        d = self.head_size
        if self.kernel == "latents":
            return latents.shared_bytes(d, LATENT[0], self.group, itemsize=2), latents.STAGES
        if self.kernel == "overlapped":
            return overlapped.shared_bytes(d, itemsize=2), overlapped.stages_of(d)
        if self.kernel == "chunks":
            return chunks.shared_bytes(d, itemsize=2, tiles=tiles), tiles.chunk_stages
        shared = decode.shared_bytes(d, self.group, itemsize=2, tiles=tiles, queries=self.queries)
        return shared, tiles.decode_stages


@dataclasses.dataclass(frozen=True)
class RotatedWrite:
    """One compiled program: queries and keys are rotated, and keys and values written."""

    head_size: int
    heads: int  # of queries; 0: keys and values alone
    kv_heads: int
    dtype: str = "bfloat16"
    kernel: str = "rotated_write"

    def __str__(self) -> str:
        sizes = f"D {self.head_size}, N {self.heads}, K {self.kv_heads}"
        return f"{self.kernel}, {sizes}, {self.dtype}"

    def function_and_shapes(self, tiles: Tiles) -> tuple[Callable[..., Any], list[Any]]:
        """Returns the kernel as a function, and the shapes of its arguments."""
        import jax

        from pallas_kernels.kv_write.pallas_gpu import rotate_and_write

        t = 64
        pages = jax.ShapeDtypeStruct((1024, self.kv_heads, 16, self.head_size), self.dtype)
        heads = jax.ShapeDtypeStruct(
            (t, self.heads + 2 * self.kv_heads, self.head_size), self.dtype
        )
        angles = jax.ShapeDtypeStruct((2, t, self.head_size // 2), "float32")
        slots = jax.ShapeDtypeStruct((t,), "int32")
        call = partial(rotate_and_write, queries=self.heads)
        return call, [pages, pages, heads, angles, slots]

    def memory(self, tiles: Tiles) -> tuple[int, int]:
        """Returns the bytes of shared memory that the kernel asks for, and the tiles in flight."""
        return 0, 0


AnyCase = Case | RotatedWrite | Product | FloatProduct


class Compiled(NamedTuple):
    """The compiler's report of a program."""

    registers: int  # of a thread
    spilled: int  # bytes of registers that are stored to memory and loaded again
    serialised: bool  # a product waits for the one before, where the kernel lets them overlap
    shared: int  # bytes of shared memory that the kernel asks for
    stages: int  # tiles in flight
    seconds: float  # of compiling


# 64 query heads with a sink each, and a window in every other layer
GPT_OSS = tuple(
    Case(kernel, 64, 16, 8, options=(("window", 128),), sinks=True)
    for kernel in ("decode", "chunks", "overlapped")
)


def cases() -> Iterator[AnyCase]:
    """Yields every supported shape, of attention and of products, and some of rotated writes.

    Each option that changes the program comes alone and in the combinations that matter.
    """
    from pallas_kernels.paged_attention.pallas_gpu.implementation import (
        BLOCK_SIZES,
        DTYPES,
        HEAD_SIZES,
        LATENT,
        MAX_COLUMNS,
    )
    from pallas_kernels.paged_attention.rows import SHORT

    for kernel in ("decode", "chunks", "overlapped"):
        for d in HEAD_SIZES:
            for s in BLOCK_SIZES:
                yield Case(kernel, d, s, 4)
            for group in (1, 3, 8, 16):
                yield Case(kernel, d, 16, group)
            yield Case(kernel, d, 16, 4, DTYPES[1])
            yield Case(kernel, d, 16, 4, options=(("window", 4096),))
            yield Case(kernel, d, 16, 4, options=(("soft_cap", 50.0),))
            yield Case(kernel, d, 16, 4, sinks=True)
            if kernel == "decode":
                yield Case(kernel, d, 16, 4, parts=True)
                yield Case(kernel, d, 16, 4, parts=True, sinks=True)
                for group in (1, 4, 8):
                    yield Case(kernel, d, 16, group, sinks=group == 4, in_place=True)
    for d in HEAD_SIZES:
        for queries in SHORT:
            short = partial(Case, "decode", d, queries=queries)
            for s in BLOCK_SIZES:
                yield short(s, 4)
            for group in (1, 3, 8, 16):
                if group * queries <= MAX_COLUMNS:
                    yield short(16, group)
            yield short(16, 4, DTYPES[1])
            for group in (4, MAX_COLUMNS // queries):
                yield short(16, group, options=(("window", 4096),))
            yield short(16, 4, options=(("soft_cap", 50.0),))
            yield short(16, 4, parts=True)
            yield short(16, MAX_COLUMNS // queries, sinks=True)
    latents = partial(Case, "latents", LATENT[1])
    for s in BLOCK_SIZES:
        yield latents(s, 16)
    for heads in (1, 20, 128):
        yield latents(16, heads)
    yield latents(16, 16, DTYPES[1])
    yield latents(16, 16, options=(("window", 4096),))
    yield latents(16, 16, options=(("soft_cap", 50.0),))
    yield latents(16, 16, parts=True)
    for d in (64, 128, 256):
        for heads, kv_heads in ((32, 8), (0, 8), (9, 3), (2, 2), (5, 1)):
            yield RotatedWrite(d, heads, kv_heads)
    yield RotatedWrite(128, 128, 16)  # as many numbers as a thread may have
    for dtype in ("float16", "float32"):
        yield RotatedWrite(64, 32, 4, dtype)
    yield from GPT_OSS
    yield from aot_linear.gpu_products()
    yield from aot_linear.float_products()


def compile_case(case: AnyCase, target: Target, tiles: Tiles) -> Compiled:
    """Compiles one case. Raises the compiler's errors."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    text = HOPPER.format(**target._asdict())
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    function, shapes = case.function_and_shapes(tiles)
    placed = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding) for shape in shapes]
    device = AbstractDevice(target.name, tiles.multiprocessors, "gpu")
    started = time.perf_counter()
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)),
        everything_printed() as printed,
    ):
        jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",)).compile()
    seconds = time.perf_counter() - started
    return Compiled(*read_ptxas(printed()), *case.memory(tiles), seconds)


def read_ptxas(text: str) -> tuple[int, int, bool]:
    """Returns (registers a thread, bytes spilled, whether products are serialised) of the Mosaic
    kernel in ptxas's report.

    Raises:
        ValueError: the report has no such kernel.
    """
    numbers = re.search(
        r"Compiling entry function '\w*mosaic_gpu_kernel'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        text,
        re.DOTALL,
    )
    if not numbers:
        raise ValueError(
            "ptxas reported no kernel; is this JAX's Mosaic GPU? what was printed: " + text[-500:]
        )
    stores, loads, registers = map(int, numbers.groups())
    # C7510 to C7519 say so, each with another reason
    serialised = "wgmma.mma_async instructions are serialized" in text
    return registers, stores + loads, serialised


@contextmanager
def everything_printed() -> Iterator[Callable[[], str]]:
    """Captures stdout and stderr of this process, also ptxas's report, which does not go through
    Python's files.

    Yields a function that returns the text, once the `with` block has ended.
    """
    with tempfile.TemporaryFile("w+b") as file:
        originals = [os.dup(fd) for fd in (1, 2)]
        text = b""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd in (1, 2):
                os.dup2(file.fileno(), fd)
            yield lambda: text.decode(errors="replace")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, original in zip((1, 2), originals, strict=True):
                os.dup2(original, fd)
                os.close(original)
            file.seek(0)
            text = file.read()


def find_ptxas() -> bool:
    """Returns whether there is a ptxas. If it is in a package, its folder is added to the PATH."""
    if shutil.which("ptxas"):
        return True
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    for root in roots or ():
        for program in sorted(Path(root).glob("**/bin/ptxas")):
            os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"
            return True
    return False


def what_is_missing() -> str:
    """Returns what is missing to compile here, as a sentence; empty if nothing is."""
    import jax

    from pallas_kernels.paged_attention.pallas_gpu.implementation import JAX_NEEDED

    if jax.__version_info__ < JAX_NEEDED:
        return (
            f"JAX {jax.__version__} cannot compile these kernels; "
            "it takes 0.11 or newer, on Python 3.12"
        )
    if not (
        importlib.util.find_spec("jax_plugins")
        and importlib.util.find_spec("jax_plugins.xla_cuda13")
    ):
        return (
            "JAX's CUDA plugin is missing; pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        )
    if not find_ptxas():
        return "ptxas is missing; pip install nvidia-cuda-nvcc, or put CUDA's on the PATH"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--target", choices=[*sorted(TARGETS), *TPUS], required=True)
    parser.add_argument(
        "--only",
        choices=(
            "decode",
            "chunks",
            "overlapped",
            "latents",
            "rotated_write",
            "product",
            "floats",
        ),
        help="one kernel, of those for GPUs",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line instead of a table"
    )
    parser.add_argument(
        "--stages", type=int, help="tiles in flight, instead of the number in the target's file"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only the first shape of each kernel, head size and row, and GPT-OSS's; "
        "for TPUs, of models",
    )
    args = parser.parse_args(argv)
    if args.target in TPUS:
        if missing := aot_tpu.what_is_missing():
            print(f"error: {missing}", file=sys.stderr)
            return 2
        return aot_tpu.run(
            args.target, as_json=args.json, only_quick=args.quick, stages=args.stages
        )
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    if missing := what_is_missing():
        print(f"error: {missing}", file=sys.stderr)
        return 2
    aot_tpu.keep_to_the_cpu()
    target = TARGETS[args.target]
    tiles = Tiles.read(args.target)
    if args.stages:
        tiles = tiles._replace(decode_stages=args.stages, chunk_stages=args.stages)
    programs = [case for case in cases() if args.only in (None, case.kernel)]
    if args.quick:
        programs = quick(programs)
    failures = sum(not report(case, target, tiles, args.json) for case in programs)
    if not args.json:
        print(f"{len(programs)} programs for {target.name}, {failures} failed")
    return 1 if failures else 0


def quick(programs: list[AnyCase]) -> list[AnyCase]:
    """Returns the first case of each kernel, head size and number of queries, `GPT_OSS`, one rotated
    write, and a few products.
    """
    products = [case for case in programs if isinstance(case, Product)]
    floats = [case for case in programs if isinstance(case, FloatProduct)]
    attention = [case for case in programs if isinstance(case, Case)]
    firsts = {(c.kernel, c.head_size, c.queries): c for c in reversed(attention)}
    with_sinks = [case for case in attention if case in GPT_OSS]
    writes = [case for case in programs if isinstance(case, RotatedWrite)][:1]
    return [
        *reversed(firsts.values()),
        *with_sinks,
        *writes,
        *aot_linear.quick(products),
        *aot_linear.quick_floats(floats),
    ]


def report(case: AnyCase, target: Target, tiles: Tiles, as_json: bool) -> bool:
    """Compiles a case and prints one line. Returns whether it compiled as it should."""
    line: dict[str, Any] = {"target": target.name, **dataclasses.asdict(case)}
    try:
        compiled = compile_case(case, target, tiles)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        line["error"] = f"does not compile: {type(error).__name__}: {first}"
    else:
        line |= compiled._asdict()
        if compiled.spilled:
            line["error"] = (
                f"spills {compiled.spilled} bytes of registers to memory; use smaller tiles"
            )
        elif compiled.serialised:
            line["error"] = "ptxas lets each product (WGMMA) wait for the one before"
    if as_json:
        print(json.dumps(line), flush=True)
    elif "registers" in line:
        print(
            f"{case!s:44} {line['registers']:3} registers, {line['spilled']} bytes spilled, "
            f"{line['shared'] / 1024:.0f} KiB shared, {line['stages']} stages, "
            f"compiled in {line['seconds']:.1f} s",
            flush=True,
        )
    if "error" in line and not as_json:
        print(f"{case!s:44} FAILED: {line['error']}", flush=True)
    return "error" not in line


if __name__ == "__main__":
    sys.exit(main())

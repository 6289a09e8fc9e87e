"""Compiles the TPU kernels for a chip that need not be present, and prints the compiler's report beside an estimate.

    python -m pallas_kernels.aot --target v5e
    python -m pallas_kernels.aot --target tpu7x --json --quick

It needs libtpu, the compiler itself, which runs without a chip. Nothing is executed. For each shape it compiles the
attention of a layer, which is the write of new keys and values, decodes, rows of up to 4 and of up to 8 query tokens,
and chunks. It prints the VMEM and the number of bundles (very long instruction words) of each, and how many a row of
`LONG` context tokens executes, as a multiple of a decode's. The estimate is a roofline of the chip's published numbers
for `ROWS` rows of `CONTEXT` tokens and a prompt of `PROMPT` tokens: a bound and not a measurement.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels import bundles
from pallas_kernels.tiles import TpuTiles
from pallas_kernels.timing import Shape

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
QUERIES = {"decode": 1, "short4": 4, "short8": 8}  # of a row
KERNELS = ("write", *QUERIES, "chunks")
LONG = 2048  # context tokens of the row whose bundles are counted
ROWS, CONTEXT, PROMPT = 64, 1024, 2048  # of the estimates
TOKENS, WIDTH, PAGES = 512, 512, 1025  # of the programs: T, M, P; B is ROWS


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled program: three kernels at one shape."""

    heads: int  # of keys
    group: int
    head_size: int
    block_size: int
    dtype: str = "bfloat16"
    options: tuple[tuple[str, float], ...] = ()
    name: str = ""

    def __str__(self) -> str:
        words = [
            f"{self.heads} heads x {self.head_size}",
            f"G {self.group}",
            f"S {self.block_size}",
            self.dtype,
        ]
        return ", ".join(
            [*words, *(name for name, _ in self.options), *([self.name] if self.name else [])]
        )


class Kernel(NamedTuple):
    """The compiler's report of one kernel."""

    bundles: int
    vmem: int  # bytes that it allocates, without the queries and results that Pallas copies in and out
    row: int = 0  # bundles that a row of LONG context tokens executes; 0 if not known


class Estimate(NamedTuple):
    """The bytes of HBM and the operations of one call, and the least seconds that the chip needs."""

    nbytes: float
    flops: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.nbytes / 1e6:.1f} MB, {self.flops / 1e9:.2f} GFLOP, {1e6 * self.seconds:.0f} us at least"


def cases() -> Iterator[Case]:
    """Every supported shape: each option that changes the program, alone and in the combinations that matter."""
    from pallas_kernels.paged_attention.pallas_tpu.implementation import (
        BLOCK_SIZES,
        DTYPES,
        HEAD_SIZES,
    )

    yield Case(3, 3, 64, 16, name="SmolLM2-135M")
    yield Case(8, 4, 128, 16, name="Llama-3-8B")
    yield Case(1, 8, 128, 16, name="Llama-3-70B, one of 8 chips")
    yield Case(8, 2, 256, 16, name="Gemma-2-9B")
    yield Case(12, 1, 64, 16, name="GPT-2")
    yield Case(32, 1, 128, 16, name="Llama-2-7B")
    for d in HEAD_SIZES:
        for dtype in DTYPES:
            for s in BLOCK_SIZES:
                yield Case(4, 4, d, s, dtype)
        for group in (1, 3, 16, 32):
            yield Case(2, group, d, 16)
        yield Case(4, 4, d, 16, options=(("window", 4096),))
        yield Case(4, 4, d, 16, options=(("soft_cap", 50.0),))


def quick(chosen: list[Case]) -> list[Case]:
    """Returns the cases with a name."""
    return [case for case in chosen if case.name]


def what_is_missing() -> str:
    """Returns what is missing to compile here, as a sentence; empty if nothing is."""
    if importlib.util.find_spec("libtpu"):
        return ""
    needed = [
        need for need in importlib.metadata.requires("jax") or () if need.startswith("libtpu")
    ]
    version = (needed or ["libtpu"])[0].split(";")[0].strip()
    return f"libtpu is missing; pip install --no-deps --target DIR '{version}' and put DIR on PYTHONPATH"


def keep_to_the_cpu() -> None:
    """Stops JAX from starting a device, also if the machine has one.

    It sets JAX's configuration, because JAX reads the environment when it is imported. To start a device, JAX's CUDA
    plugin needs cuDNN, which compiling does not.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")


def prepare(dump: Path | None = None) -> None:
    """Sets the environment that libtpu reads when it is loaded: no search for a chip, and the files to dump."""
    keep_to_the_cpu()
    quiet = {
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    for name, value in (quiet | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}).items():
        os.environ.setdefault(name, value)
    if dump:
        passes = "--xla_jf_dump_llo_pass_label_regex=.*(original|final_bundles)"  # two of 70
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true {passes}"
        )


def lower(function: Any, arguments: Any, target: str) -> Any:
    """Returns a jitted function lowered at shapes for one device of a chip that need not be present; `.compile()` it.

    Tile sizes are those of the chip, because the function finds the chip's name in the mesh.
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    device = topologies.get_topology_desc(TOPOLOGIES[target], platform="tpu").devices[0]
    here = SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), arguments
    )
    with jax.sharding.use_abstract_mesh(Mesh([device], ("x",)).abstract_mesh):
        return function.trace(*placed).lower(lowering_platforms=("tpu",))


def compile_case(
    case: Case, target: str, tiles: TpuTiles, dump: Path
) -> tuple[dict[str, Kernel], float]:
    """Compiles one case. Returns the report of each kernel, and the seconds. Raises the compiler's errors."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import kv_write
    from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu
    from pallas_kernels.shared.tpu import row_size

    d, row = case.head_size, row_size(case.head_size)
    write = partial(kv_write.IMPLS["pallas_tpu"], tiles=tiles)
    pages = jax.ShapeDtypeStruct((PAGES, case.heads, case.block_size * d // row, row), case.dtype)
    new = jax.ShapeDtypeStruct((TOKENS, case.heads, d), case.dtype)
    q = jax.ShapeDtypeStruct((TOKENS, case.heads * case.group, d), case.dtype)
    slots, tables, lengths, first = (
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in ((TOKENS,), (ROWS, WIDTH), (ROWS,), (ROWS + 1,))
    )

    def layer(k_pages, v_pages, k, v, q, slots, tables, lengths, first):
        k_pages, v_pages = write(k_pages, v_pages, k, v, slots, rows=ROWS)
        options: dict[str, Any] = dict(case.options)
        out = pallas_tpu.paged_attention(
            q, k_pages, v_pages, tables, lengths, first, scale=d**-0.5, tiles=tiles, **options
        )
        return k_pages, v_pages, out

    arguments = (pages, pages, new, new, q, slots, tables, lengths, first)
    started = time.perf_counter()
    lower(jax.jit(layer, donate_argnums=(0, 1)), arguments, target).compile()
    seconds = time.perf_counter() - started
    found = sizes(case, tiles)
    return {
        kernel: read_dump(dump, kernel, trips(case, found.get(kernel))) for kernel in KERNELS
    }, seconds


def trips(case: Case, made: Any) -> bundles.Trips | None:
    """Returns how often the loops of a row of LONG context tokens turn, in a kernel of the sizes `made`."""
    from pallas_kernels.paged_attention.pallas_tpu.kernel import bodies

    return made and bundles.Trips(
        -(-LONG // made.span), made.span // made.block_size, bodies(case.heads)
    )


def read_dump(dump: Path, kernel: str, trips: bundles.Trips | None = None) -> Kernel:
    """Reads the report of the compiler's last pass over a kernel.

    Raises:
        ValueError: the compiler has dumped no such kernel, or in another form.
    """
    name = f"*paged_attention_{kernel}*"
    analysis, original, schedule = (
        sorted(dump.glob(name + end))
        for end in (
            "schedule-analysis_final_bundles.txt",
            "original.txt",
            "[0-9]-final_bundles.txt",
        )
    )
    found = (
        re.search(r"total scheduled bundles:\s+(\d+)", analysis[-1].read_text())
        if analysis
        else None
    )
    if not found or not original:
        raise ValueError(
            f"libtpu has dumped no schedule of the kernel {kernel!r}; does it know --xla_jf_dump_llo_text?"
        )
    text = original[-1].read_text()
    own = re.findall(r"vmem, size = (0x[0-9a-f]+), scoped", text)
    row = bundles.of_a_row(schedule[-1].read_text(), trips) if trips else 0
    return Kernel(int(found[1]), sum(int(size, 16) for size in own), row)


def estimates(case: Case, tiles: TpuTiles) -> dict[str, Estimate]:
    """Returns a roofline of each kernel: `ROWS` rows of `CONTEXT` tokens, a prompt of `PROMPT`, the decodes' writes."""
    import jax.numpy as jnp

    itemsize = jnp.dtype(case.dtype).itemsize
    row = 2 * case.heads * case.head_size * itemsize  # keys and values of a token
    known = {"heads": case.heads, "group": case.group, "d": case.head_size, "s": case.block_size}
    window = int(dict(case.options).get("window", CONTEXT))
    seen = min(CONTEXT, window)
    rows = {
        kernel: Shape(rows=ROWS, queries=count, context=seen, **known)
        for kernel, count in QUERIES.items()
    }
    chunks = Shape(rows=1, queries=PROMPT, context=PROMPT, **known)
    queries = row * case.group  # of one token, and as many results
    tile = chunk_tokens(case, tiles)
    passes = sum(
        min(PROMPT, end) for end in range(tile, PROMPT + tile, tile)
    )  # context tokens that tiles read
    nbytes = {
        "write": ROWS
        * min(8, case.block_size * case.head_size // 128)
        * row
        * max(1, 128 // case.head_size)
        * 2,
        **{kernel: ROWS * (seen * row + count * queries) for kernel, count in QUERIES.items()},
        "chunks": passes * row + PROMPT * queries,
    }
    flops = {
        "write": 0.0,
        "chunks": chunks.flops,
        **{kernel: shape.flops for kernel, shape in rows.items()},
    }
    return {
        kernel: Estimate(
            nbytes[kernel],
            flops[kernel],
            max(nbytes[kernel] / tiles.bandwidth, flops[kernel] / tiles.flops),
        )
        for kernel in KERNELS
    }


def chunk_tokens(case: Case, tiles: TpuTiles) -> int:
    """Returns the query tokens of a prompt's tile."""
    return sizes(case, tiles)["chunks"].tokens


def sizes(case: Case, tiles: TpuTiles) -> dict[str, Any]:
    """Returns the sizes of the kernels of attention."""
    import jax.numpy as jnp

    from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu

    itemsize = jnp.dtype(case.dtype).itemsize
    shape = pallas_tpu.Shape(
        case.heads, case.group, case.head_size, case.block_size, itemsize, itemsize
    )
    found = {
        kernel: pallas_tpu.decode_sizes(shape, tiles, count) for kernel, count in QUERIES.items()
    }
    return {**found, "chunks": pallas_tpu.chunk_sizes(shape, tiles)}


def why(error: Exception) -> str:
    """Returns a compiler's error as a sentence, with the setting to change if that is known."""
    text = " ".join(str(error).split())
    found = re.search(r"Scoped allocation with size (\S+) and limit (\S+) exceeded", text)
    if found:
        return (
            f"needs {found[1]} of VMEM and vmem_limit is {found[2]}; in the target's file lower decode_step, "
            "longest_span, chunk_rows or the stages"
        )
    return f"does not compile: {type(error).__name__}: {text[:300]}"


def report(case: Case, target: str, tiles: TpuTiles, dump: Path) -> Iterator[dict[str, Any]]:
    """Compiles a case. Yields a record for each kernel, or one with an error."""
    line: dict[str, Any] = {"target": target, **dataclasses.asdict(case)}
    try:
        kernels, seconds = compile_case(case, target, tiles, dump)
    except Exception as error:
        yield line | {"error": why(error)}
        return
    finally:
        for file in dump.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    found = estimates(case, tiles)
    for kernel, made in kernels.items():
        yield line | {
            "kernel": kernel,
            **made._asdict(),
            "seconds": seconds,
            "estimate": found[kernel]._asdict(),
        }


def table(case: Case, records: list[dict[str, Any]], tiles: TpuTiles) -> str:
    """Formats the records of a case as text."""
    if "error" in records[0]:
        return f"{case}\n  FAILED: {records[0]['error']}"
    decode = next(record for record in records if record["kernel"] == "decode")
    lines = [f"{case}: compiled in {records[0]['seconds']:.1f} s"]
    for record in records:
        made = f"{record['bundles']:5} bundles, {record['vmem'] / 2**20:5.2f} of {tiles.vmem_limit / 2**20:.0f} MiB VMEM"
        if record["row"] and decode["row"]:
            made += f", a row executes {record['row']:6} ({record['row'] / decode['row']:.2f})"
        lines.append(f"  {record['kernel']:6} {made}; {Estimate(**record['estimate'])}")
    return "\n".join(lines)


def run(target: str, *, as_json: bool, only_quick: bool, stages: int | None) -> int:
    """Compiles every supported shape for a chip. Returns the exit status of the command."""
    import json

    tiles = TpuTiles.read(target)
    if stages:
        tiles = tiles._replace(decode_stages=stages, chunk_stages=stages)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        chosen = list(cases())
        chosen = quick(chosen) if only_quick else chosen
        for case in chosen:
            records = list(report(case, target, tiles, Path(folder)))
            failures += "error" in records[0]
            print(
                "\n".join(map(json.dumps, records)) if as_json else table(case, records, tiles),
                flush=True,
            )
    if not as_json:
        print(f"{len(chosen)} programs of {len(KERNELS)} kernels for {target}, {failures} failed")
    return 1 if failures else 0

"""Compiles the TPU kernels for a chip that need not be present.

    python -m pallas_kernels.aot --target v5e
    python -m pallas_kernels.aot --target tpu7x --json --quick

It needs libtpu, which is the compiler and runs without a chip. Nothing is executed. For each shape
it compiles the attention of a layer: the write of new keys and values, decodes, rows of up to 4
and of up to 8 query tokens, and chunks; over latents, tiles for short rows only where they fit.
For each of these kernels it prints the VMEM and the number of bundles (very long instruction
words). It also prints how many bundles a row of `LONG_CONTEXT` context tokens executes, as a
multiple of a decode's number. Products with stored weights and recurrent states are compiled too.
Beside the compiler's
report it prints an estimate: a roofline of the chip's published numbers for `ROWS` rows of
`CONTEXT` tokens and a prompt of `PROMPT` tokens. That is a bound and not a measurement.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels import aot_linear, aot_states, bundles
from pallas_kernels.aot_linear import Product
from pallas_kernels.aot_states import States
from pallas_kernels.tiles import TpuTiles
from pallas_kernels.timing import Shape

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
QUERIES = {"decode": 1, "short4": 4, "short8": 8}  # query tokens of a row, by kernel
KERNELS = ("write", *QUERIES, "chunks")
LONG_CONTEXT = 2048  # context tokens of the row whose bundles are counted
ROWS = 64  # rows of the estimates, and B of the programs
CONTEXT = 1024  # context tokens of a row of the estimates
PROMPT = 2048  # tokens of the prompt of the estimates
TOKENS = 512  # T of the programs
WIDTH = 512  # M of the programs
PAGES = 1025  # P of the programs


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled program: all kernels of a layer, at one shape."""

    heads: int  # key heads
    group: int  # query heads of a key head
    head_size: int
    block_size: int
    dtype: str = "bfloat16"
    options: tuple[tuple[str, float], ...] = ()
    name: str = ""
    sinks: bool = False
    rank: int | None = None  # numbers of a latent, of `head_size` that are kept of a token

    @property
    def row(self) -> int:
        """Numbers of a row of queries, and of keys or latents in a page."""
        from pallas_kernels.shared.tpu import whole_rows

        return self.head_size if self.rank is None else whole_rows(self.head_size)

    @property
    def numbers(self) -> int:
        """Numbers that are read of a token for each key head, its row and its value: both of keys
        and values, and the row alone of latents.
        """
        return 2 * self.head_size if self.rank is None else self.row

    @property
    def query_numbers(self) -> int:
        """Numbers of a query and of its result."""
        return self.row + (self.rank or self.head_size)

    def __str__(self) -> str:
        words = [
            f"{self.heads} heads x {self.head_size}",
            f"G {self.group}",
            f"S {self.block_size}",
            self.dtype,
        ]
        words += [name for name, _ in self.options]
        if self.sinks:
            words.append("sinks")
        if self.rank:
            words.append(f"latents of {self.rank}")
        if self.name:
            words.append(self.name)
        return ", ".join(words)


class Kernel(NamedTuple):
    """The compiler's report of one kernel."""

    bundles: int
    # bytes that it allocates, without the queries and results that Pallas copies in and out
    vmem: int
    row: int = 0  # bundles that a row of LONG_CONTEXT context tokens executes; 0 if not known


class Estimate(NamedTuple):
    """The bytes of HBM and the operations of one call, and the least seconds that a chip needs."""

    nbytes: float
    flops: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.nbytes / 1e6:.1f} MB, {self.flops / 1e9:.2f} GFLOP, "
            f"{1e6 * self.seconds:.0f} us at least"
        )


def cases() -> Iterator[Case]:
    """Yields every supported shape.

    Each option that changes the program comes alone and in the combinations that matter.
    """
    from pallas_kernels.paged_attention.pallas_tpu.implementation import (
        BLOCK_SIZES,
        DTYPES,
        HEAD_SIZES,
        LATENT,
        MAX_LATENT_HEADS,
    )

    rank, kept = LATENT
    latents = partial(Case, 1, head_size=kept, rank=rank)
    yield Case(3, 3, 64, 16, name="SmolLM2-135M")
    yield Case(8, 4, 128, 16, name="Llama-3-8B")
    yield Case(1, 8, 128, 16, name="Llama-3-70B, one of 8 chips")
    yield Case(8, 2, 256, 16, name="Gemma-2-9B")
    yield Case(12, 1, 64, 16, name="GPT-2")
    yield Case(32, 1, 128, 16, name="Llama-2-7B")
    yield Case(8, 8, 64, 16, options=(("window", 128),), name="GPT-OSS", sinks=True)
    yield latents(16, block_size=16, name="DeepSeek-V2-Lite")
    yield latents(MAX_LATENT_HEADS, block_size=16, name="DeepSeek-V3")
    for dtype in DTYPES:
        for s in BLOCK_SIZES:
            yield latents(32, block_size=s, dtype=dtype)
        yield latents(MAX_LATENT_HEADS, block_size=8, dtype=dtype)
    for heads in (1, 3, 64):
        yield latents(heads, block_size=16)
    yield latents(32, block_size=16, options=(("window", 4096),))
    yield latents(32, block_size=16, options=(("soft_cap", 50.0),))
    for d in HEAD_SIZES:
        for dtype in DTYPES:
            for s in BLOCK_SIZES:
                yield Case(4, 4, d, s, dtype)
        for group in (1, 3, 16, 32):
            yield Case(2, group, d, 16)
        yield Case(4, 4, d, 16, options=(("window", 4096),))
        yield Case(4, 4, d, 16, options=(("soft_cap", 50.0),))
        yield Case(4, 4, d, 16, sinks=True)


def quick(programs: list[Case]) -> list[Case]:
    """Returns the cases with a name."""
    return [case for case in programs if case.name]


def what_is_missing() -> str:
    """Returns what is missing to compile here, as a sentence; empty if nothing is."""
    if importlib.util.find_spec("libtpu"):
        return ""
    requirements = importlib.metadata.requires("jax") or ()
    of_libtpu = [text for text in requirements if text.startswith("libtpu")] or ["libtpu"]
    version = of_libtpu[0].split(";")[0].strip()
    return (
        f"libtpu is missing; pip install --no-deps --target DIR '{version}' "
        "and put DIR on PYTHONPATH"
    )


def keep_to_the_cpu() -> None:
    """Stops JAX from starting a device, also if the machine has one.

    It sets JAX's configuration, because JAX reads the environment when it is imported. To start a
    device, JAX's CUDA plugin needs cuDNN, which compiling does not.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")


def prepare(dump: Path | None = None) -> None:
    """Sets the environment that libtpu reads when it is loaded.

    libtpu then searches for no chip, and dumps files into the folder `dump`.
    """
    keep_to_the_cpu()
    environment = {
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if dump:
        passes = "--xla_jf_dump_llo_pass_label_regex=.*(original|final_bundles)"  # two of 70
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true {passes}"
        )


def lower(function: Any, arguments: Any, target: str) -> Any:
    """Returns a jitted function lowered at shapes for one device of a chip.

    The chip need not be present. `.compile()` the result. Tile sizes are those of the chip, because
    the function finds the chip's name in the mesh.
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, SingleDeviceSharding

    device = topologies.get_topology_desc(TOPOLOGIES[target], platform="tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    with jax.sharding.use_abstract_mesh(Mesh([device], ("x",)).abstract_mesh):
        return function.trace(*placed).lower(lowering_platforms=("tpu",))


def arguments_of(case: Case) -> tuple[Any, ...]:
    """Returns the shapes of a layer's arguments.

    They are q, slots, block tables, lengths, cu_q_lens, and sinks if the case has some. Before them
    are pages and new numbers: of keys and of values, or of latents.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels.shared.tpu import row_size

    d = case.row
    row = row_size(d)
    pages = jax.ShapeDtypeStruct((PAGES, case.heads, case.block_size * d // row, row), case.dtype)
    new = jax.ShapeDtypeStruct((TOKENS, case.heads, d), case.dtype)
    q = jax.ShapeDtypeStruct((TOKENS, case.heads * case.group, d), case.dtype)
    kept = (pages, new) if case.rank else (pages, pages, new, new)
    shapes = (TOKENS,), (ROWS, WIDTH), (ROWS,), (ROWS + 1,)
    numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    if case.sinks:
        numbers.append(jax.ShapeDtypeStruct((case.heads * case.group,), jnp.float32))
    return (*kept, q, *numbers)


def compile_case(
    case: Case, target: str, tiles: TpuTiles, dump: Path
) -> tuple[dict[str, Kernel], float]:
    """Compiles one case. Returns the report of each kernel, and the seconds.

    Raises the compiler's errors.
    """
    import jax

    from pallas_kernels import kv_write
    from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu

    write = partial(kv_write.IMPLS["pallas_tpu"], tiles=tiles)
    options: dict[str, Any] = {"scale": case.head_size**-0.5, "tiles": tiles, **dict(case.options)}

    rank = case.rank or 0

    def latent_layer(pages, x, q, slots, *rows):
        pages, _ = write(pages, None, x, None, slots, rows=ROWS)
        out = pallas_tpu.latent_attention(q, pages, *rows, rank=rank, **options)
        return pages, out

    def layer(k_pages, v_pages, k, v, q, slots, tables, lengths, cu_q_lens, sinks=None):
        k_pages, v_pages = write(k_pages, v_pages, k, v, slots, rows=ROWS)
        out = pallas_tpu.paged_attention(
            q, k_pages, v_pages, tables, lengths, cu_q_lens, sinks=sinks, **options
        )
        return k_pages, v_pages, out

    if rank:
        program = jax.jit(latent_layer, donate_argnums=0)
    else:
        program = jax.jit(layer, donate_argnums=(0, 1))
    started = time.perf_counter()
    lower(program, arguments_of(case), target).compile()
    seconds = time.perf_counter() - started
    kernel_sizes = sizes(case, tiles)
    kernels = {
        kernel: read_dump(dump, kernel, trips(case, kernel_sizes.get(kernel)))
        for kernel in ("write", *kernel_sizes)
    }
    return kernels, seconds


def trips(case: Case, sizes: Any) -> bundles.Trips | None:
    """Returns how often the loops of a row of LONG_CONTEXT context tokens turn in a kernel.

    Args:
        sizes: of the kernel; None for the write, whose loops are not counted.
    """
    from pallas_kernels.paged_attention.pallas_tpu.kernel import bodies

    if sizes is None:
        return None
    return bundles.Trips(
        steps=-(-LONG_CONTEXT // sizes.span),
        pages=sizes.span // sizes.block_size,
        heads=bodies(case.heads),
    )


def read_dump(
    dump: Path,
    kernel: str,
    trips: bundles.Trips | None = None,
    operation: str = "paged_attention",
) -> Kernel:
    """Reads the report of the compiler's last pass over a kernel of an operation.

    Raises:
        ValueError: the compiler has dumped no such kernel, or has dumped it in another form.
    """
    name = f"*{operation}_{kernel}*"
    analysis = sorted(dump.glob(name + "schedule-analysis_final_bundles.txt"))
    original = sorted(dump.glob(name + "original.txt"))
    schedule = sorted(dump.glob(name + "[0-9]-final_bundles.txt"))
    total = None
    if analysis:
        total = re.search(r"total scheduled bundles:\s+(\d+)", analysis[-1].read_text())
    if not total or not original:
        raise ValueError(
            f"libtpu has dumped no schedule of the kernel {kernel!r}; "
            "does it know --xla_jf_dump_llo_text?"
        )
    allocations = re.findall(r"vmem, size = (0x[0-9a-f]+), scoped", original[-1].read_text())
    vmem = sum(int(size, 16) for size in allocations)
    row = bundles.of_a_row(schedule[-1].read_text(), trips) if trips else 0
    return Kernel(int(total[1]), vmem, row)


def compile_product(product: Product, target: str, dump: Path) -> tuple[dict[str, Kernel], float]:
    """As `compile_case`, of a product."""
    import jax

    function, arguments = product.function_and_shapes_on_tpu()
    started = time.perf_counter()
    lower(jax.jit(function), arguments, target).compile()
    seconds = time.perf_counter() - started
    operation = "linear" if product.count == 1 else "linear_experts"
    return {product.kernel: read_dump(dump, product.weights, operation=operation)}, seconds


def estimate_of_product(product: Product, tiles: TpuTiles) -> Estimate:
    """Returns a roofline: a weight, activations and sums are moved once."""
    _, arguments = product.function_and_shapes_on_tpu()
    sums_bytes = 4.0 * product.tokens * product.outputs
    nbytes = sums_bytes + sum(math.prod(a.shape) * a.dtype.itemsize for a in arguments)
    seconds = max(nbytes / tiles.bandwidth, product.flops / tiles.flops)
    return Estimate(nbytes, product.flops, seconds)


def compile_states(
    case: States, target: str, tiles: TpuTiles, dump: Path
) -> tuple[dict[str, Kernel], float]:
    """As `compile_case`, of a layer's states."""
    import jax

    function, arguments = case.function_and_shapes(tiles)
    started = time.perf_counter()
    lower(jax.jit(function, donate_argnums=0), arguments, target).compile()
    seconds = time.perf_counter() - started
    return {name: read_dump(dump, name, operation="states") for name in aot_states.KERNELS}, seconds


def estimates_of_states(case: States, tiles: TpuTiles) -> dict[str, Estimate]:
    """Returns a roofline of each kernel, for `ROWS` rows and for a prompt of `PROMPT` tokens."""
    estimates = {}
    for kernel, tokens in zip(aot_states.KERNELS, (ROWS, PROMPT), strict=True):
        nbytes = case.traffic(kernel, tokens)
        flops = case.flops(tokens)
        seconds = max(nbytes / tiles.bandwidth, flops / tiles.flops)
        estimates[kernel] = Estimate(nbytes, flops, seconds)
    return estimates


def estimates(case: Case, tiles: TpuTiles) -> dict[str, Estimate]:
    """Returns a roofline of each kernel.

    They are for `ROWS` rows of `CONTEXT` tokens, for a prompt of `PROMPT` tokens, and for the write
    of one token of each row.
    """
    import jax.numpy as jnp

    itemsize = jnp.dtype(case.dtype).itemsize
    token_bytes = case.heads * case.numbers * itemsize
    # `Shape` counts a product with each of d keys and each of d values
    d = case.query_numbers // 2
    model = {"heads": case.heads, "group": case.group, "d": d, "s": case.block_size}
    visible = min(CONTEXT, int(dict(case.options).get("window", CONTEXT)))
    query_bytes = case.heads * case.group * case.query_numbers * itemsize
    tile = chunk_tokens(case, tiles)
    # context tokens that the tiles of a prompt read, all together
    prompt_reads = sum(min(PROMPT, end) for end in range(tile, PROMPT + tile, tile))
    # the write reads and writes whole pieces: up to 8 rows of 128 numbers
    rows_of_piece = min(8, case.block_size * case.head_size // 128)
    tokens_of_piece = rows_of_piece * max(1, 128 // case.head_size)
    nbytes = {
        "write": ROWS * tokens_of_piece * token_bytes * 2,
        "chunks": prompt_reads * token_bytes + PROMPT * query_bytes,
    }
    chunks = Shape(rows=1, queries=PROMPT, context=PROMPT, **model)
    flops = {"write": 0.0, "chunks": chunks.flops}
    for kernel, count in QUERIES.items():
        nbytes[kernel] = ROWS * (visible * token_bytes + count * query_bytes)
        flops[kernel] = Shape(rows=ROWS, queries=count, context=visible, **model).flops
    return {
        kernel: Estimate(
            nbytes[kernel],
            flops[kernel],
            max(nbytes[kernel] / tiles.bandwidth, flops[kernel] / tiles.flops),
        )
        for kernel in nbytes
    }


def chunk_tokens(case: Case, tiles: TpuTiles) -> int:
    """Returns the query tokens of a prompt's tile."""
    return sizes(case, tiles)["chunks"].tokens


def sizes(case: Case, tiles: TpuTiles) -> dict[str, Any]:
    """Returns the sizes of the kernels of attention, by name."""
    import jax.numpy as jnp

    from pallas_kernels.paged_attention.pallas_tpu import implementation as pallas_tpu

    itemsize = jnp.dtype(case.dtype).itemsize
    shape = pallas_tpu.Shape(
        heads=case.heads,
        group=case.group,
        d=case.row,
        s=case.block_size,
        itemsize=itemsize,
        query_itemsize=itemsize,
        has_sinks=case.sinks,
        values=case.rank,
    )
    decodes = {
        kernel: pallas_tpu.decode_sizes(shape, tiles, count)
        for kernel, count in QUERIES.items()
        if count <= shape.longest_short
    }
    return {**decodes, "chunks": pallas_tpu.chunk_sizes(shape, tiles)}


def failure_text(error: Exception) -> str:
    """Returns a compiler's error as a sentence, with the setting to change if that is known."""
    text = " ".join(str(error).split())
    exceeded = re.search(r"Scoped allocation with size (\S+) and limit (\S+) exceeded", text)
    if exceeded:
        return (
            f"needs {exceeded[1]} of VMEM and vmem_limit is {exceeded[2]}; in the target's file "
            "lower decode_step, longest_span, chunk_rows or the stages"
        )
    return f"does not compile: {type(error).__name__}: {text[:300]}"


def report(
    case: Case | Product | States, target: str, tiles: TpuTiles, dump: Path
) -> Iterator[dict[str, Any]]:
    """Compiles a case. Yields a record for each kernel, or one with an error."""
    line: dict[str, Any] = {"target": target, **dataclasses.asdict(case)}
    try:
        if isinstance(case, Product):
            kernels, seconds = compile_product(case, target, dump)
        elif isinstance(case, States):
            kernels, seconds = compile_states(case, target, tiles, dump)
        else:
            kernels, seconds = compile_case(case, target, tiles, dump)
    except Exception as error:
        yield line | {"error": failure_text(error)}
        return
    finally:
        for file in dump.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    if isinstance(case, Product):
        rooflines = {case.kernel: estimate_of_product(case, tiles)}
    elif isinstance(case, States):
        rooflines = estimates_of_states(case, tiles)
    else:
        rooflines = estimates(case, tiles)
    for name, kernel in kernels.items():
        yield line | {
            "kernel": name,
            **kernel._asdict(),
            "seconds": seconds,
            "estimate": rooflines[name]._asdict(),
        }


def table(case: Case | Product | States, records: list[dict[str, Any]], tiles: TpuTiles) -> str:
    """Formats the records of a case as text."""
    if "error" in records[0]:
        return f"{case}\n  FAILED: {records[0]['error']}"
    decode = next((record for record in records if record["kernel"] == "decode"), None)
    limit = aot_states.limit(tiles) if isinstance(case, States) else tiles.vmem_limit
    lines = [f"{case}: compiled in {records[0]['seconds']:.1f} s"]
    for record in records:
        facts = (
            f"{record['bundles']:5} bundles, {record['vmem'] / 2**20:5.2f} "
            f"of {limit / 2**20:.0f} MiB VMEM"
        )
        if record["row"] and decode and decode["row"]:
            facts += f", a row executes {record['row']:6} ({record['row'] / decode['row']:.2f})"
        lines.append(f"  {record['kernel']:6} {facts}; {Estimate(**record['estimate'])}")
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
        programs = list(cases())
        products = list(aot_linear.tpu_products())
        states = [case for case in aot_states.cases() if case.fits(tiles)]
        if only_quick:
            programs = quick(programs)
            products = aot_linear.quick(products)
            states = aot_states.quick(states)
        for case in (*programs, *products, *states):
            records = list(report(case, target, tiles, Path(folder)))
            failures += "error" in records[0]
            text = "\n".join(map(json.dumps, records)) if as_json else table(case, records, tiles)
            print(text, flush=True)
    if not as_json:
        print(
            f"{len(programs)} programs of up to {len(KERNELS)} kernels, {len(products)} products "
            f"and {len(states)} of states for {target}, {failures} failed"
        )
    return 1 if failures else 0

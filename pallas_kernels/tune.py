"""Times the GPU kernels with different tiles on this machine's GPU, and writes the best to tiles/<device>.json.

    python -m pallas_kernels.tune --name h200
    python -m pallas_kernels.tune --name h200 --dry-run     # print, write no tiles
    python -m pallas_kernels.tune --name h200 --rehearse    # the same program on a CPU, with plain XLA; no tiles

Each number is chosen with the shape that depends on it most, and the other numbers stay: tile and stages of a decode
with 64 rows of 4,096 tokens, `min_split` with one row of 32,768 and one of 2,048, stages of a chunk with 4 prompts of
2,048. Candidates that do not fit into shared memory are skipped. Times are medians on the device (CUPTI). The file is
written after each number, so a tuning that is stopped leaves what it found.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.tiles import BY_SIZE, Tiles
from pallas_kernels.timing import Shape, arguments, compiled, device_times, inputs

SHARED = 232_448 - 8_192  # bytes that a block of threads can have, less the compiler's share
ROUNDS = 15
GROUP = 4
TYPICAL = Shape(rows=64, queries=1, context=4096, heads=8, group=GROUP, d=128, s=16)


def decode_candidates(tiles: Tiles, d: int) -> Iterator[Tiles]:
    from pallas_kernels.paged_attention.pallas_gpu import decode

    for tile in (64, 128):
        for stages in (2, 3, 4, 5, 6):
            sizes = {**dict(tiles.decode_tile), d: tile}
            changed = tiles._replace(decode_tile=tuple(sizes.items()), decode_stages=stages)
            if decode.shared_bytes(d, GROUP, itemsize=2, tiles=changed) <= SHARED:
                yield changed


def chunk_candidates(tiles: Tiles) -> Iterator[Tiles]:
    from pallas_kernels.paged_attention.pallas_gpu import chunks

    for stages in (2, 3, 4):
        changed = tiles._replace(chunk_stages=stages)
        needed = [chunks.shared_bytes(d, itemsize=2, tiles=changed) for d in pallas_gpu.HEAD_SIZES]
        if max(needed) <= SHARED:
            yield changed


def split_candidates(tiles: Tiles) -> Iterator[Tiles]:
    yield from (tiles._replace(min_split=tokens) for tokens in (128, 256, 512, 1024, 2048))


def program(shape: Shape, rehearse: bool, tiles: Tiles) -> Any:
    """Returns a candidate's compiled calls on two caches, or the error of its compilation."""
    if rehearse:
        call = partial(paged_attention, scale=shape.d**-0.5, impl="xla")
    else:
        call = partial(pallas_gpu.paged_attention, scale=shape.d**-0.5, tiles=tiles)
    try:
        return compiled(call, arguments(shape), 2)
    except Exception as error:
        return error


def best(name: str, candidates: Iterable[Tiles], *shapes: Shape, rehearse: bool = False) -> Tiles:
    """Returns the candidate with the smallest product of its times, one for each shape.

    In a product a shape that takes longer does not count more. It prints all times, and the errors
    of candidates that do not compile.

    Args:
        rehearse: time plain XLA, which has no tiles, for few tokens: to run this program without a
            GPU.
    """
    candidates = list(candidates)
    products = [1.0] * len(candidates)
    for shape in shapes:
        if rehearse:
            shape = shape._replace(
                rows=min(shape.rows, 2), queries=min(shape.queries, 16), context=64, heads=1
            )
        sets = [inputs(shape, seed) for seed in range(2)]
        with ThreadPoolExecutor() as pool:
            programs = list(pool.map(partial(program, shape, rehearse), candidates))
        for i, (tiles, calls) in enumerate(zip(candidates, programs, strict=True)):
            products[i] *= time_candidate(name, tiles, calls, sets, 1 if rehearse else ROUNDS)
    if not candidates or min(products) == math.inf:
        raise SystemExit(
            f"error: no candidate of {name} runs; the kernels are broken on this device"
        )
    return candidates[products.index(min(products))]


def time_candidate(
    name: str, tiles: Tiles, program: Any, sets: Sequence[Any], rounds: int
) -> float:
    """Returns the seconds of a candidate's program; infinity for one that does not run."""
    try:
        if isinstance(program, Exception):
            raise program
        seconds = device_times(program, sets, rounds).seconds
    except Exception as error:
        message = (str(error).splitlines() or [""])[0][:120]
        print(f"{name}: {type(error).__name__}  {tiles}: {message}", flush=True)
        return math.inf
    print(f"{name}: {1e6 * seconds:9.1f} us  {tiles}", flush=True)
    return seconds


def tune(start: Tiles, rehearse: bool = False) -> Iterator[Tiles]:
    """Yields the tiles after each number that was chosen. The last tiles are the result."""
    tiles = start
    choose = partial(best, rehearse=rehearse)
    for d in pallas_gpu.HEAD_SIZES:
        tiles = choose(f"decode, D {d}", decode_candidates(tiles, d), TYPICAL._replace(d=d))
        yield tiles
    # A short context gains most from many parts. A long context loses least from few parts.
    single = [TYPICAL._replace(rows=1, context=context) for context in (2048, 32768)]
    tiles = choose("splits", split_candidates(tiles), *single)
    yield tiles
    prompts = TYPICAL._replace(rows=4, queries=2048, context=2048)
    yield choose("chunks", chunk_candidates(tiles), prompts)


def as_json(tiles: Tiles, note: str) -> str:
    fields: dict[str, Any] = {"note": note, **tiles._asdict()}
    fields |= {key: {str(size): value for size, value in fields[key]} for key in BY_SIZE}
    return json.dumps(fields, indent=2) + "\n"


def wrong_name(name: str, device_kind: str) -> str:
    """Returns why tiles of a device cannot have this name, as a sentence; empty if they can.

    An engine reads the file whose name is in its device's name.
    """
    if name and name in device_kind.lower():
        return ""
    return (
        f"--name is {name!r}, and the GPU is {device_kind!r}; "
        "give a part of its name in lower case, such as h200"
    )


def main(argv: list[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=formatter, allow_abbrev=False
    )
    parser.add_argument(
        "--name", required=True, help="the device's file in pallas_kernels/tiles, such as h200"
    )
    parser.add_argument("--dry-run", action="store_true", help="write no tiles")
    parser.add_argument(
        "--rehearse", action="store_true", help="on a CPU: time plain XLA, and write no tiles"
    )
    parser.add_argument("--json", type=Path, help="write the tiles to this file too")
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    if not args.rehearse:
        reason = pallas_gpu.wrong_device(device)
        if reason:
            error = f"pallas_gpu {reason}; tiles must be tuned on their own device"
        else:
            error = wrong_name(args.name, device.device_kind)
        if error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    note = f"Tuned on {device.device_kind}, JAX {jax.__version__}, {time.strftime('%Y-%m-%d')}."
    note = f"A rehearsal. {note}" if args.rehearse else note
    files = [args.json] if args.json else []
    if not args.dry_run and not args.rehearse:
        files.append(Path(__file__).parent / "tiles" / f"{args.name}.json")
    text = ""
    for tiles in tune(Tiles.of(device.device_kind), args.rehearse):
        text = as_json(tiles, note)
        for file in files:
            file.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

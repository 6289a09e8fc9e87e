"""Is the kernel for latents right on this GPU?

    python -m experiments.hardware.gpu_latents --json latents.json
    python -m experiments.hardware.gpu_latents --rehearse     # one shape, interpreted on a CPU

Every block size with the heads of a DeepSeek, or of its part on one device, is one ragged batch of
decodes, short rows and chunks, as in gpu_numerics.py. A row of 576 numbers is the key of a token
for all heads, and its first 512 are the value. Nothing is timed. A rehearsal needs JAX 0.11 too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from experiments.hardware import gpu_numerics
from experiments.hardware.gpu_numerics import Case, checks_parser, run_checks
from pallas_kernels.paged_attention import latent_attention
from pallas_kernels.paged_attention.pallas_gpu import implementation as pallas_gpu
from pallas_kernels.shared.device import device_kind
from pallas_kernels.tiles import Tiles

RANK, ROW = pallas_gpu.LATENT
HEADS = (16, 128)  # of DeepSeek-V2-Lite and V3
REHEARSED = [Case(ROW, 16, 16, soft_cap=5.0)]


def cases() -> Iterator[Case]:
    """Yields every block size with both numbers of heads, and three variants."""
    for size in pallas_gpu.BLOCK_SIZES:
        for heads in HEADS:
            yield Case(ROW, size, heads)
    yield Case(ROW, 16, 20)  # not a multiple of 16
    yield Case(ROW, 16, 16, window=33)
    yield Case(ROW, 16, 16, soft_cap=5.0)


def kernels(min_split: int | None) -> Any:
    """The kernel as a function of keys and values, of which it reads the keys.

    min_split: instead of the number in the device's tiles.
    """
    implementation = pallas_gpu.IMPLEMENTATION
    if min_split is not None:
        assert implementation.latents
        tiles = Tiles.of(device_kind())._replace(min_split=min_split)
        attend = partial(pallas_gpu.latent_attention, tiles=tiles)
        implementation = implementation._replace(
            latents=implementation.latents._replace(attend=attend)
        )

    def attend_pages(q, k_pages, v_pages, tables, lengths, first, **options):
        rows = tables, lengths, first
        return latent_attention(q, k_pages, *rows, rank=RANK, impl=implementation, **options)

    return attend_pages


def errors(case: Case) -> dict[str, float]:
    """As `gpu_numerics.errors`, of the kernel for latents."""
    batch = gpu_numerics.batch_of(case, 1)
    values = batch.k[..., :RANK]
    return gpu_numerics.errors_of_batch(case, batch._replace(v=values), kernels)


def check_case(case: Case) -> dict[str, Any]:
    return gpu_numerics.check_case(case, errors_of=errors)


def interpret_case(case: Case) -> dict[str, Any]:
    return gpu_numerics.interpret_case(case, errors_of=errors)


def main(argv: list[str] | None = None) -> int:
    args = checks_parser(__doc__).parse_args(argv)
    if args.rehearse:
        return run_checks(args, REHEARSED, interpret_case)
    return run_checks(args, list(cases()), check_case)


if __name__ == "__main__":
    sys.exit(main())

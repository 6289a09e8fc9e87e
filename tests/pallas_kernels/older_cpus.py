"""CPU kernels compiled for the instructions of an older CPU, in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import fresh_python

NARROWER = {
    "AVX2": ("haswell", "+avx2,+fma,+avx,+sse4.2,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe"),
    "AVX-512 without pairs": (
        "skylake-avx512",
        "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx2,+fma,+avx",
    ),
}
by_name = pytest.mark.parametrize("name", NARROWER)


def printed(program: str, name: str, cache: Path) -> list[str]:
    """The lines that a program prints there; the test is skipped if this CPU lacks them."""
    from pallas_kernels.shared.cpu.compiler import has

    cpu, features = NARROWER[name]
    if not all(has(feature[1:]) for feature in features.split(",")):
        pytest.skip(f"this CPU has no {name}")
    settings: dict[str, Any] = {
        "PALLAS_KERNELS_CPU_NAME": cpu,
        "PALLAS_KERNELS_CPU_FEATURES": features,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    return fresh_python.output_of(program, **settings).splitlines()

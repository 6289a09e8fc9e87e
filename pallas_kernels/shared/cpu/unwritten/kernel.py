"""Writes nothing."""

from __future__ import annotations

from pallas_kernels.shared.cpu.translate import compiled_apart


@compiled_apart
def handle(frame):
    return 0

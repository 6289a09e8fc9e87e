"""The options of the kernel. Each is a constant in a variant of it."""

from __future__ import annotations

from typing import Any

from pallas_kernels.shared.cpu.translate import Option

# Bytes of a number in the pages: 4 of float32, 2 of bfloat16, 1 of float8_e4m3fn
SIZE: Any = Option("size")
PAIRED: Any = Option("paired")  # 1 if queries and pages are bfloat16, and chunks multiply pairs
SINKS: Any = Option("sinks")  # 1 if each query head has a score that joins its softmax
INVARIANT: Any = Option("invariant")  # 1 if a token's result has the same bits in any chunk

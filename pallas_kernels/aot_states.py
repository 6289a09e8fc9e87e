"""Recurrent states that `pallas_kernels.aot` compiles for TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

# of the programs
ROWS = 64
TOKENS = 512
WIDTH = 64  # blocks of a table
PAGES = 1025
KERNELS = ("decode", "chunks")


@dataclasses.dataclass(frozen=True)
class States:
    """One compiled program: both kernels of a layer, at one shape.

    page: [heads of keys, rows, lanes] of a page array.
    dtype: of its words.
    delta: whether updates follow the delta rule.
    """

    heads: int
    key_heads: int
    value_dim: int
    delta: bool
    page: tuple[int, int, int]
    block_size: int
    dtype: str = "bfloat16"
    name: str = ""

    def __str__(self) -> str:
        rule = "delta rule" if self.delta else "Mamba 2"
        words = [
            f"states, {rule}",
            f"{self.heads} heads x {self.value_dim}",
            f"{self.key_heads} of keys",
            f"S {self.block_size}",
            f"{self.page[0]} x {self.page[1]} x {self.page[2]} {self.dtype}",
        ]
        return ", ".join([*words, self.name] if self.name else words)

    @property
    def shape(self) -> Any:
        from pallas_kernels.states import StateShape

        return StateShape(self.heads, self.key_heads, 128, self.value_dim, self.delta)

    @property
    def sizes(self) -> Any:
        """The sizes of the kernel for chunks."""
        import jax.numpy as jnp

        from pallas_kernels.states.pallas_tpu import implementation as pallas_tpu

        itemsize = jnp.dtype(self.dtype).itemsize
        return pallas_tpu.sizes_of(self.shape, self.page, itemsize, self.block_size)

    def fits(self, tiles: Any) -> bool:
        """Whether a chip has the VMEM; if not, the kernel refuses the shape."""
        from pallas_kernels.states.pallas_tpu import implementation as pallas_tpu

        sizes = self.sizes
        step = self.block_size, ROWS, TOKENS
        return not pallas_tpu.memory_obstacle(self.shape, self.page, sizes.itemsize, *step, tiles)

    def function_and_shapes(self, tiles: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Returns a function of (page arrays, tables, numbers of rows, numbers of tokens), and the
        shapes of its arguments.
        """
        import jax
        import jax.numpy as jnp

        from pallas_kernels.states import Inputs, Memory, Spans
        from pallas_kernels.states.pallas_tpu import implementation as pallas_tpu

        shape = self.shape
        sizes = self.sizes

        def layer(arrays, tables, spans, inputs):
            memory = Memory(arrays, tables, sizes.recent, sizes.states, self.block_size)
            return pallas_tpu.run(memory, inputs, spans, shape=shape, tiles=tiles)

        def floats(*numbers: int) -> Any:
            return jax.ShapeDtypeStruct((TOKENS, *numbers), jnp.float32)

        array = jax.ShapeDtypeStruct((PAGES, *self.page), self.dtype)
        tables = jax.ShapeDtypeStruct((sizes.pages, ROWS, WIDTH), jnp.int32)
        of_rows: Any = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        keys = floats(self.key_heads, shape.key_dim)
        of_heads = floats(self.heads)
        rate = of_heads if self.delta else None
        values = floats(self.heads, self.value_dim)
        inputs = Inputs(keys, keys, values, of_heads, rate)
        return layer, [(array, array), tables, Spans(of_rows, of_rows, of_rows), inputs]

    def traffic(self, kernel: str, tokens: int) -> float:
        """Returns the bytes that so many tokens move: of a row each (decode), or of one prompt."""
        from pallas_kernels.states.pallas_tpu.kernel import PIECE

        sizes = self.sizes
        state = 4 * self.heads * self.shape.key_dim * self.value_dim
        token = 4 * 128 * sizes.components
        copied = 4 * 128 * (sizes.input_components + sizes.units)
        if kernel == "decode":
            read_and_written = state * (1 + 1 / self.block_size)
            return tokens * (read_and_written + (self.block_size + PIECE) * token + copied)
        return tokens * (state / self.block_size + token + copied)

    def flops(self, tokens: int) -> float:
        """Returns the operations of so many tokens. A token is read by products with the state and
        its block, and is added to the state.
        """
        shape = self.shape
        state = self.heads * shape.key_dim * self.value_dim
        block = self.block_size * (self.key_heads * shape.key_dim + self.heads * self.value_dim)
        return 2.0 * tokens * ((1 + self.delta) * (state + block) + state)


def limit(tiles: Any) -> int:
    """Returns the bytes of VMEM that the kernels may use."""
    from pallas_kernels.states.pallas_tpu import implementation as pallas_tpu

    return pallas_tpu.vmem_limit(tiles)


def cases() -> Iterator[States]:
    """Yields the states of models, and every kind of page that the kernel takes."""
    qwen = (16, 16, 128, True)
    yield States(*qwen, page=(2, 16, 256), block_size=16, name="Qwen3.5-0.8B")
    yield States(32, 16, 128, True, page=(2, 16, 256), block_size=16, name="Qwen3-Next-80B-A3B")
    yield States(64, 1, 64, False, page=(8, 16, 128), block_size=32, name="Granite-4-H-Micro")
    yield States(128, 1, 64, False, page=(8, 16, 128), block_size=16, name="Granite-4-H-Small")
    yield States(48, 1, 64, False, page=(4, 64, 128), block_size=64, name="Granite-4-H-Tiny")
    yield States(32, 16, 128, True, page=(2, 64, 256), block_size=64)
    for dtype, rows in (("bfloat16", 16), ("uint16", 16), ("float32", 8)):
        size = 16 if rows == 16 else 8
        yield States(*qwen, page=(4, rows, 128), block_size=size, dtype=dtype)
    yield States(16, 4, 64, True, page=(3, 16, 128), block_size=16, dtype="float32")
    yield States(16, 4, 128, False, page=(1, 8, 128), block_size=8, dtype="float32")


def quick(programs: list[States]) -> list[States]:
    """Returns the first case of each rule."""
    return [programs[0], next(case for case in programs if not case.delta)]

"""Products with stored weights that `pallas_kernels.aot` compiles for GPUs and for TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

INT8 = "int8"  # numbers by row, which are no blocks
SHAPES = (4096, 4096), (4096, 14336)  # outputs and inputs: two matrices of Llama 3 8B
OFTEN = ("int4_128", "uint4_128", "fp8_128", INT8)  # what checkpoints have most
EXPERTS = "mxfp4", 5760, 2880, 256, 32  # those of GPT-OSS 20B, for 64 tokens with 4 experts each


@dataclasses.dataclass(frozen=True)
class Product:
    """One compiled program: the product of tokens with a matrix in a stored format.

    weights: the name of blocks, or INT8.
    outputs: of one matrix.
    count: of matrices of this size.
    """

    weights: str
    outputs: int
    inputs: int
    tokens: int
    count: int = 1
    kernel: str = "product"

    def __str__(self) -> str:
        experts = f"{self.count} x " if self.count > 1 else ""
        shape = f"{experts}[{self.outputs}, {self.inputs}]"
        return f"product, {self.weights} {shape}, {self.tokens} tokens"

    @property
    def matrix(self) -> Any:
        from pallas_kernels.linear import BLOCKS, Matrix

        outputs = self.count * self.outputs
        return Matrix(outputs, self.inputs, False, self.count, BLOCKS.get(self.weights))

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.outputs * self.inputs

    def function_and_shapes(self, tiles: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Returns the kernel for Hopper GPUs as a function, and the shapes of its arguments."""
        from pallas_kernels.linear.pallas_gpu import implementation as pallas_gpu

        shape = pallas_gpu.layout_of(self.matrix).shape
        sums = pallas_gpu.sums if self.count == 1 else pallas_gpu.sums_of_matrices
        return self._function(sums, tiles=tiles), self._arguments(shape)

    def memory(self, tiles: Any) -> tuple[int, int]:
        """Returns the bytes of shared memory and the stages of the kernel for Hopper GPUs."""
        from pallas_kernels.linear.pallas_gpu import kernel
        from pallas_kernels.linear.pallas_gpu.layout import layout_of

        columns = kernel.columns_of(self.tokens)
        if self.count > 1:
            columns = kernel.expert_columns(self.tokens, self.count)
        return kernel.shared_bytes(layout_of(self.matrix), columns), kernel.stages_of(columns)

    def function_and_shapes_on_tpu(self) -> tuple[Callable[..., Any], list[Any]]:
        """Returns the kernel for TPUs as a function, and the shapes of its arguments."""
        from pallas_kernels.linear import pallas_tpu

        shape = pallas_tpu.layout_of(self.matrix).shape
        sums = pallas_tpu.sums if self.count == 1 else pallas_tpu.sums_of_matrices
        return self._function(sums), self._arguments(shape)

    def _function(self, sums: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if self.count == 1:
            options["rows"] = 0, self.outputs
            return partial(sums, matrix=self.matrix, **options)

        def of_matrices(x: Any, packed: Any, sizes: Any) -> Any:
            return sums(x, packed, self.matrix, sizes, **options)

        return of_matrices

    def _arguments(self, packed: tuple[int, ...]) -> list[Any]:
        import jax
        import jax.numpy as jnp

        x = jax.ShapeDtypeStruct((self.tokens, self.inputs), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((self.count * packed[0], *packed[1:]), jnp.int32)
        sizes = [jax.ShapeDtypeStruct((self.count,), jnp.int32)] if self.count > 1 else []
        return [x, weight, *sizes]


def formats(smallest: int) -> list[str]:
    """Returns the formats that have words, those of OFTEN first.

    smallest: inputs of a block, at least.
    """
    import jax.numpy as jnp

    from pallas_kernels.linear import BLOCKS
    from pallas_kernels.linear.words import has_words

    names = [INT8, *BLOCKS]
    stored = {name: Product(name, *SHAPES[0], tokens=1).matrix for name in names}
    supported = [name for name in names if has_words(stored[name], jnp.dtype("int8"), smallest)]
    return sorted(supported, key=lambda name: OFTEN.index(name) if name in OFTEN else len(OFTEN))


def gpu_products() -> Iterator[Product]:
    """Yields every format with every number of columns."""
    from pallas_kernels.linear.pallas_gpu.layout import SMALLEST

    for name in formats(SMALLEST):
        for tokens in (8, 16, 32, 64):
            yield Product(name, *SHAPES[0], tokens=tokens)
    yield Product(OFTEN[0], *SHAPES[1], tokens=8)
    yield Product(OFTEN[0], *SHAPES[0], tokens=300)
    yield Product(*EXPERTS)


def tpu_products() -> Iterator[Product]:
    """Yields every format with few tokens and with many."""
    from pallas_kernels.linear.pallas_tpu import PIECE

    for name in formats(PIECE):
        for tokens in (16, 512):
            yield Product(name, *SHAPES[0], tokens=tokens)
    yield Product(OFTEN[0], *SHAPES[1], tokens=64)
    yield Product(OFTEN[0], 640, 576, tokens=3)
    yield Product(*EXPERTS)


def quick(products: list[Product]) -> list[Product]:
    """Returns the first of each format in OFTEN, all numbers of tokens of the first format, and
    experts.
    """
    firsts = {product.weights: product for product in reversed(products)}
    return [
        product
        for product in products
        if product.weights == OFTEN[0]
        or product.count > 1
        or (product.weights in OFTEN and product is firsts[product.weights])
    ]

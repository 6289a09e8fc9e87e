"""Products with weights that `pallas_kernels.aot` compiles for GPUs and for TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

INT8 = "int8"  # numbers by row, which are no blocks
SHAPES = (4096, 4096), (4096, 14336)  # outputs and inputs: two matrices of Llama 3 8B
OFTEN = ("int4_128", "uint4_128", "fp8_128", INT8)  # what checkpoints have most
EXPERTS = "mxfp4", 5760, 2880, 256, 32  # those of GPT-OSS 20B, for 64 tokens with 4 experts each
# of the results of two models, TinyLlama-1.1B and Llama 3 8B: width, inputs, and what follows the sums
FLOATS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (2560, 2048, {}),
    (2048, 2048, {"residual": True}),
    (5632, 2048, {"activation": "silu"}),
    (2048, 5632, {"residual": True}),
    (32000, 2048, {"result": "float32"}),
    (6144, 4096, {}),
    (14336, 4096, {"activation": "silu"}),
    (4096, 14336, {"residual": True}),
)


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


@dataclasses.dataclass(frozen=True)
class FloatProduct:
    """One compiled program: the product of tokens with a matrix of 16 bits, for Hopper GPUs.

    width: outputs of the result.
    outputs: of the weight in a tile; None: as it is chosen.
    """

    width: int
    inputs: int
    tokens: int
    activation: str | None = None
    residual: bool = False
    dtype: str = "bfloat16"
    result: str | None = None  # its dtype; None is `dtype`
    outputs: int | None = None
    kernel: str = "floats"

    def __str__(self) -> str:
        words = [f"{self.kernel}, {self.dtype} [{self.width}, {self.inputs}], {self.tokens} tokens"]
        words += [self.activation] if self.activation else []
        words += ["residual"] if self.residual else []
        words += [self.result] if self.result else []
        words += [f"tiles of {self.outputs}"] if self.outputs else []
        return ", ".join(words)

    def sizes(self, tiles: Any) -> tuple[Any, Any]:
        """Returns the product and its sizes, as in `pallas_gpu.dense_sizes`."""
        import jax.numpy as jnp

        from pallas_kernels.linear.pallas_gpu.dense_sizes import Product, parts_of, ranked

        product = Product(
            self.tokens,
            self.inputs,
            self.width,
            self.activation is not None,
            1 if self.activation else parts_of(self.width, self.inputs, tiles),
            self.residual,
            jnp.dtype(self.result or self.dtype).itemsize,
        )
        possible = ranked(product, tiles.multiprocessors)
        return product, next(s for s in possible if self.outputs in (None, s.outputs))

    def function_and_shapes(self, tiles: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Returns the kernel as a function, and the shapes of its arguments."""
        import jax

        from pallas_kernels.linear import Matrix
        from pallas_kernels.linear.pallas_gpu import implementation as pallas_gpu

        is_gated = self.activation is not None
        matrix = Matrix(self.width * (1 + is_gated), self.inputs, is_gated)
        options = {"activation": self.activation, "dtype": self.result or self.dtype}
        sizes = self.sizes(tiles)[1]

        def function(x: Any, weight: Any, residual: Any = None) -> Any:
            return pallas_gpu.dense(
                x, weight, matrix, residual=residual, tiles=tiles, sizes=sizes, **options
            )

        shapes = [(self.tokens, self.inputs), (matrix.outputs, self.inputs)]
        shapes += [(self.tokens, self.width)] if self.residual else []
        return function, [jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes]

    def memory(self, tiles: Any) -> tuple[int, int]:
        """Returns the bytes of shared memory and the stages of the kernel."""
        from pallas_kernels.linear.pallas_gpu.dense_sizes import shared_bytes

        product, sizes = self.sizes(tiles)
        return shared_bytes(sizes, product), sizes.stages


def float_products() -> Iterator[FloatProduct]:
    """Yields two models' products with few tokens and many, and every width of a tile."""
    from pallas_kernels.linear.pallas_gpu.dense_sizes import WIDTHS

    for tokens in (8, 256, 2048):
        for width, inputs, options in FLOATS:
            yield FloatProduct(width, inputs, tokens, **options)
    yield FloatProduct(*FLOATS[1][:2], 256, residual=True, dtype="float16")
    yield FloatProduct(*FLOATS[2][:2], 256, activation="gelu_tanh")
    yield FloatProduct(576, 1536, 3, residual=True)
    for outputs in WIDTHS:
        yield FloatProduct(8192, 2048, 256, outputs=outputs)
        yield FloatProduct(8192, 2048, 256, activation="silu", outputs=outputs)


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


def quick_floats(products: list[FloatProduct]) -> list[FloatProduct]:
    """Returns the first product of each kind with few tokens, and with many."""
    firsts = {(p.activation, p.residual, p.result, p.tokens): p for p in reversed(products)}
    return [p for p in reversed(firsts.values()) if p.tokens in (8, 256)]


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

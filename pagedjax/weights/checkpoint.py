"""`Checkpoint` and `Tensor`: a model on disk in any supported format, with Hugging Face names.
Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pagedjax.device.linear import Blocks
    from pagedjax.weights.architectures import Family


class Rows(NamedTuple):
    """How the numbers of a matrix are read as they are, as rows of blocks (pallas_kernels/linear).

    kind: of the numbers, a name of `stored_rows.KINDS`.
    group: how many inputs share a scale.
    load: (blocks) -> uint8 [out, bytes]: rows in a format that holds such numbers.
    order: reads the inputs [in] int32 in the order in which rows have them; None: as they are.
    """

    kind: str
    group: int
    load: Callable[[Blocks], np.ndarray]
    order: Callable[[], np.ndarray | None] = lambda: None


@dataclass(frozen=True)
class Tensor:
    """One stored tensor.

    dtype: of the values that `read` gives; float32 if they are quantised on disk.
    encoding: the format on disk.
    rows: of a matrix whose numbers can be kept as they are. Those of stacked matrices are [out, in]
        each, and follow each other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    encoding: str
    load: Callable[[], np.ndarray] = field(repr=False)
    rows: Rows | None = field(default=None, repr=False)

    def read(self) -> np.ndarray:
        """Read the values from the file: a new array of `shape` and `dtype`, to which nothing else
        has a reference.

        Raises:
            ValueError: the file is truncated, or the encoding cannot be decoded; names tensor, file
                and remedy.
        """
        return self.load()


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    config: like Hugging Face's config.json, but with `rope_theta` and `rope_scaling` instead of
        `rope_parameters`.
    tensors: by Hugging Face name, e.g. "model.layers.0.self_attn.q_proj.weight"; matrices [out,
        in], vectors [n]. For format "orbax" by the path of the model's parameter, e.g.
        "blocks.0.attn.qkv.weight".
    metadata: the key-value pairs of a GGUF file; empty for a directory.
    family: the user's own family with which it was opened; None: a built-in one.
    spare: names of tensors that change nothing, which a model need not have.
    """

    path: Path
    format: Literal["gguf", "huggingface", "orbax"]
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    generation_config: dict[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    family: Family | None = field(default=None, repr=False)
    spare: frozenset[str] = frozenset()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, from the config and the generation config, sorted."""
        ids: set[int] = set()
        for source in (self.config, self.generation_config):
            value = source.get("eos_token_id")
            if isinstance(value, int):
                ids.add(value)
            elif value is not None:
                ids.update(value)
        return tuple(sorted(ids))

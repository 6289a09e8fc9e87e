"""`Checkpoint` and `Tensor`: a model on disk in any supported format, with Hugging Face names.
Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from pagedjax.weights.architectures import Family


@dataclass(frozen=True)
class Tensor:
    """One stored tensor.

    dtype: of the values that `read` gives; float32 if they are quantised on disk.
    encoding: the format on disk.
    load_blocks: reads a matrix as rows of its format of blocks, uint8 [out, bytes], if that is one
        of `gguf_blocks.ENCODINGS`; None: it is not in blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    encoding: str
    load: Callable[[], np.ndarray] = field(repr=False)
    load_blocks: Callable[[], np.ndarray] | None = field(default=None, repr=False)

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
    """

    path: Path
    format: Literal["gguf", "huggingface", "orbax"]
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    generation_config: dict[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    family: Family | None = field(default=None, repr=False)

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

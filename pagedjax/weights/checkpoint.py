"""`Checkpoint` and `Tensor`: a model on disk, by Hugging Face names, in any format. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """One stored tensor: `dtype` is what `read` returns (float32 for a quantised one), `encoding` how it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    encoding: str
    load: Callable[[], np.ndarray] = field(repr=False)

    def read(self) -> np.ndarray:
        """The values, read from the file now: an array of `shape` and `dtype` that nothing else holds.

        Raises:
            ValueError: the file ends early or has an encoding that cannot be decoded; names tensor, file and remedy.
        """
        return self.load()


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    config: Hugging Face config.json style, normalised: `rope_theta` and `rope_scaling` instead of `rope_parameters`.
    tensors: by Hugging Face name, e.g. "model.layers.0.self_attn.q_proj.weight"; [out, in] matrices, [n] vectors. In
        the format "orbax" by the path of the model's own parameter, e.g. "blocks.0.attn.qkv.weight".
    metadata: a GGUF file's own key-value pairs; empty for a directory.
    """

    path: Path
    format: Literal["gguf", "huggingface", "orbax"]
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    generation_config: dict[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a generation, from the config and the generation config, sorted."""
        found: set[int] = set()
        for source in (self.config, self.generation_config):
            value = source.get("eos_token_id")
            found.update(() if value is None else (value,) if isinstance(value, int) else value)
        return tuple(sorted(found))

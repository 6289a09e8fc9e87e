"""Folders of small random models of any built-in family, written without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.weights.architectures import FAMILIES, normalised
from pagedjax.weights.convert import rows_of
from tests.weights.tiny import write_json, write_tokenizer


def shape_of(config: Mapping[str, Any]) -> DecoderConfig:
    return FAMILIES[config["model_type"]].from_hf(normalised(config, "a test"))


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a file, by name, so large that logits differ."""
    rng = np.random.default_rng(seed)
    c = shape_of(config)
    tensors = {}
    for entry in FAMILIES[config["model_type"]].param_table(c):
        _, *columns = entry.stored_shape
        for name, rows in zip(entry.sources, rows_of(entry, c), strict=True):
            numbers = rng.standard_normal((rows, *columns))
            if columns:
                numbers *= 1.0 if entry.path == ("embed",) else columns[-1] ** -0.5
            else:
                numbers = 0.1 * numbers + ("norm" in name and name.endswith("weight"))
            tensors[name] = numbers.astype(np.float32)
    return tensors


def write_family(folder: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """config.json, the weights and a tokenizer; returns the folder."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", dict(config))
    save_file(random_tensors(config, seed), folder / "model.safetensors")
    write_tokenizer(folder, 320)
    return folder

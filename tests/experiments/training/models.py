"""Folders of models for the tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flax import nnx

from experiments.training import train_tiny
from experiments.training.data import prepare
from experiments.training.forward import initial
from experiments.training.setup import Setup, hf_config
from pagedjax import load_model
from pagedjax.device.models import llama
from pagedjax.weights.pretrained import LoadedModel
from pagedjax.weights.tree import named


def write_initial(folder: Path, setup: Setup) -> Path:
    """Write a model with initial weights, as train_tiny writes one. Returns its folder."""
    params = nnx.state(initial(llama.from_hf(hf_config(setup)), 0), nnx.Param)
    train_tiny.write_model(folder, setup, prepare(setup.vocab).tokenizer, params)
    return folder


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The parameters of a model's folder, by name."""
    return parameters(load_model(folder, dtype="float32", linear_impl="xla"))


def parameters(model: LoadedModel) -> dict[str, np.ndarray]:
    """The parameters of a loaded model, by name."""
    return {name: np.asarray(x) for name, x in named(model.model.params).items()}

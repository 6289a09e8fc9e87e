"""What tests of engines share: a model for what is around the model, and Ctrl-C as at a terminal.

The model of one layer is compiled faster than `tiny`. It is not for tests of what the cache holds: keys and values of
the first layer depend on their token and its place alone, so a block of another context would do as well.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedjax import load_model
from pagedjax.weights.pretrained import LoadedModel
from tests.weights.tiny import tiny_llama


@pytest.fixture(scope="session")
def one_layer_folder(tmp_path_factory) -> Path:
    """The model of `tiny_folder` with one layer."""
    return tiny_llama(tmp_path_factory.mktemp("one_layer") / "llama", layers=1, tied=False)


@pytest.fixture(scope="session")
def one_layer(one_layer_folder) -> LoadedModel:
    """Its parameters are as they are stored, as those of `tiny`."""
    return load_model(one_layer_folder, linear_impl="xla")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As at a terminal: what a shell runs in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

"""PagedJAX: a functional, paged-KV inference engine for research. Importing it is cheap and starts
no backend.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine
    from pagedjax.engine.tap_files import read_taps
    from pagedjax.llm import LLM
    from pagedjax.options.config import EngineConfig
    from pagedjax.options.params import (
        BeamSearchParams,
        LoRARequest,
        PoolingParams,
        SamplingParams,
        StructuredOutputsParams,
        Taps,
    )
    from pagedjax.text.outputs import CompletionOutput, RequestOutput
    from pagedjax.text.pooling import (
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from pagedjax.text.tap_arrays import TapArrays
    from pagedjax.weights.pretrained import from_params, load_model

__version__ = "0.2.0"

_HOME = {
    "LLM": "llm",
    "load_model": "weights.pretrained",
    "from_params": "weights.pretrained",
    "SamplingParams": "options.params",
    "BeamSearchParams": "options.params",
    "StructuredOutputsParams": "options.params",
    "PoolingParams": "options.params",
    "LoRARequest": "options.params",
    "Taps": "options.params",
    "TapArrays": "text.tap_arrays",
    "read_taps": "engine.tap_files",
    "EngineConfig": "options.config",
    "Engine": "engine.engine",
    "RequestOutput": "text.outputs",
    "CompletionOutput": "text.outputs",
    "PoolingRequestOutput": "text.pooling",
    "EmbeddingRequestOutput": "text.pooling",
    "ScoringRequestOutput": "text.pooling",
}
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TapArrays",
    "Taps",
    "from_params",
    "load_model",
    "read_taps",
]


_import_seconds = 0.0  # what the imports of the names above took, with those of JAX and flax


def __getattr__(name: str) -> Any:
    global _import_seconds
    if name not in _HOME:
        raise AttributeError(f"module 'pagedjax' has no attribute {name!r}")
    started = time.perf_counter()
    module = import_module(f"pagedjax.{_HOME[name]}")
    _import_seconds += time.perf_counter() - started
    return getattr(module, name)


def __dir__() -> list[str]:
    """The public names, for completion in a shell: most are imported when they are first used."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]

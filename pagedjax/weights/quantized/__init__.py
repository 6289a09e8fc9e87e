"""Checkpoints of Hugging Face whose config.json has a `quantization_config`.

groups.py              a matrix whose inputs share scales in groups: its floats, or its rows in blocks
awq.py                 `awq`
gptq.py                `gptq`, also with act-order
compressed_tensors.py  `compressed-tensors`: packed integers, int8, float8
fp8.py                 `fp8`: float8 by tensor, row or block
mxfp4.py               `mxfp4`: the experts of GPT-OSS
schemes.py             how `convert` rounds matrices, and writes them for compressed-tensors

Several tensors of a file make a matrix. `joined` puts it in their place, under the name that it has
in a checkpoint of floats. So all else reads such a checkpoint as another one.

Another method is a module here with two functions, and its name in METHODS:

    check(config)              raises ValueError for what is not supported
    matrices(config, tensors)  gives a `Quantized` for each matrix
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pagedjax.weights.checkpoint import Tensor
from pagedjax.weights.quantized.groups import as_tensor

# quant_method -> module
METHODS = {
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "mxfp4": "mxfp4",
}


def _module(config: Mapping[str, Any]) -> Any:
    return import_module(f"{__name__}.{METHODS[config['quant_method']]}")


def check(config: Any, source: Any) -> None:
    """Raises ValueError, which begins with `source`, for a quantization that is not read."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{source}: quantization_config is {config!r:.40}; it must be an object")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"{source}: quant_method is {method!r}; supported: {', '.join(METHODS)}; use the "
            "unquantised model or a GGUF file"
        )
    try:
        _module(config).check(config)
    except ValueError as error:
        raise ValueError(
            f"{source}: {method}: {error}; use the unquantised model or a GGUF file"
        ) from error


def joined(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with a matrix [out, in] in the place of those that make it.

    Args:
        config: the `quantization_config`, which `check` has accepted.

    Raises:
        ValueError: a tensor is missing, or has another shape or dtype; names it and its file.
    """
    result = dict(tensors)
    for matrix in _module(config).matrices(config, tensors):
        for name in matrix.sources:
            result.pop(name, None)
        result[matrix.name] = as_tensor(matrix, config["quant_method"])
    return result


def zero_biases(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """The names of biases that are zero and are beside a quantized matrix. Some programs write one
    for every matrix, so a model need not have them.
    """
    names = [name.removesuffix(".weight") + ".bias" for name, x in tensors.items() if x.rows]
    return frozenset(name for name in names if name in tensors and not tensors[name].read().any())

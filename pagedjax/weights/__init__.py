"""Weights on disk: open a checkpoint, read its tensors, make them a model's parameters.

    checkpoint = open_checkpoint("smollm2-135m")
    params = load_params(checkpoint, table, "float32")

The table is the model's: which tensors make which parameter.
"""

from pagedjax.weights.checkpoint import Checkpoint, Tensor, open_checkpoint
from pagedjax.weights.load import ParamSource, load_params

__all__ = ["Checkpoint", "ParamSource", "Tensor", "load_params", "open_checkpoint"]

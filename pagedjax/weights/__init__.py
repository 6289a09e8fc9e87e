"""Weights on disk: open a checkpoint, read its tensors, make them a model's parameters; and the way back.

checkpoint = open_checkpoint("smollm2-135m")               # locate.py: headers only, no jax
model = pretrained.read_model(checkpoint, "float32")       # load.py, by the table of the model's family
"""

from pagedjax.weights.checkpoint import Checkpoint, Tensor
from pagedjax.weights.locate import open_checkpoint

__all__ = ["Checkpoint", "Tensor", "open_checkpoint"]

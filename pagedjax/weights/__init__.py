"""Weights on disk: open a checkpoint, read its tensors into a model's parameters, and write
checkpoints.

checkpoint = open_checkpoint("smollm2-135m")             # locate.py: headers only, no jax
model = pretrained.read_model(checkpoint, "float32")     # load.py, with the table of the family
"""

from pagedjax.weights.checkpoint import Checkpoint, Tensor
from pagedjax.weights.locate import open_checkpoint

__all__ = ["Checkpoint", "Tensor", "open_checkpoint"]

"""Models without an engine, under their public name: the decoder, log-probabilities of whole
sequences, factors of adapters, and families.

A model that no built-in family reads has a `Family` of your own (docs/design/models.md).
"""

from pagedjax.device.layers import Linear
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import Block, Decoder, DecoderConfig, LayerHeads, LayerKind
from pagedjax.device.models.latent import Latent
from pagedjax.device.models.mixers.mixer import (
    Kept,
    Mixer,
    MixerCost,
    MixerLayer,
    row_of_tokens,
)
from pagedjax.device.models.mlp import ClampedGates, Experts, Groups
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.rope import Rope
from pagedjax.device.score import score
from pagedjax.weights.adapter_files import adapter_parts, initial_factors
from pagedjax.weights.architectures import Architecture, Family
from pagedjax.weights.families import built_in

__all__ = [
    "Architecture",
    "Block",
    "ClampedGates",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "Family",
    "Groups",
    "Kept",
    "Latent",
    "LayerHeads",
    "LayerKind",
    "Linear",
    "Mixer",
    "MixerCost",
    "MixerLayer",
    "Model",
    "ParamSource",
    "Rope",
    "adapter_parts",
    "built_in",
    "initial_factors",
    "row_of_tokens",
    "score",
]

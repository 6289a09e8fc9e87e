"""Qwen3-Next: the layers of Qwen3.5 and experts, with other tensors in its files. They have the
rows of one key head after those of another.
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.llama import is_sparse, qwen_experts
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.param_table import ParamSource
from pagedjax.device.models.qwen3_5 import hybrid, hybrid_table, inner_source


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    """From the keys of a Hugging Face config.json, with the defaults of the architecture.

    Raises:
        ValueError: a key has a value that is not supported.
    """
    layers = range(config["num_hidden_layers"])
    sparse = [layer for layer in layers if is_sparse(config, layer)]
    experts = qwen_experts(config, has_shared=True) if sparse else None
    return hybrid(config, experts, sparse)


def param_table(c: DecoderConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    return hybrid_table(c, _inner)


def _inner(c: DecoderConfig, layer: int, mixer: GatedDelta) -> ParamSource:
    """The joined product of a mixer, whose rows are by key head in a file: query, key, values and z
    of a head in one tensor; b and a in another.
    """
    heads = range(mixer.key_heads)
    heads_of_key = mixer.heads // mixer.key_heads
    of_values = heads_of_key * mixer.value_dim
    sizes = mixer.key_dim, mixer.key_dim, of_values, of_values  # of a key head
    first_gate = sum(mixer.parts[:2])
    order: list[int] = []
    for part, size in enumerate(sizes):
        starts = [head * sum(sizes) + sum(sizes[:part]) for head in heads]
        order += [start + row for start in starts for row in range(size)]
    for part in range(2):
        starts = [first_gate + (2 * head + part) * heads_of_key for head in heads]
        order += [start + row for start in starts for row in range(heads_of_key)]
    return inner_source(
        c,
        layer,
        mixer,
        ("in_proj_qkvz", "in_proj_ba"),
        rows=(first_gate, sum(mixer.parts[2:])),
        order=tuple(order),
    )

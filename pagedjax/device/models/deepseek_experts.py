"""Mixtures of experts as DeepSeek's configs describe them, for all families that have them: a
correction and groups in the router, shared experts, and dense layers before those with experts
(DeepSeek V2, arXiv 2405.04434; V3, arXiv 2412.19437).
"""

from __future__ import annotations

from typing import Any

from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.llama import experts_table, mlp_table
from pagedjax.device.models.mlp import Experts, Groups
from pagedjax.device.models.param_table import ParamSource


def corrected_experts(config: dict[str, Any]) -> Experts:
    """The experts of DeepSeek V3: sigmoids with corrections, whose groups have the score of their
    best two experts.

    Raises:
        ValueError: the sizes do not fit each other.
    """
    return _experts(config, scores="sigmoid", corrected=True, groups=_groups(config, best=2))


def greedy_experts(config: dict[str, Any]) -> Experts:
    """The experts of DeepSeek V2: a softmax, whose groups have the score of their best expert.

    Raises:
        ValueError: the sizes do not fit each other, or `topk_method` is not supported.
    """
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(
            f"topk_method is {method!r}; it must be 'greedy' or 'group_limited_greedy'"
        )
    return _experts(config, groups=None if method == "greedy" else _groups(config, best=1))


def _experts(config: dict[str, Any], **options: Any) -> Experts:
    width = config["moe_intermediate_size"]
    return Experts(
        count=config["n_routed_experts"],
        chosen=config["num_experts_per_tok"],
        intermediate=width,
        normalised=bool(config["norm_topk_prob"]),
        factor=float(config["routed_scaling_factor"]),
        rounds_scores=False,
        shared=width * (config["n_shared_experts"] or 0),
        **options,
    )


def _groups(config: dict[str, Any], best: int) -> Groups | None:
    """The groups of the router; None if a token may choose any expert."""
    count = config["n_group"] or 1
    chosen = config["topk_group"] or count
    return None if chosen == count else Groups(count, chosen, best)


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer has experts."""
    every = config.get("moe_layer_freq", 1)
    return layer >= config["first_k_dense_replace"] and layer % every == 0


def moe_table(c: DecoderConfig, layer: int) -> list[ParamSource]:
    """The parameters of the layer's MLP, dense or sparse."""
    if not c.kinds[layer].sparse:
        return mlp_table(c, layer)
    assert c.experts is not None
    e = c.experts
    prefix = f"model.layers.{layer}.mlp."
    path = ("blocks", str(layer), "mlp")
    table = experts_table(c, layer, prefix)
    if e.corrected:
        name = f"{prefix}gate.e_score_correction_bias"
        table.append(ParamSource((*path, "router", "correction"), (name,), (e.count,)))
    return table

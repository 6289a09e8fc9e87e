"""Families against a forward pass in numpy, in float64 and without a cache: by default, without
torch. Their tests against transformers are in test_model_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.special import erf

from pagedjax import load_model
from tests.device.test_llama import CHUNKED, PROMPTS, all_logits
from tests.weights.tiny_families import write_family

pytestmark = pytest.mark.few_optimisations

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
HEADS = 4
D = 16
ORIGINAL = 32
FACTOR = 8
NEOX = COMMON | {"model_type": "gpt_neox", "rotary_pct": 0.25}
OLMO = COMMON | {
    "model_type": "olmo3",
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": ORIGINAL,
    },
}
GLM = COMMON | {
    "model_type": "glm4",
    "num_key_value_heads": 2,
    "head_dim": D,
    "rms_norm_eps": 1e-5,
}
GRANITE = COMMON | {
    "model_type": "granite",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
    "tie_word_embeddings": True,
}
GLM_MOE = COMMON | {
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "head_dim": D,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": True,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
GPT_OSS = COMMON | {
    "model_type": "gpt_oss",
    "num_key_value_heads": 2,
    "head_dim": D,
    "intermediate_size": 24,
    "sliding_window": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.5,
    "rope_theta": 500000.0,
    "rope_scaling": OLMO["rope_scaling"] | {"truncate": False},
}
QWEN3_NEXT = COMMON | {
    "model_type": "qwen3_next",
    "num_key_value_heads": 2,
    "head_dim": D,
    "rms_norm_eps": 1e-5,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
WIDE = 32  # numbers of a head of Gemma 4 that sees all tokens
GEMMA_4 = COMMON | {
    "model_type": "gemma4_text",
    "num_key_value_heads": 2,
    "head_dim": D,
    "num_global_key_value_heads": 1,
    "global_head_dim": WIDE,
    "attention_k_eq_v": True,
    "sliding_window": 16,
    "rms_norm_eps": 1e-5,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
}
Weights = Mapping[str, np.ndarray]


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def layer_norm(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def turned(x: np.ndarray, frequencies: np.ndarray, *, neighbours: bool, factor: float = 1.0):
    """x [T, N, D] with the first 2 len(frequencies) numbers of heads rotated, as complex numbers."""
    rotated = 2 * len(frequencies)
    first = slice(0, rotated, 2) if neighbours else slice(0, rotated // 2)
    second = slice(1, rotated, 2) if neighbours else slice(rotated // 2, rotated)
    angles = np.arange(len(x))[:, None, None] * frequencies
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles) * factor
    result = x.copy()
    result[..., first] = z.real
    result[..., second] = z.imag
    return result


def attended(
    q, k, v, *, scale: float = D**-0.5, window: int | None = None, sinks: np.ndarray | None = None
) -> np.ndarray:
    """q [T, N, D], k and v [T, K, D] -> [T, N D]. sinks: [N], scores without a value."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = scale * np.einsum("tnd,snd->nts", q, k)
    distance = np.arange(len(q))[:, None] - np.arange(len(q))
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[:, None, None] - scores.max(-1, keepdims=True))
    weights /= total
    return np.einsum("nts,snd->tnd", weights, v).reshape(len(q), -1)


def neox_logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
    x = w["gpt_neox.embed_in.weight"][tokens]
    turn = partial(turned, frequencies=1e4 ** (-np.arange(0, 4, 2) / 4), neighbours=False)
    for i in range(2):
        layer = f"gpt_neox.layers.{i}"

        def product(y: np.ndarray, name: str, layer: str = layer) -> np.ndarray:
            return y @ w[f"{layer}.{name}.weight"].T + w[f"{layer}.{name}.bias"]

        qkv = product(layer_norm(x, w, f"{layer}.input_layernorm"), "attention.query_key_value")
        q, k, v = np.moveaxis(qkv.reshape(len(x), HEADS, 3, D), 2, 0)
        attention = product(attended(turn(q), turn(k), v), "attention.dense")
        up = product(layer_norm(x, w, f"{layer}.post_attention_layernorm"), "mlp.dense_h_to_4h")
        up = up * (1 + erf(up / np.sqrt(2))) / 2
        x = x + attention + product(up, "mlp.dense_4h_to_h")
    return layer_norm(x, w, "gpt_neox.final_layer_norm") @ w["embed_out.weight"].T


def yarn(truncates: bool = True) -> tuple[np.ndarray, float]:
    """(frequencies, temperature) by the formulas of Peng et al. 2023, with the bounds 32 and 1."""
    plain = 500000.0 ** (-np.arange(0, D, 2) / D)

    def pair(turns: float) -> float:
        return D * np.log(ORIGINAL / (turns * 2 * np.pi)) / (2 * np.log(500000.0))

    low = max(np.floor(pair(32)) if truncates else pair(32), 0)
    high = min(np.ceil(pair(1)) if truncates else pair(1), D - 1)
    ramp = np.clip((np.arange(D // 2) - low) / (high - low), 0, 1)
    return plain / FACTOR * ramp + plain * (1 - ramp), 0.1 * np.log(FACTOR) + 1


def olmo_logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
    x = w["model.embed_tokens.weight"][tokens]
    plain = 500000.0 ** (-np.arange(0, D, 2) / D), 1.0
    for i, (window, (frequencies, factor)) in enumerate([(16, plain), (None, yarn())]):
        layer = {n.removeprefix(f"model.layers.{i}."): y for n, y in w.items()}
        turn = partial(turned, frequencies=frequencies, neighbours=False, factor=factor)
        q, k, v = (x @ layer[f"self_attn.{part}_proj.weight"].T for part in "qkv")
        q = rms_norm(q, layer["self_attn.q_norm.weight"]).reshape(len(x), -1, D)
        k = rms_norm(k, layer["self_attn.k_norm.weight"]).reshape(len(x), -1, D)
        y = attended(turn(q), turn(k), v.reshape(len(x), -1, D), window=window)
        y = y @ layer["self_attn.o_proj.weight"].T
        x = x + rms_norm(y, layer["post_attention_layernorm.weight"])
        gate, up = (x @ layer[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        y = (silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        x = x + rms_norm(y, layer["post_feedforward_layernorm.weight"])
    return rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def glm_logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
    x = w["model.embed_tokens.weight"][tokens]
    turn = partial(turned, frequencies=1e4 ** (-np.arange(0, 8, 2) / 8), neighbours=True)
    for i in range(2):
        layer = {n.removeprefix(f"model.layers.{i}."): y for n, y in w.items()}
        y = rms_norm(x, layer["input_layernorm.weight"])
        q, k, v = (
            (
                y @ layer[f"self_attn.{part}_proj.weight"].T + layer[f"self_attn.{part}_proj.bias"]
            ).reshape(len(x), -1, D)
            for part in "qkv"
        )
        y = attended(turn(q), turn(k), v) @ layer["self_attn.o_proj.weight"].T
        x = x + rms_norm(y, layer["post_self_attn_layernorm.weight"])
        y = rms_norm(x, layer["post_attention_layernorm.weight"])
        gate, up = np.split(y @ layer["mlp.gate_up_proj.weight"].T, 2, axis=-1)
        y = (silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        x = x + rms_norm(y, layer["post_mlp_layernorm.weight"])
    return rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def granite_logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
    x = 3.0 * w["model.embed_tokens.weight"][tokens]
    turn = partial(turned, frequencies=1e4 ** (-np.arange(0, D, 2) / D), neighbours=False)
    for i in range(2):
        layer = {n.removeprefix(f"model.layers.{i}."): y for n, y in w.items()}
        y = rms_norm(x, layer["input_layernorm.weight"])
        q, k, v = (
            (y @ layer[f"self_attn.{part}_proj.weight"].T).reshape(len(x), -1, D) for part in "qkv"
        )
        y = attended(turn(q), turn(k), v, scale=0.1)
        x = x + 0.6 * (y @ layer["self_attn.o_proj.weight"].T)
        y = rms_norm(x, layer["post_attention_layernorm.weight"])
        gate, up = (y @ layer[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + 0.6 * ((silu(gate) * up) @ layer["mlp.down_proj.weight"].T)
    return rms_norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T / 3.0


def glm_moe_logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
    """The first layer is dense. Of three groups of two experts, each token uses two."""
    x = w["model.embed_tokens.weight"][tokens]
    turn = partial(turned, frequencies=1e4 ** (-np.arange(0, 8, 2) / 8), neighbours=False)
    for i in range(2):
        layer = {n.removeprefix(f"model.layers.{i}."): y for n, y in w.items()}
        y = rms_norm(x, layer["input_layernorm.weight"])
        q, k, v = (
            (y @ layer[f"self_attn.{part}_proj.weight"].T).reshape(len(x), -1, D) for part in "qkv"
        )
        q = turn(rms_norm(q, layer["self_attn.q_norm.weight"]))
        k = turn(rms_norm(k, layer["self_attn.k_norm.weight"]))
        x = x + attended(q, k, v) @ layer["self_attn.o_proj.weight"].T
        y = rms_norm(x, layer["post_attention_layernorm.weight"])

        def mlp(y: np.ndarray, name: str, layer: Weights = layer) -> np.ndarray:
            gate, up = (y @ layer[f"mlp.{name}{part}_proj.weight"].T for part in ("gate", "up"))
            return (silu(gate) * up) @ layer[f"mlp.{name}down_proj.weight"].T

        if i == 0:
            x = x + mlp(y, "")
            continue
        result = mlp(y, "shared_experts.")
        scores = 1 / (1 + np.exp(-y @ layer["mlp.gate.weight"].T))
        corrected = scores + layer["mlp.gate.e_score_correction_bias"]
        for token, row in enumerate(corrected):
            groups = np.argsort(-row.reshape(3, 2).sum(-1))[:2]
            allowed = [2 * group + member for group in groups for member in range(2)]
            chosen = sorted(allowed, key=lambda expert, row=row: -row[expert])[:2]
            for expert in chosen:
                share = 1.5 * scores[token, expert] / scores[token, chosen].sum()
                result[token] += share * mlp(y[token], f"experts.{expert}.")
        x = x + result
    return rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def gpt_oss_logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
    x = w["model.embed_tokens.weight"][tokens]
    frequencies, factor = yarn(truncates=False)
    turn = partial(turned, frequencies=frequencies, neighbours=False, factor=factor)
    for i, window in enumerate([16, None]):
        layer = {n.removeprefix(f"model.layers.{i}."): y for n, y in w.items()}

        def product(y: np.ndarray, name: str, layer: Weights = layer) -> np.ndarray:
            return y @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]

        y = rms_norm(x, layer["input_layernorm.weight"])
        q, k, v = (product(y, f"self_attn.{part}_proj").reshape(len(x), -1, D) for part in "qkv")
        y = attended(turn(q), turn(k), v, window=window, sinks=layer["self_attn.sinks"])
        x = x + product(y, "self_attn.o_proj")
        y = rms_norm(x, layer["post_attention_layernorm.weight"])
        result = np.zeros_like(y)
        for token, row in enumerate(product(y, "mlp.router")):
            chosen = np.argsort(-row)[:2]
            shares = np.exp(row[chosen]) / np.exp(row[chosen]).sum()
            for expert, share in zip(chosen, shares, strict=True):
                up, down = (
                    layer[f"mlp.experts.{name}_proj"][expert] for name in ("gate_up", "down")
                )
                products = y[token] @ up + layer["mlp.experts.gate_up_proj_bias"][expert]
                gate = np.minimum(products[::2], 1.5)
                gate = gate / (1 + np.exp(-1.702 * gate))
                inner = (np.clip(products[1::2], -1.5, 1.5) + 1) * gate
                result[token] += share * (
                    inner @ down + layer["mlp.experts.down_proj_bias"][expert]
                )
        x = x + result
    return rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def gemma_4_logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
    """The second layer has wider heads and one key head, whose product gives values too."""
    x = 8.0 * w["model.embed_tokens.weight"][tokens]
    narrow = 1e4 ** (-np.arange(0, D, 2) / D)
    wide = 1e6 ** (-np.arange(0, WIDE, 2) / WIDE) * (np.arange(WIDE // 2) < 4)
    for i, (window, size, frequencies) in enumerate([(16, D, narrow), (None, WIDE, wide)]):
        layer = {n.removeprefix(f"model.layers.{i}."): y for n, y in w.items()}
        turn = partial(turned, frequencies=frequencies, neighbours=False)
        y = rms_norm(x, layer["input_layernorm.weight"])
        q, k, v = (
            (y @ layer[f"self_attn.{part}_proj.weight"].T).reshape(len(x), -1, size)
            for part in ("qkv" if i == 0 else "qkk")
        )
        q = turn(rms_norm(q, layer["self_attn.q_norm.weight"]))
        k = turn(rms_norm(k, layer["self_attn.k_norm.weight"]))
        y = attended(q, k, rms_norm(v, np.ones(size)), scale=1.0, window=window)
        y = y @ layer["self_attn.o_proj.weight"].T
        x = x + rms_norm(y, layer["post_attention_layernorm.weight"])
        y = rms_norm(x, layer["pre_feedforward_layernorm.weight"])
        gate, up = (y @ layer[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        y = (gelu * up) @ layer["mlp.down_proj.weight"].T
        x = x + rms_norm(y, layer["post_feedforward_layernorm.weight"])
        x = x * layer["layer_scalar"]
    logits = rms_norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T
    return 20.0 * np.tanh(logits / 20.0)


def unit(x: np.ndarray) -> np.ndarray:
    """x divided by its length."""
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def delta_rule(layer: Weights, y: np.ndarray) -> np.ndarray:
    """y [T, H] through a mixer of Qwen3-Next, token by token. Each of 2 key heads has 3 heads."""
    tokens = len(y)
    by_key = (y @ layer["linear_attn.in_proj_qkvz.weight"].T).reshape(tokens, 2, -1)
    q, k, v, z = np.split(by_key, [12, 24, 24 + 60], axis=-1)
    gates = (y @ layer["linear_attn.in_proj_ba.weight"].T).reshape(tokens, 2, 6)
    rate, step = (part.reshape(tokens, 6) for part in np.split(gates, 2, axis=-1))
    inputs = np.concatenate([part.reshape(tokens, -1) for part in (q, k, v)], axis=1)
    padded = np.pad(inputs, ((2, 0), (0, 0)))
    weight = layer["linear_attn.conv1d.weight"][:, 0]
    mixed = silu(sum(padded[i : i + tokens] * weight[:, i] for i in range(3)))
    q, k, v = np.split(mixed, [24, 48], axis=1)
    q, k = (np.repeat(unit(part.reshape(tokens, 2, 12)), 3, axis=1) for part in (q, k))
    v = v.reshape(tokens, 6, 20)
    decay = np.exp(layer["linear_attn.A_log"]) * np.logaddexp(
        0, step + layer["linear_attn.dt_bias"]
    )
    state = np.zeros((6, 12, 20))
    outputs = np.zeros((tokens, 6, 20))
    for t in range(tokens):
        state *= np.exp(-decay[t])[:, None, None]
        missing = v[t] - np.einsum("ne,ned->nd", k[t], state)
        update = missing / (1 + np.exp(-rate[t]))[:, None]
        state += k[t][:, :, None] * update[:, None, :]
        outputs[t] = np.einsum("ne,ned->nd", q[t], state) / np.sqrt(12)
    outputs = rms_norm(outputs, layer["linear_attn.norm.weight"]) * silu(z.reshape(tokens, 6, 20))
    return outputs.reshape(tokens, -1) @ layer["linear_attn.out_proj.weight"].T


def qwen3_next_logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
    x = w["model.embed_tokens.weight"][tokens]
    turn = partial(turned, frequencies=1e4 ** (-np.arange(0, 4, 2) / 4), neighbours=False)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return rms_norm(x, 1 + weight)

    for i in range(2):
        layer = {n.removeprefix(f"model.layers.{i}."): y for n, y in w.items()}
        y = norm(x, layer["input_layernorm.weight"])
        if i == 0:
            x = x + delta_rule(layer, y)
        else:
            products = (y @ layer["self_attn.q_proj.weight"].T).reshape(len(x), HEADS, 2 * D)
            k, v = (
                (y @ layer[f"self_attn.{part}_proj.weight"].T).reshape(len(x), -1, D)
                for part in "kv"
            )
            q = turn(norm(products[..., :D], layer["self_attn.q_norm.weight"]))
            k = turn(norm(k, layer["self_attn.k_norm.weight"]))
            gate = 1 / (1 + np.exp(-products[..., D:].reshape(len(x), -1)))
            x = x + (attended(q, k, v) * gate) @ layer["self_attn.o_proj.weight"].T
        y = norm(x, layer["post_attention_layernorm.weight"])

        def mlp(y: np.ndarray, name: str, layer: Weights = layer) -> np.ndarray:
            gate, up = (y @ layer[f"mlp.{name}.{part}_proj.weight"].T for part in ("gate", "up"))
            return (silu(gate) * up) @ layer[f"mlp.{name}.down_proj.weight"].T

        shared = 1 / (1 + np.exp(-y @ layer["mlp.shared_expert_gate.weight"].T))
        result = shared * mlp(y, "shared_expert")
        for token, row in enumerate(y @ layer["mlp.gate.weight"].T):
            chosen = np.argsort(-row)[:2]
            shares = np.exp(row[chosen]) / np.exp(row[chosen]).sum()
            for expert, share in zip(chosen, shares, strict=True):
                result[token] += share * mlp(y[token], f"experts.{expert}")
        x = x + result
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


FORWARD: dict[str, tuple[dict[str, Any], Callable[[Weights, np.ndarray], np.ndarray]]] = {
    "GPT-NeoX": (NEOX, neox_logits),
    "OLMo 3": (OLMO, olmo_logits),
    "GLM-4": (GLM, glm_logits),
    "Granite 3": (GRANITE, granite_logits),
    "GLM-4.5": (GLM_MOE, glm_moe_logits),
    "GPT-OSS": (GPT_OSS, gpt_oss_logits),
    "Gemma 4": (GEMMA_4, gemma_4_logits),
    "Qwen3-Next": (QWEN3_NEXT, qwen3_next_logits),
}


@pytest.mark.default_cases("GPT-NeoX", "GPT-OSS", "Gemma 4", "Qwen3-Next")
@pytest.mark.parametrize("name", FORWARD)
def test_ragged_chunks_give_the_logits_of_a_plain_forward_pass(name, tmp_path):
    config, forward = FORWARD[name]
    folder = write_family(tmp_path / "model", config)
    tensors = load_file(folder / "model.safetensors")
    weights = {key: x.astype(np.float64) for key, x in tensors.items()}
    model = load_model(folder, linear_impl="xla").model
    for got, prompt in zip(all_logits(model, CHUNKED), PROMPTS, strict=True):
        expected = forward(weights, prompt)
        assert np.ptp(expected) > 1, "the logits hardly differ: the comparison is blind"
        chex.assert_trees_all_close(got, expected.astype(np.float32), atol=2e-4, rtol=0)

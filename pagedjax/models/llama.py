"""The Llama family: grouped-query attention, rotary positions, RMSNorm, SwiGLU. SmolLM2, TinyLlama, Llama 2 and 3
are configurations of this file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from pagedjax import cache as kv
from pagedjax.attention import Attend
from pagedjax.batch import Batch
from pagedjax.layers import Buffer, Linear, RMSNorm, rope, rope_frequencies
from pagedjax.weights.load import ParamSource


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a model. hidden = H, intermediate = F; letters otherwise as in pagedjax/types.py."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, Any], ...] | None
    max_len: int
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def frequencies(self) -> list[float]:
        return rope_frequencies(self.head_dim, self.rope_theta, dict(self.rope_scaling) if self.rope_scaling else None)


def from_hf(config: dict[str, Any]) -> LlamaConfig:
    """From the keys of a Hugging Face config.json.

    Raises:
        ValueError: a key this file cannot honour, or a required key that is missing.
    """
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        act = config.get("hidden_act", "silu")
        if act != "silu":
            raise ValueError(f"hidden_act is {act!r}; the Llama family uses 'silu'")
        if config.get("mlp_bias"):
            raise ValueError("mlp_bias is true; the Llama family here has no bias in its MLP")
        scaling = config.get("rope_scaling")
        bias = bool(config.get("attention_bias", False))
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        return LlamaConfig(
            vocab_size=config["vocab_size"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.get("head_dim") or hidden // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=config.get("rope_theta", 10000.0),
            rope_scaling=_frozen(scaling) if scaling else None,
            max_len=config.get("max_position_embeddings", 2048),
            tied=config.get("tie_word_embeddings", False),
            qkv_bias=bool(config.get("qkv_bias", bias)),
            out_bias=bias,
        )
    except KeyError as missing:
        raise ValueError(f"the model's configuration has no {missing}; it is needed to build a Llama") from None


def _frozen(scaling: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in scaling.items()))


class Attention(nnx.Module):
    def __init__(self, c: LlamaConfig, dtype: str):
        self.qkv = Linear(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_dim, bias=c.qkv_bias, dtype=dtype)
        self.out = Linear(c.heads * c.head_dim, c.hidden, bias=c.out_bias, dtype=dtype)
        self.config = c

    def __call__(self, x, k_pages, v_pages, batch: Batch, angles, attend: Attend):
        """x [H, T] -> (y [H, T], k_pages, v_pages)."""
        c, t = self.config, x.shape[1]
        heads = self.qkv(x).reshape(c.heads + 2 * c.kv_heads, c.head_dim, t)
        q, k, v = heads[: c.heads], heads[c.heads : c.heads + c.kv_heads], heads[c.heads + c.kv_heads :]
        q, k, v = (a.transpose(2, 0, 1) for a in (rope(q, angles), rope(k, angles), v))
        k_pages, v_pages = kv.write(k_pages, v_pages, k, v, batch.slots)
        y = attend(q, k_pages, v_pages, batch.block_tables, batch.seq_lens, batch.cu_q_lens)
        return self.out(jax.lax.optimization_barrier(y.reshape(t, -1).T)), k_pages, v_pages


class MLP(nnx.Module):
    def __init__(self, c: LlamaConfig, dtype: str):
        self.gate_up = Linear(c.hidden, 2 * c.intermediate, dtype=dtype)
        self.down = Linear(c.intermediate, c.hidden, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        half = self.down.weight.shape[1]
        y = self.gate_up(x)
        return self.down(jax.nn.silu(y[:half]) * y[half:])


class Block(nnx.Module):
    def __init__(self, c: LlamaConfig, dtype: str):
        self.attn_norm = RMSNorm(c.hidden, eps=c.eps, dtype=dtype)
        self.attn = Attention(c, dtype)
        self.mlp_norm = RMSNorm(c.hidden, eps=c.eps, dtype=dtype)
        self.mlp = MLP(c, dtype)

    def __call__(self, x, k_pages, v_pages, batch: Batch, angles, attend: Attend):
        """x [H, T] -> (x [H, T], k_pages, v_pages)."""
        y, k_pages, v_pages = self.attn(self.attn_norm(x), k_pages, v_pages, batch, angles, attend)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), k_pages, v_pages


@partial(jax.jit, static_argnums=(0, 2))
def _run_block(graphdef: nnx.GraphDef, state, attend: Attend, *args):
    """A block as a function of arrays: blocks are alike, so JAX traces and lowers one of them; XLA inlines them all."""
    return nnx.merge(graphdef, state)(*args, attend)


class Llama(nnx.Module):
    """hidden(batch) and logits(hidden): two calls, because only rows that sample need logits."""

    def __init__(self, c: LlamaConfig, dtype: str):
        self.embed = nnx.Param(jax.numpy.zeros((c.vocab_size, c.hidden), dtype))
        self.blocks = nnx.List([Block(c, dtype) for _ in range(c.layers)])
        self.norm = RMSNorm(c.hidden, eps=c.eps, dtype=dtype)
        self.angles = Buffer(jax.numpy.zeros((2, c.head_dim // 2, c.max_len)))  # rope_table(c.frequencies, c.max_len)
        self.head = None if c.tied else Linear(c.hidden, c.vocab_size, dtype=dtype)
        self.config = c

    def hidden(self, cache: kv.KVCache, batch: Batch, attend: Attend) -> tuple[kv.KVCache, jax.Array]:
        """Run the T tokens of the batch -> (cache, [H, T] after the final norm)."""
        x = self.embed[...][batch.tokens].T
        angles = self.angles[...].at[:, :, batch.positions].get(mode="promise_in_bounds")
        k_all, v_all = [], []
        for block, k_pages, v_pages in zip(self.blocks, cache.k, cache.v, strict=True):
            x, k_pages, v_pages = _run_block(*nnx.split(block), attend, x, k_pages, v_pages, batch, angles)
            k_all.append(k_pages)
            v_all.append(v_pages)
        return kv.KVCache(tuple(k_all), tuple(v_all)), self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[H, R] -> [V, R] float32."""
        y = self.embed[...] @ hidden if self.head is None else self.head(hidden)
        return y.astype(jax.numpy.float32)


def param_table(c: LlamaConfig) -> tuple[ParamSource, ...]:
    """Where each parameter comes from: Hugging Face tensor names, fused along the output axis."""
    qkv, q = (c.heads + 2 * c.kv_heads) * c.head_dim, c.heads * c.head_dim

    def source(path: str, names: tuple[str, ...], *shape: int) -> ParamSource:
        return ParamSource(tuple(path.split(".")), names, shape, False)

    table = [source("embed", ("model.embed_tokens.weight",), c.vocab_size, c.hidden)]
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        parts = tuple(f"{theirs}self_attn.{p}_proj" for p in "qkv")
        mlp = tuple(f"{theirs}mlp.{p}_proj.weight" for p in ("gate", "up"))
        table += [
            source(ours + "attn_norm.weight", (theirs + "input_layernorm.weight",), c.hidden),
            source(ours + "attn.qkv.weight", tuple(p + ".weight" for p in parts), qkv, c.hidden),
            source(ours + "attn.out.weight", (theirs + "self_attn.o_proj.weight",), c.hidden, q),
            source(ours + "mlp_norm.weight", (theirs + "post_attention_layernorm.weight",), c.hidden),
            source(ours + "mlp.gate_up.weight", mlp, 2 * c.intermediate, c.hidden),
            source(ours + "mlp.down.weight", (theirs + "mlp.down_proj.weight",), c.hidden, c.intermediate),
        ]
        if c.qkv_bias:
            table.append(source(ours + "attn.qkv.bias", tuple(p + ".bias" for p in parts), qkv))
        if c.out_bias:
            table.append(source(ours + "attn.out.bias", (theirs + "self_attn.o_proj.bias",), c.hidden))
    table.append(source("norm.weight", ("model.norm.weight",), c.hidden))
    if not c.tied:
        table.append(source("head.weight", ("lm_head.weight",), c.vocab_size, c.hidden))
    return tuple(table)

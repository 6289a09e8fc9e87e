"""Products on a CPU by a compiled kernel, over weights that are packed once into panels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.linear.cpu import panels
from pallas_kernels.shared.cpu.handler import Handler

TARGET = "pallas_kernels.linear.cpu.1"
HANDLER = Handler("linear", TARGET, __package__ or "", Path(__file__).parent)
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2}
TILE, LANES = 12, 16

def linear(x, weight, *, rows, shape, scales=None, bias=None, norm=None, activation=None, residual=None, sizes=None, dtype=None):
    HANDLER.register()
    t, k = x.shape
    first, last = rows
    none = jnp.zeros(0, jnp.float32)
    width = last - first if activation is None else shape[0] // 2
    options = jnp.array([shape[0], first, last, ACTIVATIONS[activation], 0 if norm is None else 1 + norm[2]], jnp.int32)
    eps = jnp.full(1, 0 if norm is None else norm[1], jnp.float32)
    matrices = 1 if sizes is None else len(sizes)
    tile = 4 * (TILE * (-(-k // LANES) * LANES) + 2 * LANES)
    tiles = -(-t // 6) + matrices
    out = jax.ShapeDtypeStruct((t, width), dtype or x.dtype), jax.ShapeDtypeStruct((tiles * tile,), jnp.uint8)
    operands = [x, weight, scales, bias, None if norm is None else norm[0], residual]
    operands = [none if a is None else a for a in operands]
    operands += [jnp.zeros(0, jnp.int32) if sizes is None else sizes, options, eps]
    return jax.ffi.ffi_call(TARGET, out)(*operands)[0]

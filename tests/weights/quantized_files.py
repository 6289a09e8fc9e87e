"""Tiny random Llamas in the layouts of quantized checkpoints, written by hand from the published
layouts, and beside each the plain checkpoint of the same weights.

Every writer draws numbers, scales and zero points first; the plain weights follow from these in
float64, and never from packed words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.weights.tiny import tiny_llama
from tests.weights.tiny_families import write_family

Arrays = dict[str, np.ndarray]
Writer = Callable[[np.random.Generator, np.ndarray], tuple[Arrays, np.ndarray]]


class Layout(NamedTuple):
    """A layout of quantized checkpoints.

    config: the `quantization_config`.
    write: (rng, weight [out, in]) -> (the tensors of a module by their suffix, the weights that
        they mean, float64).
    """

    config: dict[str, Any]
    write: Writer


def words_of(numbers: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """int32 words of unsigned numbers, one after the other from the lowest bits, in a loop."""
    numbers = np.moveaxis(numbers, axis, -1).astype(np.int64)
    count = 32 // bits
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // count), np.int64)
    for place in range(count):
        words |= numbers[..., place::count] << (bits * place)
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def quantized(rng: np.random.Generator, weight: np.ndarray, bits: int, group: int, *, zero: bool):
    """Numbers q [out, in] from 0, zero points [out, groups] and float16 scales [out, groups]."""
    cells = weight.reshape(len(weight), -1, group)
    scales = (np.abs(cells).max(-1) / 2 ** (bits - 1)).astype(np.float16)
    middle = 2 ** (bits - 1)
    zeros = np.full(scales.shape, middle)
    if zero:
        zeros = np.clip(middle + rng.integers(-3, 4, scales.shape), 1, 2**bits - 1)
    q = np.rint(cells / scales[..., None].astype(np.float64)) + zeros[..., None]
    return np.clip(q, 0, 2**bits - 1).astype(np.int64).reshape(weight.shape), zeros, scales


def meant(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, index: np.ndarray) -> np.ndarray:
    """scale * (q - zero) in float64. index: the group of each input."""
    return scales.astype(np.float64)[:, index] * (q - zeros[:, index])


def awq(group: int) -> Layout:
    def write(rng: np.random.Generator, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        q, zeros, scales = quantized(rng, weight, 4, group, zero=True)
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # of the outputs in a word, as AutoAWQ's `order_map`

        def packed(numbers: np.ndarray) -> np.ndarray:
            columns = numbers.reshape(len(numbers), -1, 8)[:, :, order]
            return words_of(columns.reshape(len(numbers), -1), 4, 1)

        arrays = {"qweight": packed(q.T), "qzeros": packed(zeros.T), "scales": scales.T.copy()}
        return arrays, meant(q, zeros, scales, np.arange(weight.shape[1]) // group)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Layout(config | {"version": "gemm"}, write)


def gptq(
    bits: int, group: int, *, sym: bool, act_order: bool = False, version: str = "gptq"
) -> Layout:
    """act_order: one order for all matrices with as many inputs, as GPTQ has for those that read the
    same activations.
    """

    def write(rng: np.random.Generator, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        inputs = weight.shape[1]
        index = np.arange(inputs) // group
        if act_order:
            index = np.random.default_rng(inputs).permutation(index)
        order = np.argsort(index, kind="stable")
        q = np.empty(weight.shape, np.int64)
        q[:, order], zeros, scales = quantized(rng, weight[:, order], bits, group, zero=not sym)
        stored_zeros = zeros - (version == "gptq")
        arrays = {
            "qweight": words_of(q.T, bits, 0),
            "qzeros": words_of(stored_zeros.T, bits, 1),
            "scales": scales.T.copy(),
            "g_idx": index.astype(np.int32),
            "bias": np.zeros(len(weight), np.float16),  # as AutoGPTQ writes for all matrices
        }
        return arrays, meant(q, zeros, scales, index)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym}
    return Layout(config | {"desc_act": act_order, "checkpoint_format": version}, write)


def _compressed(weights: dict[str, Any], name: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed(bits: int, group: int, *, symmetric: bool, act_order: bool = False) -> Layout:
    """compressed-tensors' "pack-quantized"."""

    def write(rng: np.random.Generator, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        index = np.arange(weight.shape[1]) // group
        if act_order:
            index = np.random.default_rng(weight.shape[1]).permutation(index)
        order = np.argsort(index, kind="stable")
        q = np.empty(weight.shape, np.int64)
        q[:, order], zeros, scales = quantized(
            rng, weight[:, order], bits, group, zero=not symmetric
        )
        scales = scales.astype(np.float32).astype(ml_dtypes.bfloat16)
        arrays = {
            "weight_packed": words_of(q, bits, 1),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            arrays["weight_zero_point"] = words_of(zeros, bits, 0)
        if act_order:
            arrays["weight_g_idx"] = index.astype(np.int32)
        return arrays, meant(q, zeros, scales, index)

    strategy = {"strategy": "group", "group_size": group, "symmetric": symmetric}
    return Layout(
        _compressed({"num_bits": bits, "type": "int", **strategy}, "pack-quantized"), write
    )


def int8_by_channel() -> Layout:
    def write(rng: np.random.Generator, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
        q = np.rint(weight / scales).astype(np.int8)
        return {"weight": q, "weight_scale": scales}, q * scales.astype(np.float64)

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    return Layout(_compressed(weights, "int-quantized"), write)


def _float8(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return (weight / scales).astype(ml_dtypes.float8_e4m3fn)


def fp8_by_channel() -> Layout:
    def write(rng: np.random.Generator, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
        q = _float8(weight, scales.astype(np.float64) * 1.02)
        arrays = {"weight": q, "weight_scale": scales, "input_scale": np.ones(1, np.float32)}
        return arrays, q.astype(np.float64) * scales.astype(np.float64)

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return Layout(_compressed(weights, "float-quantized"), write)


def fp8_by_tensor() -> Layout:
    def write(rng: np.random.Generator, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        scale = np.array(np.abs(weight).max() / 448, np.float32)
        q = _float8(weight, scale.astype(np.float64))
        arrays = {"weight": q, "weight_scale": scale, "input_scale": np.array(1, np.float32)}
        return arrays, q.astype(np.float64) * np.float64(scale)

    return Layout({"quant_method": "fp8", "activation_scheme": "static"}, write)


def fp8_by_block(rows: int, columns: int, *, powers: bool = False) -> Layout:
    """powers: scales are powers of two, float8_e8m0fnu."""

    def write(rng: np.random.Generator, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
        padded = np.zeros(
            [-(-n // b) * b for n, b in zip(weight.shape, (rows, columns), strict=True)]
        )
        padded[: weight.shape[0], : weight.shape[1]] = weight
        cells = padded.reshape(len(padded) // rows, rows, -1, columns)
        scales = (np.abs(cells).max((1, 3)) / 448).astype(np.float32)
        if powers:
            scales = (2.0 ** np.ceil(np.log2(scales))).astype(ml_dtypes.float8_e8m0fnu)
        scale_of_number = np.repeat(np.repeat(scales, rows, 0), columns, 1)[: weight.shape[0]]
        scale_of_number = scale_of_number[:, : weight.shape[1]].astype(np.float64)
        q = _float8(weight, scale_of_number)
        return {"weight": q, "weight_scale_inv": scales}, q.astype(np.float64) * scale_of_number

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return Layout(config | {"weight_block_size": [rows, columns]}, write)


LAYOUTS = {
    "awq": awq(32),
    "gptq, 4 bits": gptq(4, 64, sym=True),
    "gptq, act-order": gptq(4, 32, sym=False, act_order=True),
    "gptq, 8 bits": gptq(8, 32, sym=False, version="gptq_v2"),
    "gptq, 8 bits, symmetric": gptq(8, 128, sym=True),
    "packed": packed(4, 128, symmetric=True),
    "packed, asymmetric": packed(4, 64, symmetric=False),
    "packed, act-order": packed(4, 32, symmetric=True, act_order=True),
    "packed, 8 bits": packed(8, 128, symmetric=True),
    "int8 by channel": int8_by_channel(),
    "fp8 by channel": fp8_by_channel(),
    "fp8 by tensor": fp8_by_tensor(),
    "fp8 by block": fp8_by_block(128, 128),
    "fp8 by block, powers": fp8_by_block(64, 32, powers=True),
}
SIZES: dict[str, Any] = {
    "layers": 1,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "hidden": 128,
    "intermediate": 256,
    "tied": False,
}


def write_quantized(folder: Path, layout: Layout, **sizes: Any) -> tuple[Path, Path]:
    """Writes a tiny Llama in a layout, and the checkpoint of the weights that it means in float32;
    returns both folders.
    """
    stored = tiny_llama(folder / "stored", **SIZES | sizes)
    plain = tiny_llama(folder / "plain", **SIZES | sizes)
    rng = np.random.default_rng(0)
    tensors: Arrays = {}
    weights: Arrays = {}
    for name, x in load_file(stored / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            arrays, values = layout.write(rng, x.astype(np.float64))
            tensors |= {f"{base}.{suffix}": np.ascontiguousarray(a) for suffix, a in arrays.items()}
            weights[name] = values.astype(np.float32)
        else:
            tensors[name] = x
            weights[name] = x
    save_file(tensors, stored / "model.safetensors")
    save_file(weights, plain / "model.safetensors")
    set_quantization(stored, layout.config)
    return stored, plain


def set_quantization(folder: Path, config: dict[str, Any]) -> None:
    """Gives a checkpoint this `quantization_config`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


def write_mxfp4(folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """A tiny GPT-OSS whose experts are MXFP4, and the checkpoint of their weights in float32; returns
    both folders.
    """
    stored = write_family(folder / "stored", config)
    plain = write_family(folder / "plain", config)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rng = np.random.default_rng(0)
    tensors: Arrays = {}
    weights: Arrays = {}
    for name, x in load_file(stored / "model.safetensors").items():
        tensors[name] = x
        weights[name] = x
        if not name.endswith(("up_proj", "down_proj")):
            continue
        experts, inputs, outputs = x.shape
        digits = rng.integers(0, 16, (experts, outputs, inputs))
        exponents = rng.integers(123, 126, (experts, outputs, inputs // 32))
        del tensors[name]
        tensors[f"{name}_blocks"] = (
            (digits[..., ::2] | digits[..., 1::2] << 4)
            .astype(np.uint8)
            .reshape(experts, outputs, inputs // 32, 16)
        )
        tensors[f"{name}_scales"] = exponents.astype(np.uint8)
        signs = np.where(digits < 8, 1.0, -1.0)
        values = signs * magnitudes[digits & 7] * 2.0 ** np.repeat(exponents - 127.0, 32, axis=2)
        weights[name] = values.swapaxes(1, 2).astype(np.float32)
    save_file(tensors, stored / "model.safetensors")
    save_file({n: np.ascontiguousarray(x) for n, x in weights.items()}, plain / "model.safetensors")
    set_quantization(stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return stored, plain

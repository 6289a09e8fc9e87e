"""Adapters of low rank in PEFT's form, and in Orbax's: reading and writing.

FOLDER/adapter_config.json            PEFT's `LoraConfig`
FOLDER/adapter_model.safetensors      PEFT's tensors: NAME.lora_A.weight [r, in],
                                      NAME.lora_B.weight [out, r]
FOLDER/params/                        or, in their place, the same names and arrays by Orbax
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from pagedjax.device.adapters import Adapter, Part, sizes_of
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.param_table import ParamSource
from pagedjax.options.config import one_of
from pagedjax.weights.architectures import FAMILIES, TEXT_STARTS, renamed_start
from pagedjax.weights.checkpoint import Tensor
from pagedjax.weights.huggingface import read_json, read_safetensors
from pagedjax.weights.safetensors_file import Group, write_file
from pagedjax.weights.tree import nested

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PARAMS = "params"
PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight")
# PEFT's options that change what an adapter computes: those that are supported, and those that must
# be None, False or empty.
OPTIONS = ("lora_alpha", "use_rslora", "alpha_pattern")
UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "use_qalora",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


def read_adapter(folder: str | os.PathLike[str], config: DecoderConfig, name: str) -> Adapter:
    """Read an adapter of a model.

    Raises:
        FileNotFoundError: no such folder, or a file is missing.
        ValueError: an option or a module that is not supported, a damaged file, or factors of
            another model.
    """
    # an unknown user stays as it is; Path.expanduser raises
    path = Path(os.path.expanduser(folder))
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(
            f"{path} has no {CONFIG}; it must be the folder of a LoRA adapter, as PEFT saves it"
        )
    options = read_json(path / CONFIG)
    if options.get("peft_type") != "LORA":
        raise ValueError(
            f"{path / CONFIG}: peft_type is {options.get('peft_type')!r}; 'LORA' is supported"
        )
    _check_options(str(path / CONFIG), options)
    factors = _factors(path, {name: tensor.read() for name, tensor in _tensors(path).items()})
    return adapter_of(factors, options, config, name, source=str(path))


def adapter_of(
    factors: Mapping[str, tuple[Any, Any]],
    options: Mapping[str, Any],
    config: DecoderConfig,
    name: str,
    source: str = "",
) -> Adapter:
    """An adapter for an engine, from arrays. The arguments are those of `adapter_parts`.

    Raises:
        ValueError: as `adapter_parts`; a factor is not finite; or an option that adapters do not
            have. If `source` names a folder, such options are ignored: PEFT writes many.
    """
    if not source:
        if not isinstance(options, Mapping):
            raise ValueError(
                f"options is {options!r:.80}; it must be a mapping, such as {{'lora_alpha': 16}}"
            )
        for option in options:
            one_of(f"an option of adapter {name!r}", option, (*OPTIONS, *UNSUPPORTED, "bias"))
    label = f"{name!r} ({source})" if source else repr(name)
    arrays = jax.device_get(dict(factors))
    parts = adapter_parts(arrays, config, options, label)
    for module, (a, b) in arrays.items():
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ValueError(
                f"adapter {label}: a factor of {module} is not finite; train it again, or load "
                "another state"
            )
    return Adapter(name, parts, content_hash(parts), source)


def initial_factors(
    config: DecoderConfig,
    rank: int = 8,
    *,
    modules: str | Sequence[str] | None = None,
    seed: int | Sequence[int] = 0,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Factors from which the training of an adapter starts. A is random. B is zero, and so is B A.

    Args:
        modules: a kind of matrices, or several, such as ("q_proj", "v_proj"); None: all kinds that
            may have adapters.
        seed: of A, as `numpy.random.default_rng` takes it.

    Returns:
        A [rank, in] and B [out, rank], in float32, by the matrix's name in transformers, such as
        "model.layers.0.self_attn.q_proj". A is normal, of deviation 1 / sqrt(in).

    Raises:
        ValueError: a rank below 1, or a kind of matrices that the model does not have or that has
            no adapters.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank is {rank!r}; it must be an integer of at least 1, such as 8")
    matrices = modules_of(config)
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in matrices))
    if modules is None:
        modules = kinds
    elif isinstance(modules, str):
        modules = [modules]
    if absent := [kind for kind in modules if kind not in kinds]:
        raise ValueError(
            f"modules has {', '.join(map(repr, absent))}; this model has {','.join(kinds)}: use "
            "some of them"
        )
    rng = np.random.default_rng(seed)
    factors = {}
    for name, places in matrices.items():
        if name.rpartition(".")[2] in modules:
            inputs, outputs = _sizes(config, places)
            a = rng.standard_normal((rank, inputs), np.float32) * np.float32(inputs**-0.5)
            factors[name] = a, np.zeros((sum(outputs), rank), np.float32)
    return factors


def adapter_parts(
    factors: Mapping[str, tuple[Any, Any]],
    config: DecoderConfig,
    options: Mapping[str, Any] | None = None,
    name: str = "of arrays",
) -> dict[Part, tuple[Any, Any]]:
    """The parts of an adapter, for `score(adapter=...)`. They are differentiable in the factors.

    Args:
        factors: A [r, in] and B [out, r] by the matrix's name in transformers, as `initial_factors`
            gives them: arrays of numpy or JAX. A name may have the prefix of a model with a head
            ("transformer." of GPT-2).
        options: under the names of PEFT's `LoraConfig`: lora_alpha (8 without it), use_rslora,
            alpha_pattern. The rank is that of the factors. A pattern is matched with the name that
            is given here. None: no options.
        name: of the adapter, for errors.

    Raises:
        ValueError: a matrix that has no adapters here, factors that do not fit it (all of them are
            named), or an option that is not supported.
    """
    options = options or {}
    _check_options(f"adapter {name}", options)
    matrices = modules_of(config)
    orders = row_orders(config)
    parts = {}
    problems = []
    for module, pair in sorted(factors.items()):
        usual_name = _without_prefix(module)
        places = matrices.get(usual_name)
        if places is None:
            problems.append(f"{module}: no such matrix, or it has no adapters here")
        elif places[0] in parts:
            problems.append(f"{module}: its factors are given twice, with and without a prefix")
        elif problem := _pair_problem(pair, *_sizes(config, places)):
            problems.append(f"{module}: {problem}")
        else:
            a, b = pair
            scaled = np.float32(scaling(options, module, len(a))) * b.astype(np.float32)
            if usual_name in orders:
                scaled = scaled[orders[usual_name]]
            parts |= _parts_of(a, scaled, places, _sizes(config, places)[1])
    if problems or not parts:
        kinds = ", ".join(sorted({module.rpartition(".")[2] for module in matrices}))
        lines = "\n  ".join(problems or ["it has no factors"])
        raise ValueError(
            f"adapter {name} does not fit the model; modules may be {kinds}, with names such as "
            f"{next(iter(matrices))}\n  {lines}"
        )
    return parts


def _parts_of(
    a: Any, scaled_b: Any, places: Sequence[Part], outputs: Sequence[int]
) -> dict[Part, tuple[Any, Any]]:
    """The factors of each part of a matrix. outputs: of each part."""
    ends = np.cumsum(outputs).tolist()
    return {
        place: (a.astype(np.float32), scaled_b[first:last])
        for place, first, last in zip(places, (0, *ends), ends, strict=False)
    }


def _pair_problem(pair: Any, inputs: int, outputs: Sequence[int]) -> str | None:
    """Why a value is no pair of factors A [r, inputs], B [sum(outputs), r]; None if it is one."""
    if (
        not isinstance(pair, (tuple, list))
        or len(pair) != 2
        or not all(hasattr(x, "astype") for x in pair)
    ):
        return f"{type(pair).__name__}, and a pair of arrays fits, A [r, in] and B [out, r]"
    a, b = pair
    if a.ndim != 2 or not len(a) or a.shape[1] != inputs or b.shape != (sum(outputs), len(a)):
        return f"A {a.shape} and B {b.shape}, and [r, {inputs}] and [{sum(outputs)}, r] fit"
    return None


def _without_prefix(module: str) -> str:
    """The name as in files of a model without a head, `h.0` for GPT-2's `transformer.h.0`, and of a
    text model alone.
    """
    for prefix in filter(None, {family.architecture.prefix for family in FAMILIES.values()}):
        module = module.removeprefix(prefix)
    return renamed_start(module, TEXT_STARTS)


def _sizes(config: DecoderConfig, places: Sequence[Part]) -> tuple[int, list[int]]:
    """The inputs of a matrix in transformers, and the outputs of each of our parts of it."""
    sizes = [sizes_of(config, place) for place in places]
    return sizes[0][0], [outputs for _, outputs in sizes]


def modules_of(config: DecoderConfig) -> dict[str, list[Part]]:
    """The matrices that may have adapters: the name in transformers -> our parts that make it up.

    Raises:
        ValueError: a matrix has other parts than a Llama's has. A user's own family without a gated
            MLP has such a matrix.
    """
    modules = {}
    for entry, parts in _entries(config):
        if len(entry.sources) == 1:
            modules[entry.sources[0].removesuffix(".weight")] = parts
            continue
        for source, part in zip(entry.sources, parts, strict=True):
            modules[source.removesuffix(".weight")] = [part]
    return modules


def row_orders(config: DecoderConfig) -> dict[str, np.ndarray]:
    """The order of the rows of B, by the name in transformers: that of the matrix's own rows, as in
    `ParamSource`. Matrices whose rows stay as they are have none.
    """
    orders = {}
    for entry, parts in _entries(config):
        if not entry.order:
            continue
        order = np.asarray(entry.order)
        ends = [len(order)]
        if len(entry.sources) > 1:
            ends = np.cumsum([sizes_of(config, part)[1] for part in parts])
        for source, start, end in zip(entry.sources, (0, *ends), ends, strict=False):
            orders[source.removesuffix(".weight")] = order[start:end] - start
    return orders


def _entries(config: DecoderConfig) -> Iterator[tuple[ParamSource, list[Part]]]:
    """The entries of the family's table that are matrices with adapters, and their parts."""
    for entry in FAMILIES[config.family or "llama"].param_table(config):
        if entry.path[0] == "blocks" and _has_mixer(config, int(entry.path[1]), entry.path[2]):
            continue
        matrix = ".".join(entry.path[2:-1])
        if entry.path[-1] != "weight" or matrix not in config.parts:
            continue
        layer = int(entry.path[1])
        parts = [Part(layer, matrix, i) for i in range(len(config.parts_of(layer)[matrix]))]
        if len(entry.sources) not in (1, len(parts)):
            raise ValueError(
                f"adapters are for Llama's matrices with a gated MLP, and {matrix} of this model "
                f"has {len(parts)} part, and a Llama's has {len(entry.sources)}; leave adapters out"
            )
        yield entry, parts


def _has_mixer(config: DecoderConfig, layer: int, module: str) -> bool:
    """Whether a module of a layer is a mixer, whose matrices have no adapters."""
    return module == "attn" and config.kinds[layer].mixer is not None


def scaling(options: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of B A: alpha / r, or alpha / sqrt(r) with rank stabilisation (arXiv 2312.03732).

    Args:
        module: its whole name in the model that the adapter was trained for. Patterns are matched
            with this name, as PEFT does.
    """
    alpha = options.get("lora_alpha", 8)
    for pattern, value in (options.get("alpha_pattern") or {}).items():
        # the first pattern that fits, as in PEFT
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if options.get("use_rslora") else rank)


def content_hash(parts: Mapping[Part, tuple[np.ndarray, np.ndarray]]) -> str:
    """A hash of all factors and their places. It has 128 bits, as the hashes of blocks have."""
    digest = blake2b(digest_size=16)
    for place, factors in sorted(parts.items()):
        for x in factors:
            digest.update(f"{place.layer} {place.matrix} {place.part} {x.shape};".encode())
            digest.update(np.ascontiguousarray(x, "<f4").tobytes())
    return digest.hexdigest()


def _check_options(source: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that plain LoRA does not have. `source`: where they are from."""
    for name in UNSUPPORTED:
        if options.get(name):
            raise ValueError(
                f"{source}: {name} is {options[name]!r:.80}, which is not supported; train the "
                "adapter without it, or merge it into the model's weights"
            )
    if options.get("bias", "none") != "none":
        raise ValueError(
            f"{source}: bias is {options['bias']!r}, and adapters here have factors alone; train "
            "with bias='none', or merge the adapter into the model's weights"
        )
    if not isinstance(options.get("use_rslora", False), bool):
        raise ValueError(
            f"{source}: use_rslora is {options['use_rslora']!r:.80}; it must be true or false"
        )
    patterns = options.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{source}: alpha_pattern is {patterns!r:.80}; it must be an object")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{source}: alpha_pattern has {pattern!r}, which is no regular expression "
                f"({error}); write a module's name, such as q_proj"
            ) from None
    alphas = {"lora_alpha": options.get("lora_alpha", 8), **patterns}
    for name, alpha in alphas.items():
        if (
            isinstance(alpha, bool)
            or not isinstance(alpha, (int, float))
            or not math.isfinite(alpha)
        ):
            raise ValueError(f"{source}: {name} is {alpha!r}; it must be a number")


def _tensors(path: Path) -> dict[str, Tensor]:
    if (path / TENSORS).is_file():
        return read_safetensors(path / TENSORS)
    if (path / PARAMS).is_dir():
        from pagedjax.weights import orbax_checkpoint

        return orbax_checkpoint.tensors(path / PARAMS)
    other_files = ", ".join(sorted(file.name for file in path.glob("adapter_model.*")))
    raise FileNotFoundError(
        f"{path} has no {TENSORS} and no "
        f"{PARAMS}/{f' (it has {other_files})' if other_files else ''}; save the adapter with "
        "safe_serialization=True"
    )


def _factors(
    path: Path, tensors: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The pairs of factors (A, B) by module. Raises ValueError for other tensors, and for an A or B
    alone.
    """
    factors: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for name, values in tensors.items():
        match = FACTOR.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise ValueError(
                f"{path} has the tensor {name}, which is no lora_A or lora_B of a matrix; train "
                "without it, or merge the adapter into the model's weights"
            )
        factors[match["module"]][match["side"]] = values
    for module, sides in factors.items():
        if len(sides) < 2:
            raise ValueError(
                f"{path} has lora_{next(iter(sides))} of {module} and not the other factor; save "
                "it again"
            )
    return {module: (sides["A"], sides["B"]) for module, sides in factors.items()}


def write_adapter(
    folder: str | os.PathLike[str],
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]],
    options: Mapping[str, Any],
    to: Literal["safetensors", "orbax"] = "safetensors",
) -> Path:
    """Write an adapter as PEFT does, or with Orbax; PEFT reads the first form.

    Args:
        factors: float32, by module as in `adapter_parts`, with the prefix of transformers
            ("transformer." of GPT-2).
        options: what the factors do not say: lora_alpha, use_rslora, base_model_name_or_path.
    """
    one_of("to", to, ("safetensors", "orbax"))
    path = Path(folder).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (a, b) in factors.items():
        for side, x in (("A", a), ("B", b)):
            tensors[f"{PREFIX}{module}.lora_{side}.weight"] = np.ascontiguousarray(x, np.float32)
    ranks = {module: len(a) for module, (a, _) in factors.items()}
    rank = max(ranks.values())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
        "target_modules": sorted({module.rpartition(".")[2] for module in factors}),
        "bias": "none",
        "inference_mode": True,
        **options,
    }
    if to == "safetensors":
        group = Group({name: x.shape for name, x in tensors.items()}, tensors.values, "float32")
        write_file(path / TENSORS, [group])
    else:
        from pagedjax.weights import orbax_checkpoint

        orbax_checkpoint.write(
            path / PARAMS, nested({name: jax.device_put(x) for name, x in tensors.items()})
        )
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path

"""A model with its tokenizer: from a checkpoint (`load_model`), or from parameters in memory
(`from_params`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pagedjax.device import formats, linear, models
from pagedjax.device.models import Model, split
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.placement import make_placement
from pagedjax.options.config import AS_STORED, STORED_FORMATS, MeshConfig, checked_devices, one_of
from pagedjax.text.tokenizer import NoTokenizer, Tokenizer
from pagedjax.weights import families
from pagedjax.weights.architectures import normalised
from pagedjax.weights.checkpoint import Checkpoint
from pagedjax.weights.families import built_in, family_of, own_family
from pagedjax.weights.load import load_params
from pagedjax.weights.locate import open_checkpoint
from pagedjax.weights.pooling_files import pooling_of
from pagedjax.weights.stored_rows import formats_of
from pagedjax.weights.tokenizer_files import load_tokenizer, open_tokenizer
from pagedjax.weights.trained import linear_of, model_of

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class LoadedModel:
    """Weights and tokenizer. Several engines can share them: LLM(model=loaded, block_size=...).

    pooling: how its files say that embeddings are pooled ("LAST", "MEAN", "CLS", or the name of a
        step that is not supported); None: it was not made for embeddings.
    family: the `model_family` that it was loaded with.
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    seconds: float  # loading time
    pooling: str | None = None
    family: str | None = None


def load_model(
    model: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    weight_dtype: str | None = None,
    linear_impl: str | None = None,
    model_family: str | None = None,
    mesh: MeshConfig | Mapping[str, int] | None = None,
    devices: Sequence[int] | None = None,
    tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    hub: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Open a directory, a .gguf file, a hub id or an embedded model by name.

    Args:
        dtype: "float32", "bfloat16" or "float16"; None is float32 on a CPU and bfloat16 elsewhere.
        weight_dtype: "int8" stores matrices in 8 bits, with a scale for each row; "stored" leaves
            those of a quantized checkpoint in its own 4 to 8 bits; None, or the same as dtype,
            leaves them in dtype.
        linear_impl: what computes products, as in `EngineConfig`. Matrices are stored in its
            layout. "xla" leaves them as they are in a checkpoint.
        model_family: how a model of no built-in architecture is read, as in `EngineConfig`.
        mesh, devices: where the parameters go, as in `EngineConfig`.
        tokenizer: another tokenizer than the model's own, as in `from_params`.
        hub: for a hub id, arguments of `huggingface_hub.snapshot_download`: revision, token,
            cache_dir.

    Raises:
        ValueError, FileNotFoundError: names the file, the error and the remedy.
    """
    started = time.perf_counter()
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    one_of("dtype", dtype, ("float32", "bfloat16", "float16"))
    one_of("weight_dtype", weight_dtype, (None, *STORED_FORMATS, AS_STORED, dtype))
    checkpoint = open_checkpoint(model, hub, family=own_family(model_family))
    sizes = MeshConfig.read(mesh)
    weights = read_model(
        checkpoint,
        dtype,
        weight_dtype=weight_dtype,
        mesh=sizes,
        devices=checked_devices(devices, sizes),
        linear_impl=linear_impl,
        progress=progress,
    )
    own_tokenizer = load_tokenizer(checkpoint) if tokenizer is None else _tokenizer(tokenizer)
    return LoadedModel(
        name=str(model),
        model=weights,
        tokenizer=own_tokenizer,
        eos_token_ids=tuple(sorted({*checkpoint.eos_token_ids, *own_tokenizer.eos_token_ids})),
        pooling=pooling_of(checkpoint.path),
        family=model_family,
        seconds=time.perf_counter() - started,
    )


def read_model(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    weight_dtype: str | None = None,
    linear_impl: str | None = None,
    mesh: MeshConfig | None = None,
    devices: Sequence[int] | None = None,
    drafts: bool = False,
    progress: bool = False,
) -> Model:
    """Read a checkpoint's parameters in `dtype`.

    Args:
        drafts: it is a draft model, and `linear_impl` that of the model that it drafts for. Where
            that is of no use to its matrices, it has the default.

    The other arguments are those of `load_model`.

    Raises:
        ValueError: tensors do not fit (lists all of them).
    """
    family = family_of(checkpoint)
    config = families.config_of(family, checkpoint.config, str(checkpoint.path))
    table = family.param_table(config)
    if checkpoint.family is not None:
        families.check_parameters(family, config, table)
    stored = formats.name_of(weight_dtype)
    if weight_dtype == AS_STORED:
        fits = partial(split.has_whole_blocks, config, mesh or MeshConfig())
        stored = formats_of(checkpoint, table, fits)
    config = replace(config, stored=stored)
    weight_dtypes = formats.dtypes_of(stored, dtype)
    if drafts and linear_impl and linear.find(linear_impl).model_obstacle(weight_dtypes):
        linear_impl = None
    config = replace(
        config, linear=linear_of(linear_impl, config, dtype, mesh=bool(mesh or devices))
    )
    placement = None
    if mesh or devices:
        placement = make_placement(config, mesh or MeshConfig(), devices, jax.devices())
    if weight_dtype == AS_STORED:  # the file says which products have to be prepared
        for name in weight_dtypes:
            linear.prepare(config.linear, dtype=dtype, weight_dtype=name, low_rank=False)
    params = load_params(
        checkpoint,
        table,
        dtype,
        stored=stored,
        progress=progress,
        ignore=family.ignored,
        placement=placement,
        pack=partial(models.packed, config),
    )
    return models.assemble(config, params, dtype, placement)


def from_params(
    params: Any,
    config: Mapping[str, Any] | DecoderConfig,
    *,
    tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    dtype: str | None = None,
    weight_dtype: str | None = None,
    linear_impl: str | None = None,
    model_family: str | None = None,
) -> LoadedModel:
    """A model of parameters in memory, e.g. from a trainer. They are copied, so they may be donated
    afterwards.

    Args:
        params: an nnx module of `pagedjax.device.models`, its state, or nested mappings of arrays
            with the same names.
        config: the content of the model's config.json, or the module's configuration. Only
            config.json has the tokens that end a text.
        tokenizer: a folder with a tokenizer.json, any model that `load_model` opens, or a loaded
            tokenizer. Without one, inputs and outputs are token ids.
        dtype: None keeps that of the parameters.
        weight_dtype, linear_impl, model_family: as in `load_model`.

    Raises:
        ValueError: parameters do not fit the configuration (lists all of them), or, as in
            `load_model`, the config or tokenizer is wrong.
    """
    started = time.perf_counter()
    family = own_family(model_family)
    if family is not None and isinstance(config, DecoderConfig):
        raise ValueError(
            f"model_family is {model_family!r} and config is a DecoderConfig, which no family "
            "reads; leave model_family out, or give the content of config.json"
        )
    hf: dict[str, Any] = {}
    if not isinstance(config, DecoderConfig):
        hf = normalised(config, "config", family)
        config = families.config_of(family or built_in(hf["model_type"]), hf, "config")
    if weight_dtype == AS_STORED:
        raise ValueError(
            "weight_dtype is 'stored', and parameters in memory are of no file; give the config of "
            "a model whose matrices are stored, or leave it out"
        )
    stored = formats.name_of(weight_dtype)
    model = model_of(params, config, dtype, stored=stored, linear_impl=linear_impl)
    one_of("weight_dtype", weight_dtype, (None, *STORED_FORMATS, model.dtype))
    own_tokenizer = _tokenizer(tokenizer)
    checkpoint = Checkpoint(Path(), "huggingface", config=hf, tensors={})
    eos = {*checkpoint.eos_token_ids, *own_tokenizer.eos_token_ids}
    return LoadedModel(
        name="params",
        model=model,
        tokenizer=own_tokenizer,
        eos_token_ids=tuple(sorted(eos)),
        family=model_family,
        seconds=time.perf_counter() - started,
    )


def _tokenizer(tokenizer: str | os.PathLike[str] | Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        return NoTokenizer()
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    return open_tokenizer(tokenizer)

"""Chooses what the user left open, once, by what the model and the device need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pagedjax.device import attention, cache, linear, memory, states
from pagedjax.device.batch import Shapes, gpu_decode_buckets, prompt_buckets, token_buckets
from pagedjax.device.draft_model import DraftModel
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.mixers.decayed_state import StateMixer
from pagedjax.engine.geometry import (
    check_layers,
    devices_of,
    geometry,
    layers_in_groups,
    selection_of,
    views,
)
from pagedjax.host.reservation import table_width
from pagedjax.host.scheduler import check_empty_blocks
from pagedjax.options.config import (
    MAX_TAP_BYTES,
    ON_DEVICE,
    EngineConfig,
    Resolved,
    check_model_len,
)


def resolve(
    config: EngineConfig,
    model: Model,
    device_memory: memory.DeviceMemory | None = None,
    activations: int = 0,
    draft: DraftModel | None = None,
) -> Resolved:
    """Choose, once, what the user left open.

    Args:
        device_memory: what is free; None reads it now.
        activations: bytes that a step needs beside weights and cache; 0 if that is not known yet.
        draft: the model that drafts on the device, if there is one.

    Raises:
        ValueError: another dtype or weight_dtype than the model has, max_model_len beyond the
            model's own limit, a cache that does not fit or keeps nothing, an attention_impl that cannot serve here,
            or a draft model that does not fit the model.
    """
    device_memory = device_memory or free_memory(model)
    dtype = model.dtype
    length = config.max_model_len or model.config.max_len
    _check_model(config, model, length)
    check_layers(config, model, draft)
    kv_dtype = config.kv_cache_dtype or dtype
    config_with_length = dataclasses.replace(config, max_model_len=length)
    impl = _attention_impl(config, model, draft, kv_dtype, length)
    blocks = geometry(config_with_length, model, kv_dtype, impl, draft)
    block_bytes = blocks.block_bytes
    num_blocks = config.num_blocks
    if num_blocks is None:
        most_used_blocks = config.max_num_seqs * table_width(config, length)
        fitting_blocks = memory.blocks_that_fit(
            block_bytes, config.memory_fraction, device_memory, activations
        )
        num_blocks = min(most_used_blocks, fitting_blocks)
    check_empty_blocks(config.empty_blocks, num_blocks)
    memory.check_fit(num_blocks, block_bytes, device_memory, activations)
    buckets = _buckets(config, model)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    values |= {
        "dtype": dtype,
        "weight_dtype": model.weight_dtype,
        "kv_cache_dtype": kv_dtype,
        "max_model_len": length,
        "num_blocks": num_blocks,
        "attention_impl": impl,
        "linear_impl": model.config.linear,
        "state_impl": _state_impl(config, model, blocks.block, buckets[-1]),
        "token_buckets": buckets,
        "max_tap_bytes": config.max_tap_bytes or MAX_TAP_BYTES,
        "mesh": None,
        "devices": None,
    }
    if model.placement:
        all_devices = jax.devices()
        values["mesh"] = model.placement.sizes
        values["devices"] = tuple(map(all_devices.index, model.placement.devices))
    return Resolved(**values)


def _buckets(config: EngineConfig, model: Model) -> tuple[int, ...]:
    """The padded sizes of steps. Raises ValueError if the smallest one is too small."""
    smallest = smallest_step(devices_of(model)[0].platform, model.dtype, model.config.linear)
    buckets = config.token_buckets
    if not buckets:
        buckets = token_buckets(config.max_num_batched_tokens, smallest=smallest)
    if buckets[0] < smallest:
        raise ValueError(
            f"token_buckets start at {buckets[0]}; in {model.dtype} on a CPU the smallest step is "
            f"{smallest} tokens"
        )
    return buckets


def _check_model(config: EngineConfig, model: Model, length: int) -> None:
    """Raises ValueError unless the model was loaded as the configuration says.

    Args:
        length: max_model_len.
    """
    for name, loaded in (("dtype", model.dtype), ("weight_dtype", model.weight_dtype)):
        value = getattr(config, name)
        if value not in (None, loaded):
            raise ValueError(
                f"{name} is {value!r}, but the model was loaded with {loaded!r}; load it again"
            )
    check_model_len(length, model.config.max_len)


def _attention_impl(
    config: EngineConfig, model: Model, draft: DraftModel | None, kv_dtype: str, length: int
) -> str:
    """The attention that serves the model, its selection of blocks, and the draft model.

    Args:
        length: max_model_len.

    Raises:
        ValueError: one of them cannot be served, or the draft model does not fit the model.
    """
    device = devices_of(model)[0]
    invariant = config.batch_invariant
    dtypes = {"dtype": kv_dtype, "query_dtype": model.dtype}
    device_part = model.part
    sizes: dict[str, Any] = {
        "block_size": config.block_size,
        "heads_of_layers": device_part.heads_of_layers,
    }
    options = {"invariant": invariant, "sinks": model.config.sinks}
    impl = attention.choose(config.attention_impl, device, **options, **dtypes, **sizes)
    if invariant:
        _check_invariant(model.config)
    check_draft(config, model, draft, length)
    config_with_length = dataclasses.replace(config, max_model_len=length)
    if selection_of(config_with_length, model) is not None:
        if model.config.sinks:
            policy = getattr(config.kv_policy, "name", None)
            raise ValueError(
                f"kv_policy {policy!r} calls attention for one key head at a time, and the model "
                "has sinks, of which each query head has its own; use 'streaming' or 'full'"
            )
        # each key head selects its own blocks, so attention is called for one key head at a time
        group = device_part.heads // device_part.kv_heads
        one_key_head: dict[str, Any] = {
            "block_size": config.block_size,
            "head_dim": model.config.head_dim,
            "kv_heads": 1,
            "heads": group,
        }
        try:
            attention.choose(impl, device, invariant=invariant, **dtypes, **one_key_head)
        except ValueError as error:
            policy = getattr(config.kv_policy, "name", None)
            raise ValueError(f"kv_policy {policy!r}: {error}") from None
    if draft is None:
        return impl
    # the drafter has the plain form of the model's implementation
    needs: dict[str, Any] = {
        "dtype": kv_dtype,
        "query_dtype": draft.dtype,
        "block_size": config.block_size,
        "heads_of_layers": draft.layers.heads_of_layers,
        "sinks": draft.layers.sinks,
    }
    try:
        return attention.choose(impl, device, **needs)
    except ValueError as error:
        if invariant:
            raise ValueError(
                f"batch_invariant is True, and the draft model cannot run beside it: {error}; use "
                "another draft model, or set batch_invariant=False"
            ) from None
        if config.attention_impl is None:
            return attention.choose("xla", device, **needs)
        raise ValueError(f"the draft model: {error}") from None


def _state_impl(config: EngineConfig, model: Model, block: Mapping[str, Any], tokens: int) -> str:
    """What computes the states of the model's layers.

    Args:
        block: the shape of a block, as the arguments of `cache.init`.
        tokens: of the largest step.

    Raises:
        ValueError: it cannot serve them.
    """
    if config.state_impl is None:
        return states.DEFAULT
    mixers = [kind.mixer for kind in model.part.kinds if isinstance(kind.mixer, StateMixer)]
    return states.choose(
        config.state_impl,
        devices_of(model)[0],
        shapes=list(dict.fromkeys([mixer.shape for mixer in mixers])),
        length=max([mixer.length for mixer in mixers], default=1),
        inputs=model.dtype,
        page=next(filter(None, cache.shapes(blocks=0, **block).k), None),
        block_size=config.block_size,
        rows=config.max_num_seqs,
        tokens=tokens,
    )


def _check_invariant(config: DecoderConfig) -> None:
    """Raises ValueError for products that let a token's bits depend on other tokens."""
    if not linear.find(config.linear).invariant:
        invariant_impls = [repr(name) for name, impl in linear.IMPLS.items() if impl.invariant]
        raise ValueError(
            f"batch_invariant is True, and the products are of linear_impl {config.linear!r}, "
            "whose sums depend on the shapes of a step; those that serve: "
            f"{', '.join(invariant_impls)}, on one CPU without a mesh; or set batch_invariant=False"
        )


def free_memory(model: Model) -> memory.DeviceMemory:
    """The memory of the device with the least free memory, among the model's devices everywhere."""
    devices = [
        device for device in devices_of(model) if device.process_index == jax.process_index()
    ]
    readings = [memory.read(device, len(devices)) for device in devices]
    fullest = min(readings, key=lambda reading: reading.free)
    if jax.process_count() == 1:
        return fullest
    has_limit = fullest.cache_limit is not None
    limit = fullest.cache_limit if has_limit else fullest.free
    reading = np.array([fullest.total, fullest.free, limit], np.float64)
    all_readings = multihost_utils.process_allgather(reading)
    total, free, smallest_limit = (int(size) for size in all_readings.min(axis=0))
    cache_limit = smallest_limit if has_limit else None
    return fullest._replace(total=total, free=free, cache_limit=cache_limit)


def check_draft(config: EngineConfig, model: Model, draft: DraftModel | None, length: int) -> None:
    """Raises ValueError if `config.speculative` needs a draft model and there is none, if it needs
    none and there is one, or if the draft model does not fit the model.

    Args:
        length: max_model_len.
    """
    options = config.speculative
    needs_draft = options is not None and options.on_device
    if needs_draft and draft is None:
        assert options is not None
        raise ValueError(
            f"speculative.method is {options.method!r}, and the engine has no draft model; set "
            "speculative.model, or give Engine draft_model"
        )
    if draft is None:
        return
    if not needs_draft:
        method = options.method if options else None
        raise ValueError(
            f"there is a draft model, but speculative.method is {method!r}; it must be one of "
            f"{ON_DEVICE}"
        )
    layers = draft.layers
    is_head = options is not None and options.method != "draft"
    if is_head and layers.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the draft head has a vocabulary of {layers.vocab_size} tokens, and the model one of "
            f"{model.config.vocab_size}; use a head that was trained for this model"
        )
    if layers.max_len < length:
        raise ValueError(
            f"the draft model was made for {layers.max_len} tokens and max_model_len is {length}; "
            "lower it, or use another draft model"
        )
    if draft.dtype != model.dtype:
        raise ValueError(
            f"the draft model is in {draft.dtype!r} and the model in {model.dtype!r}; load it "
            "again in that"
        )


def smallest_step(platform: str, dtype: str, linear: str) -> int:
    """The fewest tokens of a step. It is 2 where a product of one row would convert the whole
    weight in every step: XLA's product in 16 bits on a CPU. Else it is 1.
    """
    return 2 if platform == "cpu" and dtype != "float32" and linear == "xla" else 1


def shapes(config: Resolved, model: Model, draft: DraftModel | None = None) -> Shapes:
    """The shapes of an engine's steps."""
    layouts = layers_in_groups(config, model, draft)
    smallest = smallest_step(jax.default_backend(), config.dtype, config.linear_impl)
    rows = max(config.max_num_seqs, smallest)
    drafts = 0
    keeps_probs = False
    speculative = config.speculative
    if speculative:
        drafts = speculative.num_tokens
        keeps_probs = speculative.rule == "rejection" and speculative.on_device
    view = None
    views_of_groups = views(config, model) if config.kv_policy is not None else ()
    if views_of_groups:
        window, kept_blocks = views_of_groups[0]
        assert window is not None, "a policy without a window has no views"
        view = (window, kept_blocks)
    decode_buckets = _decode_buckets(config, rows, jax.default_backend())
    return Shapes(
        tokens=config.token_buckets,
        max_seqs=rows,
        block_size=config.block_size,
        table_width=table_width(config, config.max_model_len),
        max_model_len=config.max_model_len,
        vocab_size=model.config.vocab_size,
        drafts=drafts,
        keeps_probs=keeps_probs,
        view=view,
        layout=layouts.model,
        draft_layout=layouts.draft,
        selection=selection_of(config, model),
        decode_buckets=decode_buckets,
        span=config.decode_span,
        span_buckets=_span_buckets(config, rows, decode_buckets),
        prompt_buckets=prompt_buckets(config.token_buckets),
        # the bits of a row must not depend on the options of the rows beside it
        plain=config.compilation == "lazy" and not config.batch_invariant,
    )


def _decode_buckets(config: Resolved, rows: int, platform: str) -> tuple[int, ...]:
    """T of the steps that have a program of their own for decodes alone.

    On a GPU padding costs as much as decodes, and a step of decodes alone takes a few milliseconds.
    So if nobody chose the buckets, those of decodes alone lie closer together there.

    Args:
        rows: the most rows of a step.
    """
    decodes_alone = (
        attention.find(config.attention_impl).decodes_alone
        and config.kv_policy is None
        and not config.batch_invariant
    )
    if not decodes_alone:
        return ()
    buckets = config.token_buckets
    if platform == "gpu" and buckets == token_buckets(config.max_num_batched_tokens):
        return gpu_decode_buckets(min(rows, buckets[-1]))
    return tuple(t for t in buckets if t <= rows)


def _span_buckets(config: Resolved, rows: int, decode_buckets: tuple[int, ...]) -> tuple[int, ...]:
    """T of the steps that have a program for a span.

    Args:
        rows: the most rows of a step.

    Raises:
        ValueError: there are to be spans, and every bucket has more tokens than a step has rows.
    """
    if config.decode_span == 1:
        return ()
    buckets = decode_buckets or tuple(t for t in config.token_buckets if t <= rows)
    if not buckets:
        raise ValueError(
            f"decode_span is {config.decode_span}, and each of the token_buckets "
            f"{config.token_buckets} has more tokens than max_num_seqs {config.max_num_seqs}, so no "
            f"program has decodes alone; add the bucket {rows}, or set decode_span=1"
        )
    return buckets

"""What the user left open is chosen here, once, with the model and the device in view."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pagedjax.config import MAX_TAP_BYTES, ON_DEVICE, EngineConfig, KVPolicyOptions, Resolved
from pagedjax.device import attention, cache, linear, memory
from pagedjax.device.batch import Selection, Shapes, token_buckets
from pagedjax.device.draft_model import DraftModel
from pagedjax.device.layer_groups import LayerGroups, layer_groups
from pagedjax.device.models import Model, split
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.host import blocks, kv_policies
from pagedjax.host.kv_policies import View
from pagedjax.host.reservation import table_width

VECTOR = 16  # float32 numbers of the widest vector of a CPU


def resolve(
    config: EngineConfig,
    model: Model,
    found: memory.DeviceMemory | None = None,
    activations: int = 0,
    draft: DraftModel | None = None,
) -> Resolved:
    """Choose, once, what the user left open.

    Args:
        found: the device's memory; None reads it now.
        activations: bytes that a step needs beside weights and cache, once that is known.
        draft: what drafts on the device, if something does.

    Raises:
        ValueError: another dtype or weight_dtype than the model has, max_model_len beyond the
            model's own limit, a cache that does not fit, an attention_impl that cannot serve here,
            or a draft model that does not fit the model.
    """
    m, part, device = model.config, model.part, devices_of(model)[0]
    found = found or free_memory(model)
    dtype = model.dtype
    if config.dtype not in (None, dtype):
        raise ValueError(
            f"dtype is {config.dtype!r}, but the model was loaded with {dtype!r}; load it again"
        )
    if config.weight_dtype not in (None, model.weight_dtype):
        wanted, has = config.weight_dtype, model.weight_dtype
        raise ValueError(
            f"weight_dtype is {wanted!r}, but the model was loaded with {has!r}; load it again"
        )
    length = config.max_model_len or m.max_len
    if length > m.max_len:
        raise ValueError(
            f"max_model_len is {length}, but the model was made for {m.max_len} tokens; lower it"
        )
    kept = config.kv_cache_dtype or dtype
    sized = dataclasses.replace(config, max_model_len=length)
    layout, selects = layers_in_groups(sized, model), selection(sized, model)
    size = cache.block_bytes(
        **block_shape(config.block_size, model, kept, None, draft, layout, selects)
    )
    size *= groups(layout)
    num_blocks = config.num_blocks
    if num_blocks is None:
        useful = config.max_num_seqs * table_width(config, length)
        num_blocks = min(
            useful, memory.blocks_that_fit(size, config.memory_fraction, found, activations)
        )
    memory.check_fit(num_blocks, size, found, activations)
    smallest = smallest_step(device.platform, dtype, m.linear)
    buckets = config.token_buckets or token_buckets(
        config.max_num_batched_tokens, smallest=smallest
    )
    if buckets[0] < smallest:
        raise ValueError(
            f"token_buckets start at {buckets[0]}; in {dtype} on a CPU the smallest step is {smallest} tokens"
        )
    sizes: dict[str, Any] = {
        "block_size": config.block_size,
        "head_dim": m.head_dim,
        "kv_heads": part.kv_heads,
        "heads": part.heads,
    }
    invariant = config.batch_invariant
    impl = attention.choose(
        config.attention_impl, device, invariant=invariant, dtype=kept, query_dtype=dtype, **sizes
    )
    if invariant:
        _check_invariant(m)
    check_draft(config, model, draft, length)
    if selects is not None:  # rows of attention have one key head
        one = sizes | {"kv_heads": 1, "heads": part.heads // part.kv_heads}
        try:
            attention.choose(
                impl, device, invariant=invariant, dtype=kept, query_dtype=dtype, **one
            )
        except ValueError as error:
            raise ValueError(
                f"kv_policy {getattr(config.kv_policy, 'name', None)!r}: {error}"
            ) from None
    if draft is not None:
        d = draft.layers
        sizes |= {"head_dim": d.head_dim, "kv_heads": d.kv_heads, "heads": d.heads}
        if config.attention_impl is None and attention.find(impl).obstacle(
            device, dtype=kept, query_dtype=dtype, **sizes
        ):
            impl = "xla"
        try:
            attention.choose(impl, device, dtype=kept, query_dtype=dtype, **sizes)
        except ValueError as error:
            raise ValueError(f"the draft model: {error}") from None
    values = dataclasses.asdict(config) | {
        "dtype": dtype,
        "weight_dtype": model.weight_dtype,
        "kv_cache_dtype": kept,
        "max_model_len": length,
        "num_blocks": num_blocks,
        "attention_impl": impl,
        "linear_impl": m.linear,
        "token_buckets": buckets,
        "max_tap_bytes": config.max_tap_bytes or MAX_TAP_BYTES,
        "mesh": model.placement and model.placement.sizes,
        "devices": model.placement
        and tuple(jax.devices().index(one) for one in model.placement.devices),
    }
    return Resolved(**values)


def _check_invariant(m: DecoderConfig) -> None:
    """Raises ValueError for a model whose products or widths let a token's bits depend on other
    tokens.
    """
    if not linear.find(m.linear).invariant:
        able = ", ".join(repr(name) for name, one in linear.IMPLS.items() if one.invariant)
        reason = f"the products are of linear_impl {m.linear!r}, whose sums depend on the shapes of a step"
        remedy = (
            f"those that serve: {able}, on one CPU without a mesh; or set batch_invariant=False"
        )
        raise ValueError(f"batch_invariant is True, and {reason}; {remedy}")
    if m.hidden % VECTOR:
        raise ValueError(
            f"batch_invariant is True, and the hidden size of the model is {m.hidden}: beyond a multiple of {VECTOR} "
            "the compiler may round x * y + z in two ways; use another model, or set batch_invariant=False"
        )


def devices_of(model: Model) -> list[Any]:
    """The devices that a model is on."""
    return model.placement.devices if model.placement else jax.local_devices()[:1]


def free_memory(model: Model) -> memory.DeviceMemory:
    """The memory of that device of the model which has the least free, in all processes."""
    devices = [
        device for device in devices_of(model) if device.process_index == jax.process_index()
    ]
    found = min(
        (memory.read(device, len(devices)) for device in devices), key=lambda found: found.free
    )
    if jax.process_count() == 1:
        return found
    limit = found.free if found.cache_limit is None else found.cache_limit
    every = multihost_utils.process_allgather(
        np.array([found.total, found.free, limit], np.float64)
    )
    total, free, limit = (int(least) for least in every.min(axis=0))
    return found._replace(
        total=total, free=free, cache_limit=None if found.cache_limit is None else limit
    )


def check_draft(config: EngineConfig, model: Model, draft: DraftModel | None, length: int) -> None:
    """Raises ValueError unless the draft model is there exactly if `config.speculative` needs one,
    and fits the model.

    Args:
        length: max_model_len.
    """
    options = config.speculative
    wanted = options is not None and options.method in ON_DEVICE
    if wanted and draft is None:
        assert options is not None
        raise ValueError(
            f"speculative.method is {options.method!r}, and the engine has no draft model; set speculative.model, or "
            "give Engine draft_model"
        )
    if draft is None:
        return
    if not wanted:
        method = options.method if options else None
        raise ValueError(
            f"there is a draft model, but speculative.method is {method!r}; it must be one of {ON_DEVICE}"
        )
    d, m = draft.layers, model.config
    if options is not None and options.method != "draft" and d.vocab_size != m.vocab_size:
        what = f"the draft head has a vocabulary of {d.vocab_size} tokens, and the model one of {m.vocab_size}"
        raise ValueError(f"{what}; use a head that was trained for this model")
    if d.max_len < length:
        raise ValueError(
            f"the draft model was made for {d.max_len} tokens and max_model_len is {length}; lower it, or use another "
            "draft model"
        )
    if draft.dtype != model.dtype:
        raise ValueError(
            f"the draft model is in {draft.dtype!r} and the model in {model.dtype!r}; load it again in that"
        )


def layers_in_groups(c: EngineConfig, model: Model) -> LayerGroups | None:
    """The groups of layers with block tables of their own; None: all layers have one table.

    Args:
        c: with its max_model_len. A window as long as the longest sequence counts as none.
    """
    windows = _windows(c, model)
    return layer_groups(windows) if len(set(windows)) > 1 else None


def groups(layout: LayerGroups | None) -> int:
    return len(layout.windows) if layout else 1


def views(c: EngineConfig, model: Model) -> tuple[View, ...]:
    """What queries see, by group of layers; () if all of them see everything.

    Raises:
        ValueError: a KV policy for a model whose layers have windows.
    """
    assert c.max_model_len is not None, "resolve the configuration first"
    if isinstance(c.kv_policy, KVPolicyOptions):
        windows = {
            kind.window
            for kind in model.config.kinds
            if kind.window and kind.window < c.max_model_len
        }
        if shorter := sorted(windows):
            raise ValueError(
                f"kv_policy is {c.kv_policy.name!r}, and layers of the model have windows of {shorter} tokens, which "
                "are its own policy; use kv_policy='full'"
            )
        return kv_policies.views(c, table_width(c, c.max_model_len))
    windows, layout = _windows(c, model), layers_in_groups(c, model)
    if not any(windows):
        return ()
    each = layout.windows if layout else windows[:1]
    return tuple(
        [View(window and kv_policies.window_blocks(window, c.block_size)) for window in each]
    )


def selection(c: EngineConfig, model: Model) -> Selection | None:
    """What queries read of what they see; None: all of it.

    Args:
        c: with its max_model_len. A selection of all blocks of such a sequence counts as none.

    Raises:
        ValueError: see `views`; no layer selects; devices that share a key head.
    """
    seen = views(c, model)
    top = (
        kv_policies.find(c.kv_policy).selects if isinstance(c.kv_policy, KVPolicyOptions) else None
    )
    if top is None:
        return None
    assert c.max_model_len is not None, "resolve the configuration first"
    width = table_width(c, c.max_model_len)
    width = seen[0].width(width) if seen else width
    most, layers = blocks.needed(top.tokens, c.block_size), model.config.layers
    if top.dense_layers >= layers:
        raise ValueError(
            f"kv_policy.dense_layers is {top.dense_layers}, and the model has {layers} layers, so none selects blocks; "
            f"set it to at most {layers - 1}, or use kv_policy='full'"
        )
    if model.placement and split.shared_keys(model.config, model.placement.sizes):
        keys = model.config.kv_heads
        raise ValueError(
            f"kv_policy {getattr(c.kv_policy, 'name', None)!r} selects blocks for each key head, and on a mesh of "
            f"{model.placement.sizes.size} devices several have a part of the queries of one of {keys} key heads; use "
            f"at most {keys} devices, or kv_policy='full'"
        )
    return Selection(most, top.dense_layers, top.dense_prompts) if most < width else None


def _windows(c: EngineConfig, model: Model) -> list[int | None]:
    """Of each layer, the window before which blocks are given back.

    No layer has one if a baseline or a draft model reads those blocks, or if the user keeps them.
    """
    assert c.max_model_len is not None, "resolve the configuration first"
    kinds, width = model.config.kinds, table_width(c, c.max_model_len)
    drafts = c.speculative is not None and c.speculative.method in ON_DEVICE
    if c.is_baseline or drafts or not c.free_window_blocks:
        return [None] * len(kinds)
    return [
        kind.window
        if kind.window and kv_policies.window_blocks(kind.window, c.block_size) < width
        else None
        for kind in kinds
    ]


def block_shape(
    block_size: int,
    model: Model,
    dtype: str,
    impl: str | None = None,
    draft: DraftModel | None = None,
    layout: LayerGroups | None = None,
    selection: Selection | None = None,
) -> dict[str, Any]:
    """What a cache's blocks look like on one device, for `cache`; dtype is that of the keys and
    values in them.

    Args:
        impl: the attention that reads them; None: the plain layout, of as many bytes.
        draft: whose pages are in them too.
        layout: of several groups of layers; a block then has the layers of one group.
        selection: whose scores need bounds of a block's keys.
    """
    m, sizes = model.part, None
    heads = {
        "kv_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "row": attention.page_row(impl, m.head_dim),
    }
    if draft is not None:
        d = draft.layers
        row = attention.page_row(impl, d.head_dim)
        sizes = cache.DraftSizes(d.layers, d.kv_heads, d.head_dim, draft.features, draft.dtype, row)
    dtype = attention.page_dtype(impl, dtype)
    layers = layout.size if layout else m.layers
    dense = selection and selection.dense_layers
    return {
        "layers": layers,
        "block_size": block_size,
        **heads,
        "dtype": dtype,
        "draft": sizes,
        "dense_layers": dense,
    }


def host_block_bytes(c: Resolved, model: Model, draft: DraftModel | None = None) -> int:
    """Bytes of a block in the swap space, with the heads of all devices of the process that has
    most of them. With several groups of layers, it is a block of each."""
    layout = layers_in_groups(c, model)
    shape = block_shape(
        c.block_size, model, c.kv_cache_dtype, None, draft, layout, selection(c, model)
    )
    devices = max(Counter(device.process_index for device in devices_of(model)).values())
    return cache.block_bytes(**shape | {"kv_heads": shape["kv_heads"] * devices}) * groups(layout)


def host_blocks(c: Resolved, model: Model, draft: DraftModel | None = None) -> int:
    """Blocks of the swap space; 0 when nothing is swapped.

    Raises:
        ValueError: swapping without room for one block.
    """
    if c.preemption != "swap":
        return 0
    size = host_block_bytes(c, model, draft)
    found = memory.host_blocks(c.swap_space_gib, size)
    if found < 1:
        raise ValueError(
            f"preemption is 'swap', but swap_space_gib {c.swap_space_gib} does not hold one block of {size} bytes; "
            "raise it, or use preemption='recompute'"
        )
    return found * groups(layers_in_groups(c, model))


def smallest_step(platform: str, dtype: str, linear: str) -> int:
    """2 where a product of one row would convert the whole weight in every step: XLA's in 16 bits
    on a CPU. Else 1.
    """
    return 2 if platform == "cpu" and dtype != "float32" and linear == "xla" else 1


def shapes(c: Resolved, model: Model) -> Shapes:
    rows = max(c.max_num_seqs, smallest_step(jax.default_backend(), c.dtype, c.linear_impl))
    width = table_width(c, c.max_model_len)
    s = c.speculative
    drafts, probs = (
        (s.num_tokens, s.rule == "rejection" and s.method in ON_DEVICE) if s else (0, False)
    )
    sizes = rows, c.block_size, width, c.max_model_len, model.config.vocab_size
    view = None
    if c.kv_policy is not None and (found := views(c, model)):
        assert found[0].window is not None, "else the policy would be full"
        view = found[0].window, found[0].kept
    separate = (
        attention.find(c.attention_impl).decodes_alone
        and c.kv_policy is None
        and not c.batch_invariant
    )
    decode_buckets = tuple(t for t in c.token_buckets if t <= rows) if separate else ()
    rest = layers_in_groups(c, model), selection(c, model)
    return Shapes(c.token_buckets, *sizes, drafts, probs, view, *rest, decode_buckets)

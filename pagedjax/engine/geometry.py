"""`Geometry`: the shapes of an engine's cache, computed once from configuration and model."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device import attention, cache, memory
from pagedjax.device.draft_model import DraftModel
from pagedjax.device.extras import Selection
from pagedjax.device.invariance import check_batch_invariant
from pagedjax.device.layer_groups import LayerGroups, LayerPages, beside, layer_groups
from pagedjax.device.models import Model, split
from pagedjax.device.models.decoder import Block, DecoderConfig, LayerKind
from pagedjax.device.models.mixers.mixer import Mixer
from pagedjax.device.step import zeros
from pagedjax.host import blocks, kv_policies
from pagedjax.host.kv_policies import View
from pagedjax.host.reservation import table_width
from pagedjax.options.config import EngineConfig, KVPolicyOptions, Resolved


class Layouts(NamedTuple):
    """Groups of layers with block tables of their own, in one numbering.

    model: of the model's layers; None: all of them have one table, and all layers of a drafter.
    draft: of a draft model's layers; None: all of them have the first table.
    """

    model: LayerGroups | None = None
    draft: LayerGroups | None = None

    @property
    def groups(self) -> int:
        """Blocks of the cache for each block of tokens."""
        return len(self.model.windows) if self.model else 1


ONE_TABLE = Layouts()


class Geometry(NamedTuple):
    """What the blocks of a cache look like, and who sees them.

    layouts: groups of layers with block tables of their own.
    views: what queries see, by group of layers; () if all of them see everything.
    selection: what queries read of what they see; None: all of it.
    block: the shape of a block on one device, as the arguments of `cache.init`.
    host_block_bytes: bytes of one block of each group in the swap space.
    keeps_states: whether a layer keeps numbers of blocks, which a step reads before it writes any.
    """

    layouts: Layouts
    views: tuple[View, ...]
    selection: Selection | None
    block: dict[str, Any]
    host_block_bytes: int
    keeps_states: bool = False

    @property
    def groups(self) -> int:
        """Blocks of the cache for each block of tokens."""
        return self.layouts.groups

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of each group, on one device."""
        return cache.block_bytes(**self.block) * self.groups

    def cache_shapes(self, num_blocks: int, model: Model) -> cache.KVCache:
        """The shapes of a cache of `num_blocks` blocks of tokens, without memory."""
        return cache.shapes(
            blocks=self._cache_blocks(num_blocks), sharding=_sharding(model), **self.block
        )

    def new_cache(self, num_blocks: int, model: Model, attention_impl: str) -> cache.KVCache:
        """An empty cache of `num_blocks` blocks of tokens."""
        sharding = _sharding(model)
        return cache.init(
            blocks=self._cache_blocks(num_blocks),
            sharding=sharding,
            zeros=zeros if sharding else jnp.zeros,
            pages=None if sharding else attention.pages_of(attention_impl),
            **self.block,
        )

    def _cache_blocks(self, num_blocks: int) -> int:
        """Blocks of the cache: one of each group for a block of tokens; one trash block for all."""
        return (num_blocks + 1) * self.groups - 1

    def host_blocks(self, config: Resolved) -> int:
        """Blocks of the swap space; 0 when nothing is swapped.

        Raises:
            ValueError: swapping without room for one block.
        """
        if config.preemption != "swap":
            return 0
        count = memory.host_blocks(config.swap_space_gib, self.host_block_bytes)
        if count < 1:
            raise ValueError(
                f"preemption is 'swap', but swap_space_gib {config.swap_space_gib} does not hold "
                f"one block of {self.host_block_bytes} bytes; raise it, or use "
                "preemption='recompute'"
            )
        return count * self.groups


def geometry(
    config: EngineConfig,
    model: Model,
    kv_dtype: str,
    impl: str | None = None,
    draft: DraftModel | None = None,
) -> Geometry:
    """The geometry of a cache.

    Args:
        config: a configuration whose max_model_len is known.
        kv_dtype: the dtype of the keys and values.
        impl: the attention that reads them; None: the plain layout, which has as many bytes but for
            latents, whose rows an implementation may pad.
        draft: the draft model whose pages are in the blocks too.

    Raises:
        ValueError: see `views` and `selection_of`.
    """
    layouts = layers_in_groups(config, model, draft)
    selection = selection_of(config, model)
    devices_of_processes = Counter(device.process_index for device in devices_of(model))
    most_devices = max(devices_of_processes.values())
    host_block = block_shape(
        config.block_size, model, kv_dtype, impl, draft, layouts, selection, most_devices
    )
    return Geometry(
        layouts=layouts,
        views=views(config, model, draft),
        selection=selection,
        block=block_shape(config.block_size, model, kv_dtype, impl, draft, layouts, selection),
        host_block_bytes=cache.block_bytes(**host_block) * layouts.groups,
        keeps_states=keeps_states(model, draft),
    )


def keeps_states(model: Model, draft: DraftModel | None = None) -> bool:
    """Whether a layer keeps numbers of blocks."""
    parts = [model.part] if draft is None else [model.part, draft.layers]  # of one dtype
    return any(
        kind.mixer.kept(part, model.dtype).blocks
        for part in parts
        for kind in part.kinds
        if kind.mixer
    )


def _sharding(model: Model) -> cache.CacheSharding | None:
    return model.placement.cache_sharding if model.placement else None


def devices_of(model: Model) -> list[Any]:
    """The devices that a model is on."""
    return model.placement.devices if model.placement else jax.local_devices()[:1]


def layers_in_groups(
    config: EngineConfig, model: Model, draft: DraftModel | None = None
) -> Layouts:
    """The groups of layers with block tables of their own.

    Args:
        config: a configuration whose max_model_len is known. A window as long as the longest
            sequence counts as none.
    """
    layers = _layers(config, model.part, model.dtype)
    has_parts = model.config.has_layer_heads
    block_size = config.block_size if has_parts else 0
    are_alike = len({layer.window for layer in layers}) == 1 and all(
        layer.attention for layer in layers
    )
    if draft is None or not _mixers(draft.layers):
        is_one_table = are_alike and not has_parts
        return Layouts(None if is_one_table else layer_groups(layers, block_size))
    layers_of_draft = _layers(config, draft.layers, draft.dtype)
    return Layouts(*beside(layer_groups(layers, block_size), layer_groups(layers_of_draft)))


def check_layers(config: EngineConfig, model: Model, draft: DraftModel | None = None) -> None:
    """Raises ValueError for options that a model, or a draft model, with layers of its kinds cannot
    have.
    """
    if config.batch_invariant:
        check_batch_invariant(model.config)
    _check_mixers(config, model, draft)
    _check_latents(config, model)
    _check_layer_heads(config, model)


def _check_latents(config: EngineConfig, model: Model) -> None:
    latent = model.config.latent
    if latent is None:
        return
    subject = f"the model keeps latents (rows of {latent.row} numbers)"
    if isinstance(config.kv_policy, KVPolicyOptions) and kv_policies.find(config.kv_policy).selects:
        raise ValueError(
            f"{subject}, of which no blocks are selected yet, and kv_policy is "
            f"{config.kv_policy.name!r}; use kv_policy='full' or 'streaming'"
        )


def _check_layer_heads(config: EngineConfig, model: Model) -> None:
    """Raises ValueError for a KV policy: its rows of attention have whole blocks."""
    if model.config.has_layer_heads and isinstance(config.kv_policy, KVPolicyOptions):
        raise ValueError(
            "the model's layers have heads of several sizes, and kv_policy is "
            f"{config.kv_policy.name!r}, which reads one size; use kv_policy='full'"
        )


def _mixers(c: DecoderConfig) -> list[Mixer]:
    return [kind.mixer for kind in c.kinds if kind.mixer]


def _check_mixers(config: EngineConfig, model: Model, draft: DraftModel | None) -> None:
    mixers = _mixers(model.config)
    if draft is not None and _mixers(draft.layers):
        name = type(_mixers(draft.layers)[0]).__name__
        _check_options(config, f"the draft model has layers without attention ({name})")
    if not mixers:
        return
    subject = f"the model has layers without attention ({type(mixers[0]).__name__})"
    if _has_draft_model(config) and len(mixers) == model.config.layers:
        raise ValueError(
            f"{subject} alone, whose blocks are given back, and a draft model reads the blocks of "
            "all tokens; use speculative.method='ngram', or no drafts"
        )
    _check_options(config, subject)
    block = model.config.block
    if block is not None and block.pages is not Block.pages:
        raise ValueError(
            f"{subject}, which are kept in pages of keys and values, and block {block.__name__} "
            "has other pages; give the layer's kind a mixer of your own in its place"
        )


def _check_options(config: EngineConfig, subject: str) -> None:
    """Raises ValueError for options that no layer without attention can have. subject: who has
    such layers, for the message.
    """
    if config.is_baseline:
        raise ValueError(
            f"{subject}, and a baseline keeps every block in one table; leave reservation, "
            "chunked_prefill and mixed_steps at their defaults"
        )
    if isinstance(config.kv_policy, KVPolicyOptions):
        raise ValueError(
            f"{subject}, whose pages a kv_policy cannot thin out, and kv_policy is "
            f"{config.kv_policy.name!r}; use kv_policy='full'"
        )
    if config.kv_cache_dtype == "float8_e4m3fn":
        raise ValueError(
            f"{subject}, whose numbers stay as they are, and kv_cache_dtype is "
            f"{config.kv_cache_dtype!r}, whose pages would not become smaller; leave it out"
        )


def views(config: EngineConfig, model: Model, draft: DraftModel | None = None) -> tuple[View, ...]:
    """What queries see, by group of layers; () if all of them see everything.

    Raises:
        ValueError: a KV policy for a model whose layers have windows.
    """
    length = _max_model_len(config)
    if isinstance(config.kv_policy, KVPolicyOptions):
        windows = {kind.window for kind in model.config.kinds if kind.window}
        short_windows = sorted(window for window in windows if window < length)
        if short_windows:
            raise ValueError(
                f"kv_policy is {config.kv_policy.name!r}, and layers of the model have windows of "
                f"{short_windows} tokens, which are its own policy; use kv_policy='full'"
            )
        return kv_policies.views(config, table_width(config, length))
    layout = layers_in_groups(config, model, draft).model
    if layout is None:
        window = _layers(config, model.part, model.dtype)[0].window
        if window is None:
            return ()
        windows_of_groups: tuple[int | None, ...] = (window,)
    else:
        windows_of_groups = layout.windows
        if windows_of_groups == (None,):
            return ()
    return tuple(
        [
            View(kv_policies.window_blocks(window, config.block_size) if window else None)
            for window in windows_of_groups
        ]
    )


def selection_of(config: EngineConfig, model: Model) -> Selection | None:
    """What queries read of what they see; None: all of it.

    Args:
        config: a configuration whose max_model_len is known. A selection of all blocks of the
            longest sequence counts as none.

    Raises:
        ValueError: see `views`; or no layer selects blocks; or devices share a key head.
    """
    views_of_groups = views(config, model)
    if not isinstance(config.kv_policy, KVPolicyOptions):
        return None
    top = kv_policies.find(config.kv_policy).selects
    if top is None:
        return None
    width = table_width(config, _max_model_len(config))
    if views_of_groups:
        width = views_of_groups[0].width(width)
    layers = model.config.layers
    if top.dense_layers >= layers:
        raise ValueError(
            f"kv_policy.dense_layers is {top.dense_layers}, and the model has {layers} layers, so "
            f"none selects blocks; set it to at most {layers - 1}, or use kv_policy='full'"
        )
    if model.placement and split.shared_keys(model.config, model.placement.sizes):
        keys = model.config.kv_heads
        raise ValueError(
            f"kv_policy {config.kv_policy.name!r} selects blocks for each key head, and on a mesh "
            f"of {model.placement.sizes.size} devices several have a part of the queries of one of "
            f"{keys} key heads; use at most {keys} devices, or kv_policy='full'"
        )
    count = blocks.needed(top.tokens, config.block_size)
    return Selection(count, top.dense_layers, top.dense_prompts) if count < width else None


def _layers(config: EngineConfig, part: DecoderConfig, dtype: str) -> list[LayerPages]:
    """For each layer, the window before which blocks are given back (None: no block is), and how
    many pages it has.

    The window is None for all layers if a baseline reads those blocks, or if the user keeps them.
    It is None for all layers of attention if there is a draft model, whose attention has the table
    of the first group.

    Args:
        part: of a model or a draft model, what one device has. dtype: of its activations.
    """
    width = table_width(config, _max_model_len(config))
    keeps_all = config.is_baseline or not config.free_window_blocks
    # an implementation may give pages another dtype, of as many bytes
    page_dtype = config.kv_cache_dtype or dtype
    sizes = cache.BlockSizes(
        config.block_size, part.kv_heads, part.head_dim, page_dtype, part.head_dim
    )

    page_numbers = part.page_numbers

    def freeing_window(window: int | None) -> int | None:
        if keeps_all or not window:
            return None
        return window if kv_policies.window_blocks(window, config.block_size) < width else None

    def pages_of(kind: LayerKind) -> LayerPages:
        if kind.mixer is None:
            window = None if _has_draft_model(config) else freeing_window(kind.window)
            return LayerPages(window, parts=page_numbers // part.of_kind(kind).token_numbers)
        pages = kind.mixer.pages(part, sizes, dtype)
        window = freeing_window(kind.mixer.window(config.block_size))
        return LayerPages(window, pages, attention=False)

    return [pages_of(kind) for kind in part.kinds]


def _has_draft_model(config: EngineConfig) -> bool:
    """Whether a model or a head drafts, whose attention has pages in blocks of the model's."""
    return config.speculative is not None and config.speculative.on_device


def _max_model_len(config: EngineConfig) -> int:
    assert config.max_model_len is not None, "resolve the configuration first"
    return config.max_model_len


def block_shape(
    block_size: int,
    model: Model,
    dtype: str,
    impl: str | None = None,
    draft: DraftModel | None = None,
    layouts: Layouts = ONE_TABLE,
    selection: Selection | None = None,
    devices: int = 1,
) -> dict[str, Any]:
    """The shape of a block on some devices, as the arguments of `cache.init`.

    Args:
        dtype: the dtype of the keys and values.
        impl: as of `geometry`.
        draft: the draft model whose pages are in the blocks too.
        layouts: several groups of layers; a block then has the layers of one group, of the model
            and of the draft model.
        selection: what selects blocks; its scores need bounds of a block's keys.
        devices: the number of devices. Each has other heads.

    Raises:
        ValueError: see `_pages_of_layers`.
    """
    part = model.part
    draft_sizes = None
    has_mixers = bool(_mixers(part))
    if draft is not None:
        layers = draft.layers
        has_mixers = has_mixers or bool(_mixers(layers))
        draft_sizes = cache.DraftSizes(
            layouts.draft.size if layouts.draft else layers.layers,
            layers.kv_heads,
            layers.head_dim,
            draft.features,
            draft.dtype,
            attention.page_row(impl, layers.head_dim),
        )
    sizes = cache.BlockSizes(
        block_size=block_size,
        kv_heads=part.kv_heads * devices,
        head_dim=part.head_dim,
        dtype=attention.page_dtype(impl, dtype, words=has_mixers),
        row=attention.page_row(impl, part.head_dim),
    )
    if part.has_layer_heads:  # memory that layers with heads of several sizes have parts of
        numbers = part.page_numbers
        sizes = sizes._replace(kv_heads=devices, head_dim=numbers, row=numbers)
    if part.latent:
        row = attention.latent_row(impl, part.head_dim)
        sizes = sizes._replace(head_dim=row, row=row)
    return {
        **sizes._asdict(),
        "layers": layouts.model.size if layouts.model else part.layers,
        "layer_pages": _pages_of_layers(part, sizes, layouts.model),
        "draft": draft_sizes,
        "dense_layers": selection.dense_layers if selection else None,
    }


def _pages_of_layers(
    c: DecoderConfig, sizes: cache.BlockSizes, layout: LayerGroups | None
) -> tuple[cache.PageShapes, ...]:
    """What each page array of the cache keeps of one block.

    Raises:
        ValueError: layers of two groups share a page array, and keep different things in it.
    """
    block = c.block or Block
    pages: dict[int, cache.PageShapes] = {}
    for layer, kind in enumerate(c.kinds):
        pages_of_layer = block.pages(c, kind, sizes)
        place = layout.places[layer][1] if layout else layer
        if pages.setdefault(place, pages_of_layer) != pages_of_layer:
            raise ValueError(
                f"layer {layer} keeps {pages_of_layer} of a block, and a layer of another window "
                f"in the same blocks keeps {pages[place]}; let all layers keep the same arrays, or "
                "set free_window_blocks=False"
            )
    return tuple([pages[place] for place in range(len(pages))])

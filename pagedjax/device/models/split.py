"""A decoder split over the devices of a mesh: what one device has of each parameter (tensor
parallelism).

    axis      what is split over it
    tensor    heads, the width of every MLP, the vocabulary (Shoeybi et al. 2019, arXiv 1909.08053)
    expert    whole experts; everything else is split over both axes, as if they were one

`device_config` is the shape of one device's part: it runs the same `Decoder` as a single device
does. `split` says which rows and columns of a stored parameter each device has, in the order of the
devices. What does not divide is padded with zeros, which change no result: a zero head adds
nothing, and a zero row of the vocabulary is cut off.

Nothing here needs a device. placement.py puts arrays on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from pagedjax.device import formats
from pagedjax.device.linear import Blocks
from pagedjax.device.models.decoder import DecoderConfig, LayerKind
from pagedjax.device.models.latent import Latent
from pagedjax.options.config import MeshConfig

EXPERT = "expert"
TENSOR = "tensor"
AXES = EXPERT, TENSOR  # in the order of the mesh
PADDING = -1  # in an order of rows or columns: zeros


class Split(NamedTuple):
    """How one dimension of a parameter is split.

    axes: of the mesh; () for a whole copy on each device.
    order: for each place, device after device, the index in the stored parameter, or PADDING; None:
        as the parameter is stored.
    """

    axes: tuple[str, ...] = ()
    order: np.ndarray | None = None


WHOLE = Split()


class Heads(NamedTuple):
    """The stored index of each head, device after device; PADDING for a head of zeros.

    Query heads share a key head in groups. Where there are fewer key heads than devices, several
    devices have the same key head and a part of its group.
    """

    queries: np.ndarray
    keys: np.ndarray


def check(c: DecoderConfig, mesh: MeshConfig) -> None:
    """Raises ValueError if the model cannot be split over a mesh of these sizes."""
    if mesh.expert > 1 and c.experts is None:
        raise ValueError(
            f"mesh.expert is {mesh.expert}, and the model has no experts; use mesh.tensor for all "
            "devices"
        )
    if c.experts is not None and c.experts.count % mesh.expert:
        fit = [n for n in range(1, c.experts.count + 1) if c.experts.count % n == 0]
        raise ValueError(
            f"mesh.expert is {mesh.expert}, and the model's {c.experts.count} experts do not "
            f"divide by it; use one of {fit}, and mesh.tensor for the rest"
        )
    if mesh.size > c.heads:
        raise ValueError(
            f"the mesh has {mesh.size} devices, and the model {c.heads} heads; use at most "
            f"{c.heads} devices for an engine, and several engines for more"
        )
    for name, _ in c.stored if isinstance(c.stored, tuple) else ():
        split(c, mesh, name.split("."))  # which checks that devices have whole blocks


def device_config(c: DecoderConfig, mesh: MeshConfig) -> DecoderConfig:
    """The shape of the part that one device has. Its `axes` are those over which partial sums are
    added.
    """
    n = mesh.size
    part_heads = heads(c, n)
    experts = c.experts
    if experts:
        experts = replace(
            experts,
            intermediate=-(-experts.intermediate // mesh.tensor),
            shared=-(-experts.shared // n),
            devices=mesh.expert,
        )
    return replace(
        c,
        vocab_size=-(-c.vocab_size // n),
        intermediate=-(-c.intermediate // n),
        heads=len(part_heads.queries) // n,
        kv_heads=len(part_heads.keys) // n,
        kinds=tuple([_kind_of_device(c, kind, n) for kind in c.kinds]),
        experts=experts,
        axes=AXES,
        qk_sizes=_qk_sizes(c, part_heads),
    )


def _kind_of_device(c: DecoderConfig, kind: LayerKind, n: int) -> LayerKind:
    """A kind with its own heads divided among n devices; others have no sizes of their own."""
    if kind.heads is None:
        return kind
    queries, keys = heads(c.of_kind(kind), n)
    part_heads = replace(kind.heads, heads=len(queries) // n, kv_heads=len(keys) // n)
    return replace(kind, heads=part_heads)


def _qk_sizes(c: DecoderConfig, part_heads: Heads) -> tuple[int, int]:
    """How many numbers of queries and of keys all devices have together. Heads of zeros do not
    count, and a key head counts once for each device that has it.
    """
    queries, keys = (np.count_nonzero(heads != PADDING) for heads in part_heads)
    return int(queries) * c.head_dim, int(keys) * c.head_dim


def heads(c: DecoderConfig, n: int) -> Heads:
    """The heads of n devices."""
    group = c.heads // c.kv_heads
    if c.kv_heads >= n:
        keys = -(-c.kv_heads // n) * n
        copies = 1
    else:
        # key heads of zeros are added until each one belongs to the same number of devices
        keys = next(k for k in range(c.kv_heads, n + 1) if n % k == 0)
        copies = n // keys
    queries_per_key = -(-group // copies) * copies  # query heads of a key head, with padding
    key, member = np.divmod(np.arange(keys * queries_per_key), queries_per_key)
    queries = np.where((key < c.kv_heads) & (member < group), key * group + member, PADDING)
    stored = np.where(np.arange(keys) < c.kv_heads, np.arange(keys), PADDING)
    return Heads(queries, stored.repeat(copies))


def shared_keys(c: DecoderConfig, mesh: MeshConfig) -> bool:
    """Whether several devices have the same key head, and a part of its query heads."""
    keys = heads(c, mesh.size).keys
    _, copies = np.unique(keys[keys != PADDING], return_counts=True)
    return bool((copies > 1).any())


def padding(c: DecoderConfig, mesh: MeshConfig) -> list[str]:
    """Phrases that say what is padded with zeros, and what several devices have."""
    n = mesh.size
    part = device_config(c, mesh)
    padded_heads = heads(c, n)
    stored_keys = padded_heads.keys[padded_heads.keys != PADDING]
    _, copies_of_keys = np.unique(stored_keys, return_counts=True)
    copies = copies_of_keys[0]  # each key head has the same number
    shared = "latents" if c.latent else "key head"
    phrases = [f"{copies} devices have the same {shared}"] if copies > 1 else []
    sizes = [
        ("heads", c.heads, len(padded_heads.queries)),
        ("key heads", c.kv_heads, len(padded_heads.keys) // copies),
        ("MLP width", c.intermediate, part.intermediate * n),
        ("vocabulary", c.vocab_size, part.vocab_size * n),
    ]
    if c.experts and part.experts:
        width = part.experts.intermediate * mesh.tensor
        sizes.append(("expert width", c.experts.intermediate, width))
        sizes.append(("shared width", c.experts.shared, part.experts.shared * n))
    return phrases + [
        f"{name} padded from {size} to {padded}" for name, size, padded in sizes if padded > size
    ]


def split(c: DecoderConfig, mesh: MeshConfig, path: Sequence[str]) -> tuple[Split, ...]:
    """How each dimension of a stored parameter is split; dimensions behind the given ones are
    whole.

    Args:
        path: of the parameter, as in `ParamSource`, or of an array of a stored matrix.
    """
    name = ".".join(path)
    stored_format = formats.find(formats.format_name(c.stored, name))
    for array in stored_format.arrays[1:]:
        if path[-1].endswith(array.suffix):
            matrix = *path[:-1], path[-1].removesuffix(array.suffix)
            return _split(c, mesh, matrix)[: array.dims]
    splits = _split(c, mesh, path)
    if stored_format.blocks is None or len(splits) == 1:
        return splits
    devices = prod(getattr(mesh, axis) for axis in splits[1].axes)
    if stored_format.ordered and devices > 1:
        raise ValueError(
            f"{name} has its inputs in an order of its own (act-order), and a mesh would divide them "
            f"among {devices} devices; load the model without weight_dtype, or on one device"
        )
    return (splits[0], _of_blocks(splits[1], stored_format.blocks, mesh, name))


def has_whole_blocks(c: DecoderConfig, mesh: MeshConfig, name: str, format_name: str) -> bool:
    """Whether each device has whole blocks of a matrix that would be stored in this format."""
    try:
        split(replace(c, stored=((name, format_name),)), mesh, name.split("."))
    except ValueError:
        return False
    return True


def _of_blocks(columns: Split, blocks: Blocks, mesh: MeshConfig, name: str) -> Split:
    """The split of the bytes of a matrix's rows, from that of its inputs.

    Raises:
        ValueError: a device would have a part of a block.
    """
    if columns.order is None:
        return columns
    devices = prod(getattr(mesh, axis) for axis in columns.axes)
    share = len(columns.order) // devices  # inputs of a device
    if share % blocks.inputs == 0:
        cells = columns.order.reshape(-1, blocks.inputs)
        first = cells[:, :1]
        is_padding = (cells == PADDING).all(1, keepdims=True)
        is_block = (cells == first + np.arange(blocks.inputs)).all(1, keepdims=True)
        if (is_padding | is_block & (first % blocks.inputs == 0)).all():
            places = first // blocks.inputs * blocks.bytes + np.arange(blocks.bytes)
            return Split(columns.axes, np.where(is_padding, PADDING, places).reshape(-1))
    raise ValueError(
        f"{name} is stored in blocks of {blocks.inputs} inputs ({blocks.name}), and on {devices} "
        f"devices each has {share} of its inputs, which are not whole blocks; load the model "
        "without weight_dtype, or use fewer devices"
    )


def _split(c: DecoderConfig, mesh: MeshConfig, path: Sequence[str]) -> tuple[Split, ...]:
    n = mesh.size
    owner = path[-2] if len(path) > 1 else ""
    if path[-1] == "embed" or owner == "head":
        return (Split(AXES, _padded(c.vocab_size, n)),)
    if "attn" in path and path[0] == "blocks" and c.kinds[int(path[1])].mixer:
        return (WHOLE,)
    if c.qk_norm == "width" and owner in ("q_norm", "k_norm"):
        padded_heads = heads(c, n)
        kind = padded_heads.queries if owner == "q_norm" else padded_heads.keys
        return (Split(AXES, _row_order(kind, c.head_dim)),)
    if "attn" in path and path[0] == "blocks":
        c = c.of_kind(c.kinds[int(path[1])])
    if path[-1] == "sinks":
        return (Split(AXES, heads(c, n).queries),)
    if "attn" in path and c.latent:
        return _latent_attention(c, c.latent, n, path)
    if "attn" in path and owner in ("qkv", "out"):
        return _attention(c, n, owner, path[-1])
    if "mlp" in path and owner != "router":
        if "shared" in path:
            assert c.experts is not None
            return _mlp(c.experts.shared, True, n, owner, path[-1])
        if c.kinds[int(path[1])].sparse:
            return _experts(c, mesh, path[-1])
        return _mlp(c.intermediate, c.gated, n, owner, path[-1])
    return (WHOLE,)


def _attention(c: DecoderConfig, n: int, owner: str, name: str) -> tuple[Split, ...]:
    """The weight or bias `name` of the layer `owner`, "qkv" or "out", over n devices."""
    padded_heads = heads(c, n)
    if owner == "out":
        if name != "weight":
            return (WHOLE,)
        return (WHOLE, Split(AXES, _row_order(padded_heads.queries, c.head_dim)))
    query_kinds = (padded_heads.queries,) * (1 + c.attn_gate)
    key_kinds = (padded_heads.keys,) * (1 if c.shared_values else 2)
    kinds = *query_kinds, *key_kinds
    counts = [c.heads] * len(query_kinds) + [c.kv_heads] * len(key_kinds)
    first = np.cumsum([0, *counts[:-1]])
    shares = [
        np.where(kind == PADDING, PADDING, kind + start).reshape(n, -1)
        for kind, start in zip(kinds, first, strict=True)
    ]
    return (Split(AXES, _row_order(np.concatenate(shares, axis=1).reshape(-1), c.head_dim)),)


def _latent_attention(
    c: DecoderConfig, latent: Latent, n: int, path: Sequence[str]
) -> tuple[Split, ...]:
    """A parameter of latent attention over n devices: heads are divided, and each device has what
    makes latents.
    """
    queries = heads(c, n).queries
    owner, name = path[-2:]
    if name == "kv_up":
        return (Split(AXES, _row_order(queries, latent.up)),)
    if name != "weight":
        return (WHOLE,)
    if owner == "out":
        return (WHOLE, Split(AXES, _row_order(queries, latent.value)))
    if owner == "q_up":
        return (Split(AXES, _row_order(queries, latent.query)),)
    if owner == "down" and latent.query_rank is None:
        query_rows = _row_order(queries, latent.query).reshape(n, -1)
        first, end = c.parts["attn.down"]
        shared_rows = np.broadcast_to(np.arange(first, end), (n, end - first))
        return (Split(AXES, np.concatenate([query_rows, shared_rows], axis=1).reshape(-1)),)
    return (WHOLE,)


def _mlp(size: int, gated: bool, n: int, owner: str, name: str) -> tuple[Split, ...]:
    """The weight or bias `name` of the layer `owner`, "up" or "down", over n devices."""
    width = _padded(size, n)
    if owner == "down":
        return (WHOLE, Split(AXES, width)) if name == "weight" else (WHOLE,)
    return (Split(AXES, _gated(width, size, n) if gated else width),)


def _experts(c: DecoderConfig, mesh: MeshConfig, name: str) -> tuple[Split, ...]:
    """Rows of all experts, expert after expert; a device has the same share of the width of each of
    its experts.
    """
    assert c.experts is not None
    count = c.experts.count
    size = c.experts.intermediate
    width = _padded(size, mesh.tensor)
    if name == "down":
        return (Split((EXPERT,)), Split((TENSOR,), width))
    if name == "down_bias":
        return (Split((EXPERT,)),)
    # axes: mesh.expert, mesh.tensor, the experts of a device, rows of an expert
    expert_rows = _gated(width, size, mesh.tensor).reshape(1, mesh.tensor, 1, -1)
    first = np.arange(count).reshape(mesh.expert, 1, -1, 1) * 2 * size
    rows = np.where(expert_rows == PADDING, PADDING, first + expert_rows)
    return (Split(AXES, rows.reshape(-1)),)


def _gated(width: np.ndarray, size: int, n: int) -> np.ndarray:
    """The order of the 2 * size rows of gate and up: on each of n devices, its gates and then its
    ups.
    """
    up = np.where(width == PADDING, PADDING, width + size)
    return np.concatenate([width.reshape(n, -1), up.reshape(n, -1)], axis=1).reshape(-1)


def _padded(size: int, n: int) -> np.ndarray:
    """0, 1, 2 ... and PADDING up to a multiple of n."""
    places = np.arange(-(-size // n) * n)
    return np.where(places < size, places, PADDING)


def _row_order(order: np.ndarray, size: int) -> np.ndarray:
    """The order of rows, from that of heads with `size` rows each."""
    rows = order[:, None] * size + np.arange(size)
    return np.where(order[:, None] == PADDING, PADDING, rows).reshape(-1)

"""Checkpoint -> parameters: a table says which tensors make which parameter. One error lists all
differences.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from pagedjax.device import formats
from pagedjax.device.formats import Stored, is_stored, packed_matrices
from pagedjax.device.models.param_table import ParamSource
from pagedjax.options.config import DType, one_of
from pagedjax.weights.checkpoint import Checkpoint, Tensor
from pagedjax.weights.huggingface import np_dtype
from pagedjax.weights.stored_rows import assembled
from pagedjax.weights.tree import dtype_of, is_float, named, nested

if TYPE_CHECKING:
    from tqdm import tqdm

    from pagedjax.device.placement import Placement

# threads; most of the time is the first access to new memory, which is slow on one core
READERS = 2
BUFFERS = ("*.rotary_emb.inv_freq",)  # computed from the config; older checkpoints contain it
# the same in an Orbax checkpoint: a trainer that saves its whole state stores it
OWN_BUFFERS = ("angles",)


Pack = Callable[[str, np.ndarray], np.ndarray]  # (name, stored values) -> values of the model


def as_stored(name: str, stored: np.ndarray) -> np.ndarray:
    """The `Pack` that changes nothing."""
    return stored


def load_params(
    checkpoint: Checkpoint,
    table: Sequence[ParamSource],
    dtype: str,
    *,
    stored: Stored = None,
    progress: bool = False,
    ignore: Sequence[str] = (),
    placement: Placement | None = None,
    pack: Pack = as_stored,
) -> dict[str, Any]:
    """A nested dict of jax arrays of `dtype`, keyed by `path`. The host needs memory for `READERS`
    parameters at once.

    An Orbax checkpoint contains the finished parameters: only the paths and shapes of the table are
    used.

    Args:
        stored: the format (device/formats) in which matrices are packed, from the values of the
            checkpoint. Matrices of an Orbax checkpoint are restored in `dtype` first. Matrices with
            formats of their own are read as blocks (stored_rows.py), and never are floats.
        ignore: patterns of tensors that are allowed but not in the table, as `Family.ignored`.
        placement: where the parameters go on a mesh. Each device gets its part of a parameter
            directly.
        pack: brings a parameter into the layout of the model's products.

    Raises:
        ValueError: tensors are missing, unexpected or have another shape; one message lists all,
            with the files.
    """
    import jax

    one_of("dtype", dtype, get_args(DType))

    def put(name: str, values: np.ndarray) -> jax.Array:
        if placement:
            return placement.put(name.split("."), values)
        return jax.device_put(pack(name, values))

    orbax = checkpoint.format == "orbax"
    if orbax and not placement:
        restored = named(restore_params(checkpoint, table, dtype))
        return nested(_packed_params(restored, stored, put))
    if orbax:
        table = own_table(table)
        ignore = OWN_BUFFERS
    table = table_of(checkpoint, table)
    check_table(checkpoint, table, ignore)
    entries = [entry for entry in table if entry.sources[0] in checkpoint.tensors]

    def read(entry: ParamSource) -> dict[str, Any]:
        values = _host_values(checkpoint, entry, dtype, stored)
        # device_put copies once, jnp.asarray twice. Without the wait, many host arrays would be in
        # memory while their copies wait.
        arrays = jax.block_until_ready({name: put(name, x) for name, x in values.items()})
        gc.collect(0)  # JAX releases copied arrays at its next call or at a collection
        return arrays

    params: dict[str, Any] = {}
    # Orbax's reads are not independent
    with ThreadPoolExecutor(1 if orbax else READERS) as pool:
        steps = _bar(entries) if progress else entries
        for _, arrays in zip(steps, pool.map(read, entries), strict=True):
            params |= arrays
    return nested(params)


def _packed_params(
    restored: dict[str, Any], stored: Stored, put: Callable[[str, np.ndarray], Any]
) -> dict[str, Any]:
    """Parameters by name, on the device, with matrices in the format `stored`.

    It empties `restored`, one parameter at a time, so that there is no second copy of the model.

    Args:
        put: (name, values) -> the array on the device.
    """
    params: dict[str, Any] = {}
    for name in list(restored):
        values = {name: np.asarray(restored.pop(name))}
        values |= dict(packed_matrices(stored, values))
        params |= {packed_name: put(packed_name, x) for packed_name, x in values.items()}
    return params


def _host_values(
    checkpoint: Checkpoint, entry: ParamSource, dtype: str, stored: Stored
) -> dict[str, np.ndarray]:
    """A parameter on the host, by name; a matrix as the arrays of its format."""
    name = ".".join(entry.path)
    if isinstance(stored, tuple):
        format_name = formats.format_name(stored, name)
        if format_name is None:
            return {name: assemble(checkpoint.tensors, entry, dtype)}
        return assembled(checkpoint.tensors, entry, format_name)
    packs = stored is not None and is_stored(entry.path, entry.shape)
    if packs and checkpoint.format != "orbax":
        # The values of an Orbax checkpoint are rounded to `dtype` before they are packed, on a mesh
        # as on one device.
        dtype = "float32"
    values = {name: assemble(checkpoint.tensors, entry, dtype)}
    return values | dict(packed_matrices(stored, values))


def restore_params(
    checkpoint: Checkpoint, table: Sequence[ParamSource], dtype: str, *, sharding: Any = None
) -> dict[str, Any]:
    """`load_params` of an Orbax checkpoint, directly to devices; `sharding` as in
    `orbax_checkpoint.restore`.
    """
    from pagedjax.weights.orbax_checkpoint import restore

    table = own_table(table)
    check_table(checkpoint, table, OWN_BUFFERS)
    shapes = {entry.sources[0]: entry.shape for entry in table}
    shapes = {name: shape for name, shape in shapes.items() if name in checkpoint.tensors}
    return restore(checkpoint, shapes, dtype, sharding=sharding)


def own_table(table: Sequence[ParamSource]) -> tuple[ParamSource, ...]:
    """The table for tensors that are finished parameters, named by their path."""
    return tuple(
        ParamSource(e.path, (".".join(e.path),), e.shape, optional=e.optional) for e in table
    )


def table_of(checkpoint: Checkpoint, table: Sequence[ParamSource]) -> list[ParamSource]:
    """The table for the tensors of a checkpoint, which may have some in another way."""
    return [entry.in_files(checkpoint.tensors) for entry in table]


def assemble(tensors: Mapping[str, Tensor], entry: ParamSource, dtype: str) -> np.ndarray:
    """The parameter on the host: [*entry.shape], of a model of `dtype`."""
    own_dtype = np_dtype(dtype_of(entry.path, dtype))
    parts = [tensors[name].read().astype(own_dtype, copy=False) for name in entry.sources]
    value = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if entry.stacked:
        value = np.swapaxes(value, 1, 2) if entry.transpose else value
        value = value.reshape(entry.shape)
    if entry.order:
        value = value[np.asarray(entry.order)]
    turned = entry.transpose and not entry.stacked
    return np.ascontiguousarray(value.T) if turned else value


def check_table(
    checkpoint: Checkpoint, table: Sequence[ParamSource], ignore: Sequence[str] = ()
) -> None:
    """Raise one ValueError that lists all differences of table and checkpoint: names, shapes, and
    kinds of dtype.
    """
    problems = [problem for entry in table for problem in _problems(checkpoint.tensors, entry)]
    sources = {name for entry in table for name in entry.sources} | checkpoint.spare
    layers = str(checkpoint.config.get("num_hidden_layers"))
    allowed = [*BUFFERS, *[pattern.replace("{layers}", layers) for pattern in ignore]]
    if checkpoint.config.get("tie_word_embeddings"):
        allowed.append("lm_head.weight")
    for name, tensor in checkpoint.tensors.items():
        if name not in sources and not any(fnmatchcase(name, pattern) for pattern in allowed):
            problems.append(f"unexpected: {name} {tensor.shape} in {tensor.file.name}")
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(
            f"{checkpoint.path} does not fit the {checkpoint.config.get('model_type')} model its "
            f"config describes; differences: {len(problems)} (is it the config of another model, "
            f"or is a file missing?)\n  {lines}"
        )


def _problems(tensors: Mapping[str, Tensor], entry: ParamSource) -> list[str]:
    """The differences in the sources of one parameter."""
    absent = [name for name in entry.sources if name not in tensors]
    if entry.optional and len(absent) == len(entry.sources):
        return []
    joined = entry.stored_shape
    rows = entry.rows or (joined[:1] if len(entry.sources) == 1 else ())
    # the shape of each source; [] if the table gives only their sum
    shapes = [(count, *joined[1:]) for count in rows] if joined else [()]
    problems = [
        f"missing: {name}{f' {shapes[i]}' if shapes else ''}"
        for i, name in enumerate(entry.sources)
        if name in absent
    ]
    present = [tensors[name] for name in entry.sources if name in tensors]
    if shapes:
        pairs = [
            (tensors[name], shape)
            for name, shape in zip(entry.sources, shapes, strict=True)
            if name in tensors
        ]
        wrong = [(tensor, str(shape)) for tensor, shape in pairs if tensor.shape != shape]
    else:
        row_shape = joined[1:]
        wrong = [
            (tensor, f"(any, {', '.join(map(str, row_shape))})")
            for tensor in present
            if tensor.shape[1:] != row_shape
        ]
        total = sum(tensor.shape[0] for tensor in present)
        if not wrong and not absent and total != joined[0]:
            wrong = [(tensor, f"{joined[0]} rows together, not {total}") for tensor in present]
    problems += [
        f"shape of {t.name}: expected {shape}, found {t.shape} in {t.file.name}"
        for t, shape in wrong
    ]
    return problems + [
        f"dtype of {t.name}: expected a floating point type, found {t.dtype.name} in {t.file.name}"
        for t in present
        if not is_float(t.dtype)
    ]


def _bar(entries: Sequence[ParamSource]) -> tqdm:
    from tqdm import tqdm

    size = sum(prod(entry.shape) for entry in entries)
    return tqdm(entries, desc=f"loading {size / 1e6:.0f} M parameters", unit="tensor", leave=False)

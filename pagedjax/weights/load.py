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

from pagedjax.config import DType, one_of
from pagedjax.device.models.param_table import ParamSource
from pagedjax.weights.checkpoint import Checkpoint, Tensor
from pagedjax.weights.huggingface import np_dtype
from pagedjax.weights.int8 import has_scales, with_scales
from pagedjax.weights.tree import is_float, named, nested

if TYPE_CHECKING:
    from tqdm import tqdm

    from pagedjax.device.placement import Placement

READERS = (
    2  # threads; most of the time is the first access to new memory, which is slow on one core
)
BUFFERS = ("*.rotary_emb.inv_freq",)  # computed from the config; older checkpoints contain it
# the same in our own trees: stored by a trainer that saves its whole state
OWN_BUFFERS = ("angles",)


Pack = Callable[[str, np.ndarray], np.ndarray]  # (name, as it is stored) -> as the model has it


def as_stored(name: str, stored: np.ndarray) -> np.ndarray:
    return stored


def load_params(
    checkpoint: Checkpoint,
    table: Sequence[ParamSource],
    dtype: str,
    *,
    int8: bool = False,
    progress: bool = False,
    ignore: Sequence[str] = (),
    placement: Placement | None = None,
    pack: Pack = as_stored,
) -> dict[str, Any]:
    """A nested dict of jax arrays of `dtype`, keyed by `path`. The host needs memory for `READERS`
    parameters at once.

    An Orbax checkpoint contains the finished parameters: only the paths and shapes of the table are
    used.

    pack: puts a parameter into the layout of the model's products.
    placement: of the mesh on which the parameters go, each straight to the devices that have a part
        of it.

    int8: round matrices from the stored values to int8, and add their scales (int8.py). Matrices of
        an Orbax checkpoint are restored in `dtype` first.
    ignore: name patterns ("*" matches anything) of tensors that are allowed but not in the table.

    Raises:
        ValueError: tensors are missing, unexpected or have another shape; one message lists all,
            with the files.
    """
    import jax

    one_of("dtype", dtype, get_args(DType))
    put = (
        placement.put
        if placement
        else lambda path, values: jax.device_put(pack(".".join(path), values))
    )
    if checkpoint.format == "orbax" and not placement:
        restored = named(restore_params(checkpoint, table, dtype))
        params = {}
        for name in list(restored):  # one at a time, so that there is no second copy of the model
            one = {name: np.asarray(restored.pop(name))}
            params |= {
                name: put(name.split("."), x)
                for name, x in (with_scales(one) if int8 else one.items())
            }
        return nested(params)
    if checkpoint.format == "orbax":
        table, ignore = own_table(table), OWN_BUFFERS
    check_table(checkpoint, table, ignore)
    present = [entry for entry in table if entry.sources[0] in checkpoint.tensors]

    def read(entry: ParamSource) -> dict[str, Any]:
        name, small = ".".join(entry.path), int8 and has_scales(entry.path, entry.shape)
        # an Orbax checkpoint is restored in `dtype` and then rounded, on a mesh as without one
        stored = dtype if checkpoint.format == "orbax" or not small else "float32"
        values = {name: assemble(checkpoint.tensors, entry, np_dtype(stored))}
        # device_put copies once, jnp.asarray twice. Without the wait, many arrays would be in
        # memory before their copy.
        values = dict(with_scales(values)) if small else values
        values = jax.block_until_ready(
            {name: put(name.split("."), x) for name, x in values.items()}
        )
        gc.collect(0)  # JAX releases copied arrays at its next call or at a collection
        return values

    params: dict[str, Any] = {}
    readers = 1 if checkpoint.format == "orbax" else READERS  # Orbax's reads are not independent
    with ThreadPoolExecutor(readers) as pool:
        values = pool.map(read, present)
        for _ in _bar(present) if progress else present:
            params |= next(values)
    return nested(params)


def restore_params(
    checkpoint: Checkpoint, table: Sequence[ParamSource], dtype: str, *, sharding: Any = None
) -> dict[str, Any]:
    """`load_params` of an Orbax checkpoint, directly to devices; `sharding` as in
    `orbax_checkpoint.restore`.
    """
    from pagedjax.weights.orbax_checkpoint import restore

    table = own_table(table)
    check_table(checkpoint, table, OWN_BUFFERS)
    shapes = {
        name: entry.shape for entry in table if (name := entry.sources[0]) in checkpoint.tensors
    }
    return restore(checkpoint, shapes, dtype, sharding=sharding)


def own_table(table: Sequence[ParamSource]) -> tuple[ParamSource, ...]:
    """The table for tensors that are finished parameters, named by their path."""
    return tuple(
        ParamSource(e.path, (".".join(e.path),), e.shape, optional=e.optional) for e in table
    )


def assemble(tensors: Mapping[str, Tensor], entry: ParamSource, dtype: np.dtype) -> np.ndarray:
    """The parameter on the host: [*entry.shape] of `dtype`."""
    parts = [tensors[name].read().astype(dtype, copy=False) for name in entry.sources]
    value = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.ascontiguousarray(value.T) if entry.transpose else value


def check_table(
    checkpoint: Checkpoint, table: Sequence[ParamSource], ignore: Sequence[str] = ()
) -> None:
    """Raise one ValueError that lists all differences of table and checkpoint: names, shapes, and
    kinds of dtype.
    """
    problems = [problem for entry in table for problem in _problems(checkpoint.tensors, entry)]
    named = {name for entry in table for name in entry.sources}
    allowed = [
        *BUFFERS,
        *ignore,
        *(["lm_head.weight"] if checkpoint.config.get("tie_word_embeddings") else []),
    ]
    for name, tensor in checkpoint.tensors.items():
        if name not in named and not any(fnmatchcase(name, pattern) for pattern in allowed):
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
    joined = entry.shape[::-1] if entry.transpose else entry.shape
    rows = entry.rows or (joined[:1] if len(entry.sources) == 1 else ())
    wanted = [(count, *joined[1:]) for count in rows] if joined else [()]
    problems = [
        f"missing: {name}{_of(wanted, i)}" for i, name in enumerate(entry.sources) if name in absent
    ]
    found = [tensors[name] for name in entry.sources if name in tensors]
    if wanted:
        pairs = [
            (tensors[name], shape)
            for name, shape in zip(entry.sources, wanted, strict=True)
            if name in tensors
        ]
        wrong = [(tensor, str(shape)) for tensor, shape in pairs if tensor.shape != shape]
    else:
        rest = joined[1:]
        wrong = [
            (tensor, f"(any, {', '.join(map(str, rest))})")
            for tensor in found
            if tensor.shape[1:] != rest
        ]
        total = sum(tensor.shape[0] for tensor in found)
        if not wrong and not absent and total != joined[0]:
            wrong = [(tensor, f"{joined[0]} rows together, not {total}") for tensor in found]
    problems += [
        f"shape of {t.name}: expected {shape}, found {t.shape} in {t.file.name}"
        for t, shape in wrong
    ]
    odd = [tensor for tensor in found if not is_float(tensor.dtype)]
    return problems + [
        f"dtype of {t.name}: expected a floating point type, found {t.dtype.name} in {t.file.name}"
        for t in odd
    ]


def _of(wanted: Sequence[tuple[int, ...]], index: int) -> str:
    return f" {wanted[index]}" if wanted else ""


def _bar(entries: Sequence[ParamSource]) -> tqdm:
    from tqdm import tqdm

    size = sum(prod(entry.shape) for entry in entries)
    return tqdm(entries, desc=f"loading {size / 1e6:.0f} M parameters", unit="tensor", leave=False)

"""Parameters in an Orbax checkpoint, restored directly to devices. Orbax is imported only when it
is needed.

    FOLDER/config.json, generation_config.json, tokenizer.json ...      as in a Hugging Face directory
    FOLDER/params/                                                      by Orbax: one array for each parameter

The name of a tensor is the path of its parameter, "blocks.0.attn.qkv.weight". A trainer's
checkpoint from `StandardCheckpointer().save(folder / "params", nnx.state(model))` has the same
names and can be read too.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedjax.weights.architectures import normalised
from pagedjax.weights.checkpoint import Checkpoint, Tensor
from pagedjax.weights.huggingface import np_dtype, read_json
from pagedjax.weights.tree import dtype_of, name_of, nested

if TYPE_CHECKING:
    import jax

    from pagedjax.weights.architectures import Family

PARAMS = "params"
# files that Orbax writes into a checkpoint's folder
MARKS = (
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "manifest.ocdbt",
)
LATE = 0.2  # seconds to wait, after a read failed, until the other reads end
# Parameters are restored group by group. A group has at most this many times the bytes of the
# largest parameter.
GROUP_LIMIT = 2


def is_orbax(path: Path) -> bool:
    """Whether a directory is or contains an Orbax checkpoint, and has no *.safetensors."""
    return bool(orbax_folders(path)) and next(path.glob("*.safetensors"), None) is None


def orbax_folders(path: Path) -> list[Path]:
    """Orbax checkpoints: the directory itself and its subdirectories."""
    inside = sorted(child for child in path.iterdir() if child.is_dir())
    return [
        folder for folder in (path, *inside) if any((folder / mark).is_file() for mark in MARKS)
    ]


def open_orbax(path: Path, family: Family | None = None) -> Checkpoint:
    """Open a folder that `pagedjax convert --to orbax` wrote, or one with the same layout.

    Args:
        family: the user's own family, if it is not a built-in one.

    Raises:
        FileNotFoundError: the Orbax checkpoint has another layout; names what is missing.
        ValueError: damaged metadata or JSON, or a model that is not supported.
    """
    layout = (
        "a model's folder has config.json (as from Hugging Face), tokenizer.json and Orbax's "
        "params/"
    )
    folders = orbax_folders(path)
    if path / PARAMS not in folders:
        places = ", ".join("." if folder == path else f"{folder.name}/" for folder in folders)
        raise FileNotFoundError(
            f"{path} is an Orbax checkpoint without params/ (Orbax's files are in {places}); "
            f"{layout}; for another layout load the parameters yourself and use "
            "pagedjax.from_params"
        )
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is an Orbax checkpoint without config.json; {layout}")
    config = normalised(read_json(path / "config.json"), path / "config.json", family)
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    return Checkpoint(
        path, "orbax", config, tensors(path / PARAMS), generation_config, family=family
    )


def tensors(folder: Path) -> dict[str, Tensor]:
    """The stored arrays, by their paths. Raises ValueError for damaged metadata."""
    stored = {}
    for keys, leaf in _leaves(folder)[0]:
        name = name_of(keys)
        # a value that is not an array has no dtype
        dtype = np.dtype(getattr(leaf, "dtype", None) or object)
        shape = tuple(getattr(leaf, "shape", None) or ())
        read = partial(_read, folder, name, shape, dtype)
        stored[name] = Tensor(name, shape, dtype, folder, dtype.name, read)
    return stored


def _leaves(folder: Path) -> tuple[list[tuple[Any, Any]], Any]:
    """([(key path, Orbax's metadata) of each stored value], structure of the tree)."""
    import jax
    import orbax.checkpoint as ocp

    message = ""
    with _quiet():
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
                tree = orbax.metadata(folder).item_metadata.tree
            return jax.tree_util.tree_flatten_with_path(tree)
        except Exception as error:
            # for a damaged file Orbax returns None as metadata, or raises one of many errors
            message = (
                f"{folder} is damaged, or is not an Orbax checkpoint of a tree: its metadata "
                f"cannot be read ({_first_line(error)}); convert or save the model again"
            )
        _settle()
    raise ValueError(message)


def restore(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    *,
    sharding: Any = None,
) -> dict[str, Any]:
    """The named parameters as jax arrays of `dtype`, nested by their path. Values are rounded once,
    when they are read.

    Besides the arrays, this needs host memory for data in transfer: `GROUP_LIMIT` times the stored
    size of the largest parameter, and its compressed bytes if the checkpoint is compressed.

    Args:
        shapes: the shapes of the parameters to restore, by name; other stored values are not read.
            The checkpoint must have these parameters, see `load.check_table`.
        sharding: a sharding for all, or a function (name, shape) -> sharding; None: all go to the
            default device.

    Raises:
        ValueError: data is missing or damaged; names the folder and each damaged parameter.
    """
    import jax

    if sharding is None:
        sharding = jax.device_put(np.zeros(())).sharding
    place = sharding if callable(sharding) else lambda name, shape: sharding
    specs = {
        name: jax.ShapeDtypeStruct(
            shape, np_dtype(dtype_of(name.split("."), dtype)), sharding=place(name, shape)
        )
        for name, shape in shapes.items()
    }
    return nested(_restore_or_report(checkpoint.path / PARAMS, specs))


def _restore_or_report(folder: Path, specs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Restore arrays by name. An error names only the damaged parameters."""
    message = ""
    with _quiet():
        try:
            return _restore_groups(folder, specs)
        except Exception as error:
            # Orbax raises a plain Exception with a long text, without the parameter's name
            message = _damage_report(folder, specs, error)
        _settle()
    raise ValueError(message)


def _settle() -> None:
    """Wait until the tasks that Orbax started and the reads in TensorStore's threads have ended.

    Callers do so after their `except` block, and then raise an error of their own: the error that
    they caught keeps Orbax's tasks alive until its block ends.
    """
    gc.collect()
    time.sleep(LATE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Python's messages about Orbax's other reads after one array could not be read.

    Some messages are about coroutines that are no longer awaited. Others name no object: a read
    that ends in one of TensorStore's threads notifies Orbax's event loop, which is already closed.
    """
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        late = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        if not (late or inspect.iscoroutine(unraisable.object)):
            previous_hook(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook


def _restore_groups(folder: Path, specs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Restore arrays by name, group by group.

    Orbax's own limit (`restore_concurrent_gb`) is not enough: it does not count data that is still
    being copied to the device, and it counts bytes in the dtype of `specs`, although the stored
    dtype may be larger.
    """
    import jax
    import orbax.checkpoint as ocp

    leaves, structure = _leaves(folder)
    stored = {name_of(keys): np.dtype(getattr(leaf, "dtype", None)) for keys, leaf in leaves}
    sizes = {
        name: prod(x.shape) * max(x.dtype.itemsize, stored[name].itemsize)
        for name, x in specs.items()
    }
    args = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array, dtype=x.dtype, sharding=x.sharding, global_shape=x.shape
        )
        for name, x in specs.items()
    }
    names = [name_of(keys) for keys, _ in leaves]
    arrays = {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        for group in _groups(sizes):
            items = [specs[name] if name in group else ocp.PLACEHOLDER for name in names]
            item_args = [args[name] if name in group else ocp.RestoreArgs() for name in names]
            tree = orbax.restore(
                folder,
                args=ocp.args.PyTreeRestore(
                    item=structure.unflatten(items), restore_args=structure.unflatten(item_args)
                ),
            )
            restored = zip(names, jax.tree.leaves(tree), strict=True)
            arrays |= jax.block_until_ready({name: x for name, x in restored if name in group})
            gc.collect(0)  # JAX releases copied arrays at its next call or at a collection
    return arrays


def _groups(sizes: Mapping[str, int]) -> Iterator[set[str]]:
    """The names in order, in sets of at most `GROUP_LIMIT` times the largest size."""
    room = limit = GROUP_LIMIT * max(sizes.values(), default=0)
    group: set[str] = set()
    for name, size in sizes.items():
        if size > room:
            yield group
            group = set()
            room = limit
        group.add(name)
        room -= size
    if group:
        yield group


def _damage_report(
    folder: Path, specs: Mapping[str, jax.ShapeDtypeStruct], error: Exception
) -> str:
    """The text of an error with all unreadable parameters.

    Reads each parameter: Orbax stops at the first unreadable one and may not name it.
    """
    unreadable = []
    for name, x in specs.items():
        try:
            _restore_groups(folder, {name: x})
        except Exception as reason:
            unreadable.append(f"unreadable: {name} {x.shape} ({_first_line(reason)})")
    if not unreadable:
        return f"{folder} could not be restored ({_first_line(error)})"
    lines = "\n  ".join(unreadable)
    return (
        f"{folder} is damaged or incomplete; parameters: {len(unreadable)}; convert or save the "
        f"model again\n  {lines}"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no detail'}"[:200]


def _read(folder: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Read one parameter to the host."""
    import jax

    try:  # not through an accelerator's memory
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        device = jax.local_devices()[0]
    host = jax.sharding.SingleDeviceSharding(device)
    specs = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=host)}
    return np.array(_restore_or_report(folder, specs)[name])


def write(folder: Path, params: Mapping[str, Any]) -> None:
    """Write a tree of jax arrays as the Orbax checkpoint `folder`, and wait until it is complete.

    It is not compressed. Compression would save a tenth of the size, but take 3 times as long to
    write and 1.5 times as long to read.
    """
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as orbax:
        orbax.save(folder, args=ocp.args.PyTreeSave(dict(params)))

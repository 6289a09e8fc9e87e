"""A model's own parameters in an Orbax checkpoint: restored straight to devices. Orbax is imported when it is needed.

    FOLDER/config.json, generation_config.json, tokenizer.json ...      as in a Hugging Face directory
    FOLDER/params/                                                      Orbax's: the fused tree, one array a parameter

Here a tensor's name is its parameter's path, "blocks.0.attn.qkv.weight". What a trainer saves with
`StandardCheckpointer().save(folder / "params", nnx.state(model))` has the same names and is read as well.
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
from pagedjax.weights.tree import name_of, nested

if TYPE_CHECKING:
    import jax

PARAMS = "params"
MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")  # files that Orbax writes at the top of a checkpoint
LATE = 0.2  # seconds in which reads end that were under way when another one failed
AT_A_TIME = 2  # of the largest parameters, on their way from disk to device


def is_orbax(path: Path) -> bool:
    """Whether a directory is an Orbax checkpoint or holds one, and no *.safetensors."""
    return bool(orbax_folders(path)) and next(path.glob("*.safetensors"), None) is None


def orbax_folders(path: Path) -> list[Path]:
    """The directory itself and those in it, if Orbax wrote them."""
    inside = sorted(child for child in path.iterdir() if child.is_dir())
    return [folder for folder in (path, *inside) if any((folder / mark).is_file() for mark in MARKS)]


def open_orbax(path: Path) -> Checkpoint:
    """Open a folder that `pagedjax convert --to orbax` wrote, or one laid out like it.

    Raises:
        FileNotFoundError: an Orbax checkpoint of something else; says what is missing.
        ValueError: metadata or JSON that cannot be read, or a model that is not supported.
    """
    right = "a model's folder has config.json (as Hugging Face writes it), tokenizer.json and Orbax's params/"
    if path / PARAMS not in (found := orbax_folders(path)):
        places = ", ".join("." if folder == path else f"{folder.name}/" for folder in found)
        raise FileNotFoundError(
            f"{path} is an Orbax checkpoint without params/ (Orbax's files are in {places}); {right}; "
            "hand in what is laid out otherwise with pagedjax.from_params"
        )
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is an Orbax checkpoint without config.json; {right}")
    config = normalised(read_json(path / "config.json"), path / "config.json")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    return Checkpoint(path, "orbax", config, _tensors(path / PARAMS), generation_config)


def _tensors(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for keys, leaf in _leaves(folder)[0]:
        name = name_of(keys)
        dtype = np.dtype(getattr(leaf, "dtype", None) or object)  # what is no array has neither
        shape = tuple(getattr(leaf, "shape", None) or ())
        read = partial(_read, folder, name, shape, dtype)
        tensors[name] = Tensor(name, shape, dtype, folder, dtype.name, read)
    return tensors


def _leaves(folder: Path) -> tuple[list[tuple[Any, Any]], Any]:
    """What Orbax's metadata says of each stored value, with its key path, and the structure of the whole."""
    import jax
    import orbax.checkpoint as ocp

    message = ""
    with _quiet():
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
                tree = orbax.metadata(folder).item_metadata.tree
            return jax.tree_util.tree_flatten_with_path(tree)
        except Exception as error:  # a damaged file makes None of the metadata, or one of Orbax's many errors
            message = (
                f"{folder} is damaged, or no Orbax checkpoint of a tree: no metadata can be read "
                f"({_first_line(error)}); convert or save the model again"
            )
        _settle()
    raise ValueError(message)


def restore(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], dtype: str, *, sharding: Any = None
) -> dict[str, Any]:
    """The named parameters as jax arrays of `dtype`, nested by their path. Values are rounded once, as they are read.

    Beside the arrays themselves, what is on its way takes the host memory of `AT_A_TIME` of the largest as they are
    stored, and of their compressed bytes where a trainer's checkpoint has such.

    Args:
        shapes: of the parameters to restore, by name; what else is stored is not read. The checkpoint has them, see
            `load.check_table`.
        sharding: where they go: one for all, or a function of name and shape; None is the default device.

    Raises:
        ValueError: data that is missing or damaged; names the folder and each such parameter.
    """
    import jax

    if sharding is None:
        sharding = jax.device_put(np.zeros(())).sharding
    place = sharding if callable(sharding) else lambda name, shape: sharding
    wanted = {
        name: jax.ShapeDtypeStruct(shape, np_dtype(dtype), sharding=place(name, shape))
        for name, shape in shapes.items()
    }
    return nested(_restored(checkpoint.path / PARAMS, wanted))


def _restored(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Arrays by name; what Orbax says of damage is cut down to the names of what is damaged."""
    message = ""
    with _quiet():
        try:
            return _restore(folder, wanted)
        except Exception as error:  # a bare Exception of a page, without the name
            message = _damage(folder, wanted, error)
        _settle()
    raise ValueError(message)


def _settle() -> None:
    """Let what Orbax had begun end, and what TensorStore's threads are still reading."""
    gc.collect()
    time.sleep(LATE)


@contextmanager
def _quiet() -> Iterator[None]:
    """When one array cannot be read, Python prints a page for each of the others that Orbax had begun; not here.

    Some of them are told of a coroutine that nobody awaits any more. Others, of nothing: a read that ends in one of
    TensorStore's threads wants to tell Orbax's event loop, which is closed.
    """
    before = sys.unraisablehook

    def hook(about: Any) -> None:
        late = about.object is None and str(about.exc_value) == "Event loop is closed"
        if not (late or inspect.iscoroutine(about.object)):
            before(about)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _restore(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Arrays by name, restored group by group.

    Orbax has a limit of its own (`restore_concurrent_gb`). It does not count what is read and still being copied to
    the device, and counts bytes in the wanted dtype where the stored one may be larger.
    """
    import jax
    import orbax.checkpoint as ocp

    leaves, structure = _leaves(folder)
    names = [name_of(keys) for keys, _ in leaves]
    stored = {name: np.dtype(getattr(leaf, "dtype", None)) for name, (_, leaf) in zip(names, leaves, strict=True)}
    sizes = {name: prod(x.shape) * max(x.dtype.itemsize, stored[name].itemsize) for name, x in wanted.items()}
    args = {
        name: ocp.ArrayRestoreArgs(restore_type=jax.Array, dtype=x.dtype, sharding=x.sharding, global_shape=x.shape)
        for name, x in wanted.items()
    }
    plain, arrays = ocp.RestoreArgs(), {}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        for group in _groups(sizes):
            item = structure.unflatten([wanted[name] if name in group else ocp.PLACEHOLDER for name in names])
            restore_args = structure.unflatten([args[name] if name in group else plain for name in names])
            tree = orbax.restore(folder, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args))
            restored = {name: x for name, x in zip(names, jax.tree.leaves(tree), strict=True) if name in group}
            arrays |= jax.block_until_ready(restored)
            gc.collect(0)  # what JAX has copied it lets go at its next call, or at a collection
    return arrays


def _groups(sizes: Mapping[str, int]) -> Iterator[set[str]]:
    """The names in their order, in sets that take at most `AT_A_TIME` of the largest."""
    room = limit = AT_A_TIME * max(sizes.values(), default=0)
    group: set[str] = set()
    for name, size in sizes.items():
        if size > room:
            yield group
            group, room = set(), limit
        group.add(name)
        room -= size
    if group:
        yield group


def _damage(folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], error: Exception) -> str:
    """Which parameters cannot be read: tried one by one, since Orbax stops at the first and may not name it."""
    bad = []
    for name, x in wanted.items():
        try:
            _restore(folder, {name: x})
        except Exception as reason:
            bad.append(f"unreadable: {name} {x.shape} ({_first_line(reason)})")
    if not bad:
        return f"{folder} could not be restored ({_first_line(error)})"
    lines = "\n  ".join(bad)
    return f"{folder} is damaged or incomplete; parameters: {len(bad)}; convert or save the model again\n  {lines}"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no detail'}"[:200]


def _read(folder: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """One parameter on the host."""
    import jax

    wanted = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.device_put(np.zeros(())).sharding)}
    return np.array(_restored(folder, wanted)[name])


def write(folder: Path, params: Mapping[str, Any]) -> None:
    """Write a tree of jax arrays as the Orbax checkpoint `folder`, and wait until it is complete.

    Not compressed: weights shrink by a tenth, and take three times as long to write and half as long again to read.
    """
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as orbax:
        orbax.save(folder, args=ocp.args.PyTreeSave(dict(params)))

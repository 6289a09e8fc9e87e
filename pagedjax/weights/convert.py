"""`pagedjax convert`: write the model of any checkpoint to a new folder.

    convert("org/name", "folder", "orbax")        the parameters of this project, for devices of any layout
    convert("folder", "other", "safetensors")     Hugging Face's names, for other programs
    convert("folder", "other", "safetensors", weights="int4-g128")    matrices in fewer bits

The folder is a complete model: weights, config.json, generation_config.json and the tokenizer's
files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from tqdm import tqdm

from pagedjax.device.formats import is_stored
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.param_table import ParamSource
from pagedjax.options.config import DType, one_of
from pagedjax.weights.checkpoint import Checkpoint
from pagedjax.weights.families import family_of, own_family
from pagedjax.weights.huggingface import np_dtype
from pagedjax.weights.load import (
    OWN_BUFFERS,
    assemble,
    check_table,
    own_table,
    restore_params,
    table_of,
)
from pagedjax.weights.locate import open_checkpoint
from pagedjax.weights.quantized.schemes import (
    SCHEMES,
    Scheme,
    WeightScheme,
    Written,
    config_of,
    rounded,
    tensors_of,
)
from pagedjax.weights.safetensors_file import Group, write_shards
from pagedjax.weights.tree import dtype_of, nested

Format = Literal["orbax", "safetensors"]
SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# what `rope_parameters` has for each kind of layers
OLDER_ROPE_KEYS = "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"
Read = Callable[[ParamSource], np.ndarray]  # returns the finished parameter on the host


def convert(
    model: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Format,
    *,
    dtype: DType | None = None,
    weights: WeightScheme | None = None,
    importance: Mapping[str, np.ndarray] | None = None,
    model_family: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Write a model to the new folder `target`, and return it. The folder appears only when it is
    complete.

    Host memory: for "orbax" the model and one parameter; for "safetensors" one parameter, but the
    whole model if it is restored from Orbax.

    Args:
        model: as in `open_checkpoint`.
        dtype: of the written values, which are rounded once. None keeps the stored dtype. It uses
            float32 if tensors have different dtypes, or a dtype that models here cannot have (a
            quantised GGUF file).
        weights: how matrices are rounded, one of `schemes.SCHEMES`, for "safetensors". The layout is
            that of compressed-tensors. Embeddings, heads and routers stay in `dtype`, and scales
            are in it. Experts have a tensor for each matrix, as other engines read them, where the
            family has names for these.
        importance: by the name of a parameter, the mean squares [in] of the inputs of its matrix,
            with which squared errors count in the search of scales, for 4 bits. Other matrices have
            equal inputs.
        model_family: how the model is read, as in `EngineConfig`.
        shard_bytes: largest data size of one safetensors file; a larger parameter has its own file.
        report: gets a text that says how much the rounding of `weights` changed.

    Raises:
        ValueError: `target` exists and is not empty, the checkpoint does not fit its config (lists
            all differences), transformers cannot represent the model as safetensors, or `weights`
            does not fit the format or the sizes of the model.
        FileNotFoundError: as in `open_checkpoint`.
    """
    one_of("to", to, get_args(Format))
    one_of("dtype", dtype, (None, *get_args(DType)))
    one_of("weights", weights, (None, *SCHEMES))
    if weights is not None and to != "safetensors":
        raise ValueError(
            f"weights is {weights!r} and to is {to!r}; matrices in fewer bits are written as "
            "safetensors; give --to safetensors, or leave the weights as they are"
        )
    if importance is not None and not (weights or "").startswith("int4"):
        raise ValueError(
            f"importance is given, and weights is {weights!r}; it chooses the scales of 4 bits: use "
            "int4-g128, int4-g64 or int4-g32, or leave it out"
        )
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be at least 1")
    target = Path(target).expanduser().absolute()
    check_free(target)
    checkpoint = open_checkpoint(model, family=own_family(model_family))
    family = family_of(checkpoint)
    config = family.from_hf(checkpoint.config)
    table = family.param_table(config)
    separate = {entry.path: entry for entry in table}  # with a tensor for each matrix of an expert
    if to == "safetensors":
        check_shared(checkpoint)
    if checkpoint.format == "orbax":
        check_table(checkpoint, own_table(table), OWN_BUFFERS)
    else:
        table = table_of(checkpoint, table)
        check_table(checkpoint, table, family.ignored)
    table = [entry for entry in table if stored_names(checkpoint, entry)[0] in checkpoint.tensors]
    dtype = dtype or stored_dtype(checkpoint, table)
    rounding = None
    written_table = table
    if weights:
        written_table = [separate[entry.path] for entry in table]
        rounding = Rounding(SCHEMES[weights], written_table, config, dtype, importance or {})
    with (
        complete_folder(target) as folder,
        tqdm(total=len(table), disable=not progress, leave=False) as bar,
    ):
        write_side_files(checkpoint, folder, dtype, rounding and rounding.config)
        read = reader(checkpoint, table, "float32" if rounding else dtype)

        def read_and_count(entry: ParamSource) -> np.ndarray:
            bar.update()
            return read(entry)

        if to == "orbax":
            write_orbax(folder, table, read_and_count)
        else:
            groups = [
                group(written, rows_of(written, config), partial(read_and_count, entry), dtype)
                for written, entry in zip(written_table, table, strict=True)
            ]
            if rounding:
                groups = list(map(rounding.group, groups))
            write_shards(folder, groups, shard_bytes)
    if rounding and report:
        report(str(rounding))
    return target


def write_orbax(folder: Path, table: Sequence[ParamSource], read: Read) -> None:
    """Writes the parameters of a table as an Orbax checkpoint."""
    from pagedjax.weights import orbax_checkpoint

    values = {".".join(entry.path): jax.device_put(read(entry), host()) for entry in table}
    orbax_checkpoint.write(folder / orbax_checkpoint.PARAMS, nested(values))


def check_free(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise ValueError(
            f"{target} exists and is not an empty folder; choose a new folder, or remove this one "
            "first"
        )


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """A temporary folder next to `target`. It is renamed to `target` at the end, and removed after
    an error.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(target)  # replaces an empty folder
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def stored_names(checkpoint: Checkpoint, entry: ParamSource) -> tuple[str, ...]:
    """Names of the tensors that a parameter is made of."""
    return (".".join(entry.path),) if checkpoint.format == "orbax" else entry.sources


def stored_dtype(checkpoint: Checkpoint, table: Sequence[ParamSource]) -> DType:
    """The dtype of all parameters that are not always float32; float32 if they have several dtypes,
    or a dtype that models here cannot have.
    """
    dtypes = {
        checkpoint.tensors[name].dtype.name
        for entry in table
        if dtype_of(entry.path, "") == ""
        for name in stored_names(checkpoint, entry)
    }
    for dtype in get_args(DType):
        if dtypes == {dtype}:
            return dtype
    return "float32"


def host() -> Any:
    """The device for parameters that will be written: a CPU, so that an accelerator needs no memory
    for them.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        return jax.local_devices()[0]


def reader(checkpoint: Checkpoint, table: Sequence[ParamSource], dtype: str) -> Read:
    """A function that reads one parameter. Parameters of an Orbax checkpoint are all read here, at
    once.
    """
    if checkpoint.format != "orbax":
        return lambda entry: assemble(checkpoint.tensors, entry, dtype)
    params = restore_params(
        checkpoint, table, dtype, sharding=jax.sharding.SingleDeviceSharding(host())
    )

    def read(entry: ParamSource) -> np.ndarray:
        value = params
        for key in entry.path:
            value = value[key]
        return np.asarray(value)

    return read


# --- Hugging Face names ---------------------------------------------------------------------------


def rows_of(entry: ParamSource, config: DecoderConfig) -> tuple[int, ...]:
    """The number of rows of each source of a parameter.

    They are those of the table, if it has them; those of the heads, for q, k and v; else equal
    parts.
    """
    if entry.rows:
        return entry.rows
    count = len(entry.sources)
    if count == 3 and all(
        f".{part}_proj." in name for part, name in zip("qkv", entry.sources, strict=True)
    ):
        kv_rows = config.kv_heads * config.head_dim
        return (config.query_heads * config.head_dim, kv_rows, kv_rows)
    total = entry.stored_shape[0]
    if total % count:
        raise ValueError(
            f"{'.'.join(entry.path)} has {total} rows for {count} tensors; its table must give "
            "their rows"
        )
    return (total // count,) * count


def group(
    entry: ParamSource, rows: Sequence[int], read: Callable[[], np.ndarray], dtype: str
) -> Group:
    """The reverse of `load.assemble`: the tensors that a parameter is made of.

    Args:
        rows: the number of rows of each tensor.
        read: returns the finished parameter.
        dtype: of the model.
    """
    _, *other_sizes = entry.stored_shape
    shapes = {name: (count, *other_sizes) for name, count in zip(entry.sources, rows, strict=True)}

    def parts() -> list[np.ndarray]:
        value = read()
        joined = value.T if entry.transpose and not entry.stacked else value
        if entry.order:
            ordered = joined
            joined = np.empty_like(ordered)
            joined[np.asarray(entry.order)] = ordered
        if not entry.stacked:
            return np.split(joined, np.cumsum(rows)[:-1])
        stack = joined.reshape(entry.stacked, -1, *entry.shape[1:])
        return [np.swapaxes(stack, 1, 2) if entry.transpose else stack]

    return Group(shapes, parts, dtype_of(entry.path, dtype))


# --- matrices in fewer bits -----------------------------------------------------------------------


class Rounding:
    """Groups of tensors whose matrices are rounded when they are read."""

    def __init__(
        self,
        scheme: Scheme,
        table: Sequence[ParamSource],
        config: DecoderConfig,
        dtype: str,
        importance: Mapping[str, np.ndarray],
    ) -> None:
        """Raises ValueError for a matrix whose inputs are not whole groups."""
        self.scheme = scheme
        self.dtype = dtype
        self.written: dict[str, list[Written]] = {}
        self.importance: dict[str, np.ndarray | None] = {}
        self.turned: dict[str, bool] = {}
        self.error = 0.0
        self.size = 0.0
        floats = []
        for entry in table:
            if len(entry.shape) != 2:
                continue
            is_product = is_stored(entry.path, entry.shape) and entry.path[0] == "blocks"
            for name, rows in zip(entry.sources, rows_of(entry, config), strict=True):
                is_upright = not entry.transpose and name.endswith(".weight")
                if is_product and (entry.stacked or is_upright):
                    shape = (rows, *entry.stored_shape[1:])
                    self.turned[name] = entry.transpose
                    self.written[name] = tensors_of(
                        scheme, name, shape, dtype, turned=entry.transpose
                    )
                    self.importance[name] = importance.get(".".join(entry.path))
                else:
                    floats.append(name.removesuffix(".weight"))
        self.config = config_of(scheme, floats)

    def group(self, floats: Group) -> Group:
        """The group of tensors that another one becomes, which has float32 numbers."""
        tensors = [
            written
            for name, shape in floats.shapes.items()
            for written in self.written.get(name, [Written(name, shape, floats.dtype)])
        ]

        def read() -> Iterator[np.ndarray]:
            for name, values in zip(floats.shapes, floats.read(), strict=True):
                if name not in self.written:
                    yield values.astype(np_dtype(floats.dtype), copy=False)
                    continue
                result = rounded(
                    self.scheme,
                    values,
                    self.dtype,
                    self.importance[name],
                    turned=self.turned[name],
                )
                self.error += result.error
                self.size += result.size
                yield from result.arrays

        dtypes = {written.name: written.dtype for written in tensors}
        return Group({x.name: x.shape for x in tensors}, read, floats.dtype, dtypes)

    def __str__(self) -> str:
        """How much rounding changed: the root of the relative squared error of all matrices."""
        share = (self.error / self.size) ** 0.5 if self.size else 0.0
        return (
            f"{len(self.written)} matrices were rounded; the root mean square of what changed is "
            f"{100 * share:.2f} % of that of the weights"
        )


# --- other files ----------------------------------------------------------------------------------


def check_shared(checkpoint: Checkpoint) -> None:
    """Raise a ValueError if no config.json of transformers can describe this model."""
    config = checkpoint.config
    remedy = "transformers does not support such models; convert to orbax"
    scaling = (config.get("rope_scaling") or {}).get("rope_type")
    if scaling == "freqs":
        raise ValueError(
            f"{checkpoint.path}: rope_scaling is {scaling!r}, factors from a GGUF file; {remedy}"
        )
    attention_bias = config.get("attention_bias")  # of q, k, v and the output
    has_own_key = "qkv_bias" in family_of(checkpoint).architecture.defaults
    if not has_own_key and config.get("qkv_bias", attention_bias) != attention_bias:
        raise ValueError(
            f"{checkpoint.path}: only q, k and v have a bias, in a {config['model_type']} model; "
            f"{remedy}"
        )


def write_side_files(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: str,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json, generation_config.json and the tokenizer's files.

    Args:
        quantization: the `quantization_config`, if matrices are in fewer bits.
    """
    renamed = family_of(checkpoint).architecture.renamed
    original = {usual_key: key for key, usual_key in renamed.items()}
    config = {
        original.get(key, key): value for key, value in checkpoint.config.items() if key != "dtype"
    }
    if "rope_local_base_freq" in config:  # the keys of transformers 5 have a rotation for each kind
        theta = config["rope_theta"]
        full = {"rope_type": "default", "rope_theta": theta, **(config["rope_scaling"] or {})}
        sliding = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"] or theta}
        if "partial_rotary_factor" in config:  # a model whose keys have no older names
            full.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
            for key in OLDER_ROPE_KEYS:
                del config[key]
        config["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    if quantization:
        config["quantization_config"] = quantization
    write_json(folder / "config.json", {**config, "torch_dtype": dtype})
    if checkpoint.generation_config:
        write_json(folder / "generation_config.json", checkpoint.generation_config)
    if checkpoint.format == "gguf":
        write_tokenizer(checkpoint, folder)
        return
    for name in TOKENIZER_FILES:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, folder / name)


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the tokenizer of a GGUF file as Hugging Face files."""
    from pagedjax.weights.tokenizer_files import from_gguf

    parts = from_gguf(checkpoint)
    parts.backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    if parts.chat_template is not None:
        config["chat_template"] = parts.chat_template
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Drafters that are models: a smaller model from a checkpoint, or a head (models/eagle.py) from its
own folder.

FOLDER/config.json    the model that the head was trained for, its layers and window, and the
                      token ids that it drafts
FOLDER/params/        by Orbax
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.device.draft_model import DraftModel, of_decoder, of_eagle
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.eagle import (
    WINDOW,
    EagleConfig,
    assemble_eagle,
    blank_eagle,
    eagle_config,
)
from pagedjax.options.config import AS_STORED, STORED_FORMATS, Speculative, one_of
from pagedjax.text.tokenizer import NoTokenizer, Tokenizer
from pagedjax.weights.checkpoint import Checkpoint
from pagedjax.weights.convert import check_free, complete_folder
from pagedjax.weights.huggingface import read_json
from pagedjax.weights.locate import open_checkpoint
from pagedjax.weights.orbax_checkpoint import PARAMS, restore, tensors
from pagedjax.weights.pretrained import LoadedModel, read_model
from pagedjax.weights.tokenizer_files import load_tokenizer
from pagedjax.weights.tree import differences, named

KIND = "eagle"
MODEL_SIZES = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim")


def load_draft_model(
    options: Speculative | None,
    target: LoadedModel,
    *,
    linear_impl: str | None = None,
    progress: bool = False,
) -> DraftModel | None:
    """The drafter that `options` name, in the dtype of `target`; None if they draft without a model
    on the device.

    Args:
        linear_impl: of the engine. A draft model has it too, where it is of use to its matrices.

    Raises:
        ValueError: no model is named, the draft model has another tokenizer than `target`, its
            matrices cannot be stored as `options` say, or the head was trained for another model.
        FileNotFoundError: there is no such folder, as in `load_model`.
    """
    if options is None or not options.on_device:
        return None
    if options.model is None:
        remedy = "the folder of a trained head"
        if options.method == "draft":
            remedy = "a smaller model with the same tokenizer"
        raise ValueError(
            f"speculative.method is {options.method!r} and speculative.model is None; name {remedy}"
        )
    if options.method == KIND:
        return read_eagle(options.model, target.model.config, target.model.dtype)
    dtype = target.model.dtype
    one_of(
        "speculative.weight_dtype",
        options.weight_dtype,
        (None, *STORED_FORMATS, AS_STORED, dtype),
    )
    try:
        checkpoint = open_checkpoint(options.model)
        draft = read_model(
            checkpoint,
            dtype,
            weight_dtype=_weight_dtype(options, checkpoint, target.model),
            linear_impl=linear_impl,
            drafts=True,
            progress=progress,
        )
        tokenizer = load_tokenizer(checkpoint)
    except ValueError as error:
        message = f"speculative.model is {options.model!r}: {error}"
        if target.family is not None:
            message = (
                f"speculative.model is {options.model!r}, and a draft model is of a built-in "
                f"family, also beside a model_family of your own: {error}"
            )
        raise ValueError(message) from error
    _check_tokenizers(options.model, draft, tokenizer, target)
    return of_decoder(draft)


def _weight_dtype(options: Speculative, checkpoint: Checkpoint, target: Model) -> str | None:
    """The `weight_dtype` of a draft model; None: that of its activations."""
    if options.weight_dtype is not None:
        return options.weight_dtype
    has_rows = any(tensor.rows is not None for tensor in checkpoint.tensors.values())
    return AS_STORED if has_rows and target.weight_dtype == AS_STORED else None


def _check_tokenizers(name: str, draft: Model, tokenizer: Tokenizer, target: LoadedModel) -> None:
    """Check that an id means the same text for both models.

    Models without tokenizers are compared by the sizes of their vocabularies only. With one
    tokenizer the sizes may differ: a model's vocabulary is padded to a size of its own.

    Args:
        tokenizer: of the draft model.
    """
    if isinstance(tokenizer, NoTokenizer) or isinstance(target.tokenizer, NoTokenizer):
        draft_size = draft.config.vocab_size
        target_size = target.model.config.vocab_size
        if draft_size != target_size:
            raise ValueError(
                f"speculative.model {name!r} has a vocabulary of {draft_size} tokens and the model "
                f"one of {target_size}, and without tokenizers these must be equal; load both with "
                "their tokenizers"
            )
        return
    if tokenizer.backend is target.tokenizer.backend:
        return
    draft_ids = tokenizer.backend.get_vocab(with_added_tokens=True)
    target_ids = target.tokenizer.backend.get_vocab(with_added_tokens=True)
    if draft_ids != target_ids:
        texts = (*target_ids, *draft_ids)
        text = next(text for text in texts if target_ids.get(text) != draft_ids.get(text))
        raise ValueError(
            f"speculative.model {name!r} has another tokenizer than the model: {text!r} is "
            f"token {draft_ids.get(text)} there and {target_ids.get(text)} here; use a "
            "draft model of the same tokenizer"
        )


def write_eagle(
    folder: str | os.PathLike[str], target: DecoderConfig, ids: Sequence[int], params: Any
) -> Path:
    """Write a head's folder, which appears only when it is complete.

    Args:
        target: the model that it was trained for.
        ids: the tokens that the head drafts, ascending.
        params: the head's nnx state; arrays that follow from the configuration are left out.

    Raises:
        ValueError: `folder` exists and is not empty.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).expanduser().absolute()
    check_free(folder)
    config = {
        "model_type": KIND,
        "model": _sizes_of(target),
        "window": WINDOW,
        "taps": list(eagle_config(target, len(ids)).taps),
        "ids": [int(i) for i in ids],
    }
    with complete_folder(folder) as part:
        (part / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
        with ocp.StandardCheckpointer() as orbax:
            orbax.save(part / PARAMS, named(params))
    return folder


def read_eagle(path: str | os.PathLike[str], target: DecoderConfig, dtype: str) -> DraftModel:
    """The drafter of the head in a folder, for a model.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder has no head, or its head is for a model of other sizes, or parameters
            are missing or damaged.
    """
    folder = Path(path).expanduser().absolute()
    if not (folder / "config.json").is_file():
        train = "python -m experiments.training.train_draft"
        raise FileNotFoundError(f"there is no draft head in {folder}; train one: {train}")
    stored = read_json(folder / "config.json")
    ids = np.asarray(stored.get("ids") or ())
    config = _head_config(folder, stored, ids, target)
    shapes = named(blank_eagle(config, dtype)[1])
    arrays = tensors(folder / PARAMS)
    if problems := differences(shapes, arrays, cast=True):
        lines = "\n  ".join(problems)
        raise ValueError(
            f"{folder / PARAMS} is not a head of this version; differences: {len(problems)}\n  "
            f"{lines}"
        )
    sizes = {name: tuple(x.shape) for name, x in shapes.items()}
    params = restore(Checkpoint(folder, "orbax", stored, arrays), sizes, dtype)
    graphdef, state = assemble_eagle(config, ids, params, dtype)
    return of_eagle(config, graphdef, state, dtype)


def _head_config(
    folder: Path, stored: dict[str, Any], ids: np.ndarray, target: DecoderConfig
) -> EagleConfig:
    """The shape of a head for `target`. `stored` is its config.json, `ids` the tokens it drafts.

    Raises:
        ValueError: a value of `stored` is wrong, or does not fit `target`.
    """
    if stored.get("model_type") != KIND:
        raise ValueError(
            f"model_type in {folder / 'config.json'} is {stored.get('model_type')!r}; a head has "
            f"{KIND!r}"
        )
    stored_sizes = stored.get("model") or {}
    wrong_sizes = [
        f"{name} {stored_sizes.get(name)}, not {size}"
        for name, size in _sizes_of(target).items()
        if stored_sizes.get(name) != size
    ]
    if wrong_sizes:
        raise ValueError(
            f"the draft head in {folder} was trained for another model ({'; '.join(wrong_sizes)}); "
            "train one"
        )
    window = stored.get("window")
    if not isinstance(window, int) or window < 1:
        raise ValueError(
            f"window in {folder / 'config.json'} is {window!r}; it must be an integer of at least "
            "1; train one"
        )
    of_integers = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind == "i"
    if not of_integers or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= target.vocab_size:
        raise ValueError(
            f"ids in {folder / 'config.json'} are not ascending token ids below {target.vocab_size}"
        )
    config = eagle_config(target, len(ids), window)
    if stored.get("taps") != list(config.taps):
        raise ValueError(
            f"the draft head in {folder} learned from the layers {stored.get('taps')}, and this "
            f"version gives it {list(config.taps)}; train one"
        )
    return config


def _sizes_of(config: DecoderConfig) -> dict[str, int]:
    """The sizes of a model that a head depends on."""
    return {name: getattr(config, name) for name in MODEL_SIZES}

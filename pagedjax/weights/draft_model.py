"""Drafters that are models: a smaller model from a checkpoint, or a head (models/eagle.py) from its
own folder.

FOLDER/config.json    the model that the head was trained for, its layers and window, and the token ids that it drafts
FOLDER/params/        by Orbax
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.config import ON_DEVICE, Speculative
from pagedjax.device.draft_model import DraftModel, of_decoder, of_eagle
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.models.eagle import WINDOW, assemble_eagle, blank_eagle, eagle_config
from pagedjax.text.tokenizer import NoTokenizer
from pagedjax.weights.checkpoint import Checkpoint
from pagedjax.weights.convert import check_free, complete_folder
from pagedjax.weights.huggingface import read_json
from pagedjax.weights.orbax_checkpoint import PARAMS, restore, tensors
from pagedjax.weights.pretrained import LoadedModel, load_model
from pagedjax.weights.tree import differences, named

KIND = "eagle"
OF_THE_MODEL = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim")


def load_draft_model(
    options: Speculative | None, target: LoadedModel, *, progress: bool = False
) -> DraftModel | None:
    """What `options` want to draft with for a model, in its dtype; None if that is no model.

    Raises:
        ValueError: no model is named, its tokenizer is another one, or a head was trained for
            another model.
        FileNotFoundError: there is no such folder, as in `load_model`.
    """
    if options is None or options.method not in ON_DEVICE:
        return None
    if options.model is None:
        what = (
            "a smaller model with the same tokenizer"
            if options.method == "draft"
            else "the folder of a trained head"
        )
        raise ValueError(
            f"speculative.method is {options.method!r} and speculative.model is None; name {what}"
        )
    if options.method == KIND:
        return read_eagle(options.model, target.model.config, target.model.dtype)
    try:
        draft = load_model(options.model, dtype=target.model.dtype, progress=progress)
    except ValueError as error:
        if target.family is None:
            raise
        raise ValueError(
            f"speculative.model is {options.model!r}, and a draft model is of a built-in family, "
            f"also beside a model_family of your own: {error}"
        ) from error
    _check_tokenizers(options.model, draft, target)
    return of_decoder(draft.model)


def _check_tokenizers(name: str, draft: LoadedModel, target: LoadedModel) -> None:
    """One id must mean one text. Models without tokenizers are compared by the sizes of their
    vocabularies only.

    With one tokenizer the sizes may differ: a model's vocabulary is padded to a size of its own.
    """
    if isinstance(draft.tokenizer, NoTokenizer) or isinstance(target.tokenizer, NoTokenizer):
        ours, wanted = draft.model.config.vocab_size, target.model.config.vocab_size
        if ours != wanted:
            raise ValueError(
                f"speculative.model {name!r} has a vocabulary of {ours} tokens and the model one "
                f"of {wanted}, and without tokenizers these must be equal; load both with their "
                "tokenizers"
            )
        return
    mine, theirs = draft.tokenizer.backend, target.tokenizer.backend
    if mine is theirs:
        return
    ours, wanted = mine.get_vocab(with_added_tokens=True), theirs.get_vocab(with_added_tokens=True)
    if ours != wanted:
        different = next(text for text in (*wanted, *ours) if wanted.get(text) != ours.get(text))
        raise ValueError(
            f"speculative.model {name!r} has another tokenizer than the model: {different!r} is "
            f"token {ours.get(different)} there and {wanted.get(different)} here; use a draft "
            "model of the same tokenizer"
        )


def write_eagle(
    folder: str | os.PathLike[str], target: DecoderConfig, ids: Sequence[int], params: Any
) -> Path:
    """Write a head's folder, which appears only when it is complete.

    Args:
        target: the model that it was trained for.
        ids: the tokens that it drafts, ascending.
        params: its nnx state; arrays that follow from the configuration are left out.

    Raises:
        ValueError: `folder` exists and is not empty.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).expanduser().absolute()
    check_free(folder)
    shape = eagle_config(target, len(ids))
    config = {
        "model_type": KIND,
        "model": _facts(target),
        "window": WINDOW,
        "taps": list(shape.taps),
        "ids": [int(i) for i in ids],
    }
    with complete_folder(folder) as part:
        (part / "config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")
        with ocp.StandardCheckpointer() as orbax:
            orbax.save(part / PARAMS, named(params))
    return folder


def read_eagle(path: str | os.PathLike[str], target: DecoderConfig, dtype: str) -> DraftModel:
    """The head in a folder, for a model.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: no head is in it, or one for a model of other sizes, or parameters are missing
            or damaged.
    """
    folder = Path(path).expanduser().absolute()
    if not (folder / "config.json").is_file():
        train = "python -m experiments.training.train_draft"
        raise FileNotFoundError(f"there is no draft head in {folder}; train one: {train}")
    stored = read_json(folder / "config.json")
    if stored.get("model_type") != KIND:
        raise ValueError(
            f"model_type in {folder / 'config.json'} is {stored.get('model_type')!r}; a head has "
            f"{KIND!r}"
        )
    theirs, ours = stored.get("model") or {}, _facts(target)
    if wrong := [
        f"{name} {theirs.get(name)}, not {ours[name]}"
        for name in ours
        if theirs.get(name) != ours[name]
    ]:
        raise ValueError(
            f"the draft head in {folder} was trained for another model ({'; '.join(wrong)}); train "
            "one"
        )
    ids, window = np.asarray(stored.get("ids") or ()), stored.get("window")
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
    shapes = named(blank_eagle(config, dtype)[1])
    found = tensors(folder / PARAMS)
    if problems := differences(shapes, found, cast=True):
        lines = "\n  ".join(problems)
        raise ValueError(
            f"{folder / PARAMS} is not a head of this version; differences: {len(problems)}\n  "
            f"{lines}"
        )
    sizes = {name: tuple(x.shape) for name, x in shapes.items()}
    params = restore(Checkpoint(folder, "orbax", stored, found), sizes, dtype)
    return of_eagle(config, *assemble_eagle(config, ids, params, dtype), dtype)


def _facts(config: DecoderConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in OF_THE_MODEL}

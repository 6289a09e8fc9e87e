"""The tokenizer of a checkpoint, from its tokenizer.json or its GGUF metadata
(`load_tokenizer`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedjax.text.tokenizer import Tokenizer
from pagedjax.weights.checkpoint import Checkpoint
from pagedjax.weights.locate import located, open_checkpoint

if TYPE_CHECKING:
    import tokenizers

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
GGUF_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


class TokenizerParts(NamedTuple):
    """What makes a `Tokenizer`.

    special_tokens: name ("eos_token") -> text.
    chat_template: Jinja source; None if the model has no template.
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None


def from_gguf(checkpoint: Checkpoint) -> TokenizerParts:
    """The parts from a GGUF file's metadata. It raises the errors of `build_tokenizer`."""
    from pagedjax.weights.gguf_tokenizer import build_tokenizer

    backend = build_tokenizer(checkpoint.path, checkpoint.metadata)
    ids = {
        name: checkpoint.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in GGUF_NAMES.items()
    }
    texts = {name: backend.id_to_token(i) for name, i in ids.items() if i is not None}
    special_tokens = {name: text for name, text in texts.items() if text is not None}
    return TokenizerParts(
        backend, special_tokens, checkpoint.metadata.get("tokenizer.chat_template")
    )


def from_directory(path: Path) -> TokenizerParts:
    """The parts from tokenizer.json, and from tokenizer_config.json and chat_template.jinja if they
    exist.

    tokenizer.json is used unchanged: transformers' classes for single models may rebuild it with
    other splitting rules.

    Raises:
        FileNotFoundError: no tokenizer.json.
        ValueError: a damaged file; names it.
    """
    from tokenizers import Tokenizer

    from pagedjax.weights.huggingface import read_json

    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} has no tokenizer.json; write one with "
            "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"{file} is not a tokenizer ({error}); fetch it again") from error
    backend.no_truncation()  # the file may contain settings of a training run
    backend.no_padding()

    config_file = path / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    entries = {name: config[name] for name in SPECIAL_NAMES if config.get(name)}
    special_tokens = {
        name: entry["content"] if isinstance(entry, dict) else entry
        for name, entry in entries.items()
    }
    return TokenizerParts(backend, special_tokens, _chat_template(path, config))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template in chat_template.jinja, or in the tokenizer's config. If that has several, it is
    the template named "default".
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def open_tokenizer(model: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model, by name, path or hub id. In a directory it reads only the
    tokenizer's files.

    Raises:
        FileNotFoundError, ValueError: as `open_checkpoint` and `load_tokenizer`.
    """
    path = located(model)
    if path.is_dir():
        return load_tokenizer(Checkpoint(path, "huggingface", config={}, tensors={}))
    return load_tokenizer(open_checkpoint(path))


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer, from its tokenizer.json or its GGUF metadata; needs no network
    and no torch.

    Its `eos_token_ids` are those of the checkpoint and of the tokenizer's files.

    Raises:
        FileNotFoundError: a directory without tokenizer.json.
        ValueError: a damaged or unsupported tokenizer; names the file and what is supported.
    """
    parts = (
        from_gguf(checkpoint) if checkpoint.format == "gguf" else from_directory(checkpoint.path)
    )
    eos = parts.backend.token_to_id(parts.special_tokens.get("eos_token", ""))
    eos_ids = set(checkpoint.eos_token_ids)
    if eos is not None:
        eos_ids.add(eos)
    return Tokenizer(
        parts.backend, tuple(sorted(eos_ids)), parts.special_tokens, parts.chat_template
    )

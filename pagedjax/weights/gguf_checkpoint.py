"""A GGUF file as a checkpoint with Hugging Face's names, config and values. What llama.cpp changed
when it converted the model is changed back.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pagedjax.weights.architectures import FAMILIES, normalised
from pagedjax.weights.checkpoint import Checkpoint
from pagedjax.weights.gguf_architectures import GGUF, LONG, SHORT, Keys
from pagedjax.weights.gguf_file import GGUFFile, read_parts, with_name

BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
IN_CONFIG = ("rope_freqs.weight", LONG, SHORT)  # tensors whose values are in `config`
# what the chat templates of Gemma, ChatML, Llama 3 and Phi 3 write after a turn
TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>")
TOKEN_ID_NAMES = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def open_gguf(path: Path) -> Checkpoint:
    """Open a .gguf file. With tied embeddings there is no lm_head.weight, and `tie_word_embeddings`
    is true.

    Raises:
        FileNotFoundError, ValueError: as `read_parts`; also for an unsupported architecture.
    """
    file = read_parts(path)
    architecture = _architecture(file)
    try:
        config = architecture.config(Keys(path, architecture.name, file.metadata), file.tensors)
        end_ids = _end_token_ids(file.metadata)
    except (TypeError, ZeroDivisionError, IndexError) as error:
        raise ValueError(
            f"{path} is damaged: its metadata has a value of the wrong type ({error})"
        ) from error
    config |= {
        key: file.metadata.get(f"tokenizer.ggml.{gguf_key}_token_id")
        for key, gguf_key in TOKEN_ID_NAMES.items()
    }
    config = normalised(config, path)
    tensors = {}
    for stored_name, tensor in file.tensors.items():
        if stored_name not in IN_CONFIG:
            name = huggingface_name(architecture, stored_name)
            tensors[name] = with_name(tensor, name, architecture.change(name, config))
    return Checkpoint(path, "gguf", config, tensors, {"eos_token_id": end_ids}, file.metadata)


def huggingface_name(architecture: GGUF, name: str) -> str:
    """The Hugging Face name. An unknown tensor keeps its own name, so that loading reports it."""
    if match := BLOCK.fullmatch(name):
        layer, part, kind = match.groups()
        if part in architecture.block:
            return f"model.layers.{layer}.{architecture.block[part]}.{kind}"
    return architecture.top.get(name, name)


def _architecture(file: GGUFFile) -> GGUF:
    name = file.metadata.get("general.architecture")
    architectures = {
        family.architecture.gguf.name: family.architecture.gguf
        for family in FAMILIES.values()
        if family.architecture.gguf
    }
    if name in architectures:
        return architectures[name]
    supported = ", ".join(architectures)
    raise ValueError(f"{file.path}: general.architecture is {name!r}; supported: {supported}")


def _end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """The ids of the tokens that end a text, a turn or a message. A chat model may use any of
    them. Many files name only the end of a text, so the end of a turn is also known by its text.
    """
    keys = (
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    )
    ids = {metadata[key] for key in keys if key in metadata}
    template = metadata.get("tokenizer.chat_template", "")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    ids |= {tokens.index(text) for text in TURN_ENDS if text in template and text in tokens}
    return sorted(ids)

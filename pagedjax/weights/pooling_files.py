"""How a model for embeddings says that it pools: the files of Sentence Transformers beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODES = {
    "lasttoken": "LAST",
    "mean_tokens": "MEAN",
    "cls_token": "CLS",
}  # "pooling_mode_..." of a Pooling's config.json
FREE = ("Transformer", "Normalize")  # modules that need nothing of us: vectors are normalised by default


def pooling_of(folder: Path) -> str | None:
    """ "LAST", "MEAN" or "CLS"; the name of a step that is not supported; None if the folder has no such files.

    Raises:
        ValueError: a file is damaged.
    """
    modules = folder / "modules.json"
    if not modules.is_file():
        return None
    found = None
    for module in _read(modules, list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            config = _read(folder / str(module.get("path", "")) / "config.json", dict)
            names = [key.removeprefix("pooling_mode_") for key, value in config.items() if value is True]
            names = [name for name in names if f"pooling_mode_{name}" in config]
            found = MODES.get(names[0], names[0]) if len(names) == 1 else "+".join(names) or None
        elif kind not in FREE:
            return kind
    return found


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); fetch the model again") from error
    if not isinstance(value, kind):
        raise ValueError(f"{path} contains a JSON {type(value).__name__}; it must be a {kind.__name__}")
    return value

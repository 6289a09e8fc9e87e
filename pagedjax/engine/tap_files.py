"""Taps beside a recording: a folder with one .npz for each sequence that has ended. `read_taps`
reads it.

    run.jsonl              the recording
    run.jsonl.taps/0.npz   what the taps of sequence "0" gave; other characters than letters and digits are %-escaped

A file is complete when it has its name, so what is there can be read while the engine runs, and
after it was killed.
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from pagedjax.engine.state import LogEntry
from pagedjax.engine.taps import Collected, TapArrays, TapPart, collect
from pagedjax.host.types import Event, Finished

ENDING = ".npz"


def folder_of(recording: str | os.PathLike[str]) -> Path:
    """The folder of a recording's taps."""
    return Path(f"{os.fspath(recording)}.taps")


class TapWriter:
    """Writes what taps give while an engine records. The folder is made when the first sequence
    with taps ends.

    Files of an earlier recording of the same name are deleted. A disk that is full stops the
    writing, and no step.
    """

    def __init__(self, recording: str | os.PathLike[str]) -> None:
        self.folder = folder_of(recording)
        self._open: dict[str, Collected] = {}
        for file in self.folder.glob(f"*{ENDING}"):
            file.unlink()

    def note(self, log: Sequence[LogEntry]) -> None:
        """Take the transitions of an engine, in their order."""
        for name, arguments in log:
            if name == "begin_taps":
                self._begin(*arguments)
            elif name == "taps":
                self._take(*arguments)
            elif name in ("commit", "cancel"):
                self._end(arguments[-1])

    def _begin(self, names: Sequence[str], prompt_len: int) -> None:
        """The branches of a request with taps."""
        self._open |= collect(names, prompt_len)

    def _take(self, parts: Sequence[TapPart]) -> None:
        for part in parts:
            self._open[part.request_id].take(part)

    def _end(self, events: Sequence[Event]) -> None:
        """Write the sequences that have ended."""
        for event in events if self._open else ():
            if isinstance(event, Finished) and (
                collected := self._open.pop(event.request_id, None)
            ):
                try:
                    self._write(event.request_id, collected.arrays(event.num_output))
                except OSError as error:
                    what = f"the taps of {event.request_id!r} are not written to {self.folder}: {error}"
                    warnings.warn(what, RuntimeWarning, stacklevel=2)

    def _write(self, name: str, found: TapArrays) -> None:
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"{quote(name, safe='')}{ENDING}"
        partial = file.with_suffix(".part")
        with open(partial, "wb") as out:
            np.savez(out, allow_pickle=False, **_named(found))
        partial.rename(file)


def _named(found: TapArrays) -> dict[str, np.ndarray]:
    """The arrays by their names in a file. All arrays of a layer's attention lie in one, row behind
    row.
    """
    named = {f"hidden_states.{layer}": states for layer, states in found.hidden_states.items()}
    for layer, (ids, weights) in found.experts.items():
        named |= {f"experts.{layer}": ids, f"expert_weights.{layer}": weights}
    for layer, seen in found.attention.items():
        shapes = np.array([one.shape for one in seen], np.int64).reshape(-1, 2)
        flat = (
            np.concatenate([one.reshape(-1) for one in seen]) if seen else np.zeros(0, np.float32)
        )
        named |= {f"attention.{layer}": flat, f"attention_shapes.{layer}": shapes}
    return named


class TapFiles(Mapping[str, TapArrays]):
    """What taps gave, by the ids of sequences. A file is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            unquote(file.name.removesuffix(ENDING)): file
            for file in sorted(folder.glob(f"*{ENDING}"))
        }

    def __getitem__(self, name: str) -> TapArrays:
        file = self._files[name]
        try:
            with np.load(file, allow_pickle=False) as stored:
                arrays = dict(stored)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{file} is no file of taps: {error}") from None

        def by_layer(kind: str) -> dict[int, np.ndarray]:
            found = {
                key.removeprefix(f"{kind}."): array
                for key, array in arrays.items()
                if key.startswith(f"{kind}.")
            }
            return {int(layer): array for layer, array in found.items()}

        weights, shapes, attention = by_layer("expert_weights"), by_layer("attention_shapes"), {}
        for layer, flat in by_layer("attention").items():
            ends = np.cumsum(shapes[layer].prod(1))[:-1] if len(shapes[layer]) else []
            each = np.split(flat, ends) if len(shapes[layer]) else []
            attention[layer] = tuple(
                one.reshape(shape) for one, shape in zip(each, shapes[layer], strict=True)
            )
        experts = {layer: (ids, weights[layer]) for layer, ids in by_layer("experts").items()}
        return TapArrays(by_layer("hidden_states"), attention, experts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_taps(path: str | os.PathLike[str]) -> TapFiles:
    """What the taps of a recorded run gave, by the ids of its sequences.

    Args:
        path: the recording that `engine.record` wrote, or the folder of taps beside it.

    Raises:
        ValueError: there is no such folder: no sequence with taps had ended while the engine
        recorded.
    """
    given = Path(path)
    folder = given if given.is_dir() else folder_of(path)
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: no request with taps ended in this recording"
        )
    return TapFiles(folder)

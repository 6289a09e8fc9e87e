"""The taps of a recording: a folder beside it, with one .npz for each sequence that has ended.
`read_taps` reads it.

    run.jsonl              the recording
    run.jsonl.taps/0.npz   the arrays of sequence "0"; in a name, all characters but letters, digits
                           and "_.-~" are %-escaped

A file gets its name when it is complete. So the files can be read while the engine runs, and after
it was killed.
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
from pagedjax.engine.taps import StepTaps, TapsBegin
from pagedjax.host.event_log import Cancel, Commit
from pagedjax.host.types import Event, Finished
from pagedjax.text.tap_arrays import TapArrays, TapCollector, collectors

ENDING = ".npz"


def folder_of(recording: str | os.PathLike[str]) -> Path:
    """Returns the folder of a recording's taps."""
    return Path(f"{os.fspath(recording)}.taps")


class TapWriter:
    """Writes the arrays of taps while an engine records. The folder is made when the first sequence
    with taps ends.

    Files of an earlier recording of the same name are deleted. If the disk is full, a file is
    missing, and steps continue.
    """

    def __init__(self, recording: str | os.PathLike[str]) -> None:
        self.folder = folder_of(recording)
        self._open: dict[str, TapCollector] = {}
        for file in self.folder.glob(f"*{ENDING}"):
            file.unlink()

    def note(self, log: Sequence[LogEntry]) -> None:
        """Follow the transitions of an engine, in their order."""
        for entry in log:
            match entry:
                case TapsBegin(names, prompt_len):
                    self._open |= collectors(names, prompt_len)
                case StepTaps(parts):
                    for part in parts:
                        self._open[part.request_id].take(part)
                case Commit() | Cancel():
                    self._end(entry.events)

    def _end(self, events: Sequence[Event]) -> None:
        """Write the sequences that have ended."""
        for event in events:
            if not isinstance(event, Finished) or event.request_id not in self._open:
                continue
            arrays = self._open.pop(event.request_id).arrays(event.num_output)
            try:
                self._write(event.request_id, arrays)
            except OSError as error:
                warnings.warn(
                    f"the taps of {event.request_id!r} are not written to {self.folder}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _write(self, name: str, arrays: TapArrays) -> None:
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"{quote(name, safe='')}{ENDING}"
        partial = file.with_suffix(".part")
        with open(partial, "wb") as out:
            np.savez(out, allow_pickle=False, **_arrays_by_name(arrays))
        partial.rename(file)


def _arrays_by_name(arrays: TapArrays) -> dict[str, np.ndarray]:
    """Returns the arrays by their names in a file. All arrays of a layer's attention are flattened
    into one.
    """
    by_name = {f"hidden_states.{layer}": states for layer, states in arrays.hidden_states.items()}
    for layer, (ids, weights) in arrays.experts.items():
        by_name |= {f"experts.{layer}": ids, f"expert_weights.{layer}": weights}
    for layer, rows in arrays.attention.items():
        shapes = np.array([row.shape for row in rows], np.int64).reshape(-1, 2)
        flat = [row.reshape(-1) for row in rows] or [np.zeros(0, np.float32)]
        by_name |= {
            f"attention.{layer}": np.concatenate(flat),
            f"attention_shapes.{layer}": shapes,
        }
    return by_name


class TapFiles(Mapping[str, TapArrays]):
    """The arrays of taps, by the ids of sequences. A file is read at each access."""

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
            prefix = f"{kind}."
            return {
                int(key.removeprefix(prefix)): array
                for key, array in arrays.items()
                if key.startswith(prefix)
            }

        shapes = by_layer("attention_shapes")
        attention = {}
        for layer, flat in by_layer("attention").items():
            ends = np.cumsum(shapes[layer].prod(1))
            rows = np.split(flat, ends)[:-1]  # the part after the last end is empty
            attention[layer] = tuple(
                row.reshape(shape) for row, shape in zip(rows, shapes[layer], strict=True)
            )
        weights = by_layer("expert_weights")
        experts = {layer: (ids, weights[layer]) for layer, ids in by_layer("experts").items()}
        return TapArrays(by_layer("hidden_states"), attention, experts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_taps(path: str | os.PathLike[str]) -> TapFiles:
    """Returns the arrays of a recorded run's taps, by the ids of its sequences.

    Args:
        path: the recording that `engine.record` wrote, or the folder of taps beside it.

    Raises:
        ValueError: there is no such folder, because no sequence with taps ended while the engine
        recorded.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = folder_of(path)
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: no request with taps ended in this recording"
        )
    return TapFiles(folder)

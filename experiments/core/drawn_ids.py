"""Token ids that are drawn when they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np


class DrawnIds(Sequence[int]):
    """A sequence of token ids that a subclass draws anew each time it is read, so that the prompts
    of a long load do not fill the memory. It is equal to any sequence of the same ids.
    """

    __slots__ = ("_length",)

    _length: int

    @abstractmethod
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The ids, [length]."""

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return np.asarray(self).tolist()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(np.asarray(self).tolist())

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Sequence) and len(self) == len(value) and list(self) == list(value)

    def __hash__(self) -> int:
        return hash(tuple(self))

"""`ParamSource`: the tensors of a checkpoint that make one parameter. A family's `param_table`
lists them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple


class ParamSource(NamedTuple):
    """One parameter: the tensors `sources`, each [out, in] or [n], joined on axis 0, with the rows
    in the order `order`, then transposed if `transpose`.

    path: its place in the tree of parameters, e.g. ("layers", "0", "qkv").
    shape: of the finished parameter.
    rows: the number of rows of each source, so that an error can name the wrong source; () if there
        is one source, or to check only the sum.
    optional: omit the parameter if none of its sources exists.
    stacked: the one source has so many matrices of equal size, [stacked, out, in], or as many
        vectors [stacked, n]. They are joined on axis 0. With `transpose` each is transposed first,
        [stacked, in, out], and not what they make. 0: the sources are not stacked.
    order: a permutation of the joined rows: row i of the parameter is row order[i] of them; (): they
        stay as they are.
    alternative: the same parameter as other files have it, e.g. all experts in one tensor.
    """

    path: tuple[str, ...]
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool = False
    rows: tuple[int, ...] = ()
    optional: bool = False
    order: tuple[int, ...] = ()
    stacked: int = 0
    alternative: ParamSource | None = None

    def in_files(self, names: Container[str]) -> ParamSource:
        """The entry for files with tensors of these names: itself, or the alternative if they have
        all of its sources.
        """
        alternative = self.alternative
        if alternative and all([name in names for name in alternative.sources]):
            return alternative
        return self

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of all sources together, as files have them."""
        if not self.stacked:
            return self.shape[::-1] if self.transpose else self.shape
        of_one = self.shape[0] // self.stacked, *self.shape[1:]
        return self.stacked, *(of_one[::-1] if self.transpose else of_one)

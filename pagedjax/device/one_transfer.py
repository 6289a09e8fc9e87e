"""The arrays that the host sends in every step, as one array: a transfer to a device costs the host time of its own.

A step of decodes sends some fifteen small arrays. What is mostly on the device already stays outside: the arrays of
sampling options, the tokens of the step before, drafts, the factors of adapters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from pagedjax.device.batch import Batch, Feed, SamplingBatch

CORE = Batch._fields.index("sampling")  # the fields before it are arrays that every step sends


@partial(jax.tree_util.register_dataclass, data_fields=["words", "rest"], meta_fields=["tree", "layout"])
@dataclass(frozen=True)
class OneTransfer:
    """A `Batch` as a step's program takes it.

    Attributes:
        words: [N] i32: the bits of its arrays of 32-bit numbers, one behind the other.
        rest: its other arrays.
        tree: how the arrays of `words` form a tree (`joined`).
        layout: the shape and the dtype of each.
    """

    words: Any
    rest: Any
    tree: Any
    layout: tuple[tuple[tuple[int, ...], np.dtype], ...]


def joined(batch: Batch) -> OneTransfer:
    """The batch for a step's program. Its arrays of 32-bit numbers are copied."""
    core, sampling, feed = batch[:CORE], batch.sampling, batch.feed
    arrays, tree = jax.tree.flatten((core, sampling[:-1], feed and feed.rows, batch.seen, batch.groups))
    arrays = [np.asarray(array) for array in arrays]
    words = np.concatenate([array.reshape(-1).view(np.int32) for array in arrays])
    rest = sampling.features, feed and feed.tokens, batch.drafted, batch.selecting, batch.adapters
    return OneTransfer(words, rest, tree, tuple([(array.shape, array.dtype) for array in arrays]))


def parted(one: OneTransfer) -> Batch:
    """The batch again, inside of a program."""
    arrays, at = [], 0
    for shape, dtype in one.layout:
        end = at + math.prod(shape)
        arrays.append(jax.lax.bitcast_convert_type(jax.lax.slice(one.words, (at,), (end,)).reshape(shape), dtype))
        at = end
    core, sampled, rows, seen, groups = jax.tree.unflatten(one.tree, arrays)
    features, tokens, drafted, selecting, adapters = one.rest
    own = {"sampling": SamplingBatch(*sampled, features=features), "feed": None if rows is None else Feed(rows, tokens)}
    return Batch(*core, **own, drafted=drafted, seen=seen, groups=groups, selecting=selecting, adapters=adapters)

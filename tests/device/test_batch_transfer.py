"""A batch goes to the device as one array, and a program gets the same bits from it."""

from __future__ import annotations

import chex
import jax
import numpy as np
import pytest

from pagedjax.device.batch import Shapes, blank_sampling, joined, parted
from pagedjax.device.extras import Feed, GroupTables
from pagedjax.device.layer_groups import LayerPages, layer_groups
from pagedjax.engine.pack import pack
from pagedjax.engine.requests import SequenceData
from pagedjax.host.types import Plan, Request, Seq
from pagedjax.options.params import SamplingParams

pytestmark = pytest.mark.few_optimisations

SHAPES = Shapes(
    tokens=(4, 8), max_seqs=3, block_size=4, table_width=5, max_model_len=20, vocab_size=50
)
LAYOUT = layer_groups([LayerPages(window) for window in (None, 8, None, 8)])


def batch_of(shapes: Shapes, counts: tuple[int, ...]):
    """A step of rows that have computed four tokens each; the blanks are on the device."""
    rows = range(len(counts))
    seqs = tuple(
        [Seq(Request(str(i), 6, 5), i, 20, 4 + counts[i], 4, (2 + i, 5 + i) * 2) for i in rows]
    )
    lengths = tuple([4 + count for count in counts])
    params = SamplingParams(temperature=0.7, top_k=3)
    data = {
        str(i): SequenceData(params, 2**32 - 1 - i, 6, np.arange(20, dtype=np.int32) + i)
        for i in rows
    }
    blanks = {n: jax.device_put(blank_sampling(n)) for n in (3, 4)}
    plan = Plan(0, seqs, lengths, (4,) * len(counts), counts, *[()] * 9, 0, 0, 9)
    return pack(plan, data, shapes, blanks)


@pytest.mark.default_cases(
    "mixed-False",
    "mixed-True",
    "decodes alone-True",
    "a KV policy-True",
    "two groups of layers-True",
)
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        SHAPES,
        SHAPES._replace(tokens=(3,), decode_buckets=(3,)),
        SHAPES._replace(view=(2, (0,))),
        SHAPES._replace(layout=LAYOUT),
    ],
    ids=["mixed", "decodes alone", "a KV policy", "two groups of layers"],
)
def test_a_program_gets_the_bits_of_the_batch(shapes, fed):
    batch = batch_of(shapes, (1, 1) if shapes.decode_buckets else (1, 3))
    assert (batch.cu_q_lens is None) == bool(shapes.decode_buckets)
    assert (batch.extra(GroupTables) is not None) == (shapes.layout is not None)
    if fed:
        feed = Feed(np.arange(len(batch.tokens), dtype=np.int32), jax.numpy.arange(3))
        batch = batch._replace(extras=(feed, *batch.extras))
    received = jax.jit(parted)(joined(batch))
    chex.assert_trees_all_equal_shapes_and_dtypes(received, batch)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, received), jax.tree.map(np.asarray, batch))


def test_one_array_comes_from_the_host():
    """Beside those of sampling options that a row uses: here `top_k`, whether it is on and its
    value.
    """
    leaves = jax.tree.leaves(joined(batch_of(SHAPES, (1, 3))))
    assert [leaf.dtype.name for leaf in leaves if isinstance(leaf, np.ndarray)] == [
        "int32",
        "bool",
        "int32",
    ]

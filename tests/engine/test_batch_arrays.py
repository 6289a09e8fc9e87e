"""A new array of a batch is one class and one function in one file; layers read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import chex
import jax
import numpy as np

from pagedjax.device.batch import Batch
from pagedjax.device.checks import check_shape
from pagedjax.device.extras import Extra, SampleRows
from pagedjax.device.models import Model, assemble
from pagedjax.device.models.decoder import Block
from pagedjax.engine import pack
from pagedjax.engine.pack import Packing
from pagedjax.weights.trained import named, nested, whole
from tests.engine.runs import greedy, small_llm
from tests.refusals import refused

# those of test_penalties.py, whose program the unchanged models have
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "block_size": 8,
    "num_blocks": 64,
}
PROMPTS = [np.random.default_rng(i).integers(3, 320, n).tolist() for i, n in enumerate((5, 33, 1))]
MUTED_SEED = 7

# the array ----------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Volume(Extra):
    """What each token's MLPs are multiplied with."""

    words = ("factors",)

    factors: Any  # [T] float32

    def check(self, batch: Batch) -> None:
        check_shape("volume.factors", self.factors, batch.tokens.shape)

    def at_samples(self, batch: Batch, rows: SampleRows) -> Volume:
        return Volume(self.factors[batch.last])


def volume(packing: Packing) -> Volume:
    """Requests of one seed have no MLPs."""
    row_factors = np.array([row.params.seed != MUTED_SEED for row in packing.data], np.float32)
    factors = np.ones(len(packing.batch.tokens), np.float32)
    factors[: len(packing.row_of_token)] = row_factors[packing.row_of_token]
    return Volume(factors)


class LoudBlock(Block):
    """A layer that reads it."""

    def rest(self, x: jax.Array, y: jax.Array, batch: Batch) -> tuple[jax.Array, None]:
        mlp = self.mlp(y, norm=self.mlp_norm, used=batch.used_tokens)
        array = batch.extra(Volume)
        assert array is not None
        return y + array.factors[:, None] * mlp, None


# the tests ----------------------------------------------------------------------------------------


def changed(model: Model, *, muted: bool = False, block: type[Block] | None = None) -> Model:
    """The model with MLPs that give zeros, or with layers of a class."""
    params = named(whole(model))
    if muted:
        params = {name: x * ("mlp.down" not in name) for name, x in params.items()}
    return assemble(replace(model.config, block=block), nested(params), model.dtype)


def answers(pretrained: Any, model: Model, seeds: tuple[int, ...]) -> list[Any]:
    """The tokens and log-probabilities of all prompts, in one batch."""
    llm = small_llm(replace(pretrained, model=model), **SIZES)
    params = [greedy(6, seed=seed, logprobs=0) for seed in seeds]
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    return [(output.token_ids, output.cumulative_logprob) for output in outputs]


def test_layers_read_an_array_of_the_batch(tiny, monkeypatch):
    """In the same steps one request has MLPs and another has none, prompts longer than a step and
    the last layer of samples alone included.
    """
    plain = answers(tiny, tiny.model, (1, 1, 1))
    muted = answers(tiny, changed(tiny.model, muted=True), (1, 1, 1))
    monkeypatch.setattr(pack, "ARRAYS", (*pack.ARRAYS, volume))
    mixed = answers(tiny, changed(tiny.model, block=LoudBlock), (1, MUTED_SEED, 1))
    expected = [plain[0], muted[1], plain[2]]
    assert plain[1] != muted[1]
    for (tokens, logprob), (other_tokens, other_logprob) in zip(mixed, expected, strict=True):
        assert tokens == other_tokens
        chex.assert_trees_all_close(logprob, other_logprob, atol=1e-3)


def test_an_array_that_does_not_fit_is_refused(tiny, monkeypatch):
    def too_short(packing: Packing) -> Volume:
        return Volume(np.ones(3, np.float32))

    monkeypatch.setattr(pack, "ARRAYS", (*pack.ARRAYS, too_short))
    with refused(r"volume.factors has shape \[3\]"):
        answers(tiny, tiny.model, (1, 1, 1))  # when the step is traced

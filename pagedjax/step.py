"""The jits of the library, and its donations: of the cache, to the step and to the copying of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.attention import Attend
from pagedjax.batch import Batch
from pagedjax.cache import KVCache, copy
from pagedjax.sampling import PromptLogprobs, Sampled, prompt_logprobs, sample

Step = Callable[[Any, KVCache, Batch], tuple[KVCache, "StepOutput"]]


# copy_blocks(cache, source, target) -> cache; padding copies the trash block onto itself
copy_blocks = jax.jit(copy, donate_argnums=0)


class StepOutput(NamedTuple):
    sampled: Sampled
    prompt: PromptLogprobs


def make_step(graphdef: nnx.GraphDef, attend: Attend, seed: int) -> Step:
    """step(params, cache, batch) -> (cache, StepOutput), jitted; the cache is donated and updated in place."""

    def step(params: Any, cache: KVCache, batch: Batch) -> tuple[KVCache, StepOutput]:
        model = nnx.merge(graphdef, params)
        cache, hidden = model.hidden(cache, batch, attend)
        sampled = sample(model.logits(hidden[:, batch.last]), batch.sampling, jnp.uint32(seed))
        return cache, StepOutput(sampled, prompt_logprobs(model.logits, hidden, batch.targets))

    return jax.jit(step, donate_argnums=1)

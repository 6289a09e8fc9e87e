"""A test mode of the engine: after every step, each block that has no content holds NaN in all its
slots.

A block that is read before its new owner has written it, or past the end of what was written, would
show."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.engine.engine import Engine

STRAY_TOKEN = 3  # an ordinary token: penalties that read one of a free block change the text


@partial(jax.jit, donate_argnums=0)
def _spoil(pages, free):
    def value(array):
        return jnp.nan if jnp.issubdtype(array.dtype, jnp.floating) else STRAY_TOKEN

    return jax.tree.map(lambda array: array.at[free].set(value(array)), pages)


def poison(engine: Engine) -> int:
    """Spoil the free blocks -> how many there are."""
    used = set(engine.scheduler_state.pool.owners) | set(engine.scheduler_state.pool.hashes)
    free = np.array(sorted(set(range(1, engine.config.num_blocks + 1)) - used), np.int32)
    # one shape for any number of them: the rest spoil one block twice
    ids = np.resize(free, engine.config.num_blocks) if len(free) else None
    if ids is not None:
        engine._state = engine._state._replace(cache=_spoil(engine._state.cache, ids))
    return len(free)


def poisoned(engine: Engine) -> list[int]:
    """Spoil free blocks from now on, after every step -> the numbers of them, as they come."""
    step, counts = engine.step, [poison(engine)]

    def stepped():
        result = step()
        counts.append(poison(engine))
        return result

    engine.step = stepped  # type: ignore[method-assign]
    return counts

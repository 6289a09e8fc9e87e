"""Updates of a training state: AdamW, one step of an optimiser, and the steps between two lines of a
table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.core.optional_imports import require
from experiments.training.checkpoints import State

optax = require("optax")


def adamw(setup: Any, end: int = 10, **options: Any) -> Any:
    """AdamW with clipped gradients.

    The rate rises to `setup.rate` over a tenth of the steps, then falls along a cosine to
    `setup.rate / end`.
    """
    warm_up = max(1, setup.steps // 10)
    rates = optax.warmup_cosine_decay_schedule(
        0.0, setup.rate, warm_up, max(setup.steps, warm_up + 1), setup.rate / end
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, **options))


def first_state(method: Any, params: Any, **options: Any) -> State:
    """The state before the first step, on the device. options: options of `jax.device_put`."""
    return jax.device_put(State(params, method.init(params)), jax.devices()[0], **options)


def next_state(method: Any, state: State, gradients: Any) -> State:
    """The state after a step of the optimiser `method`."""
    changes, optimiser = method.update(gradients, state.optimiser, state.params)
    return State(optax.apply_updates(state.params, changes), optimiser)


def run_steps(
    update: Callable[[State, int], tuple[State, jax.Array]], state: State, first: int, end: int
) -> tuple[State, float, float]:
    """Run the steps from `first` to before `end`. Returns (state, mean loss, seconds a step).

    Args:
        update: (state, step) -> (state, loss).
    """
    started = time.perf_counter()
    losses = []
    for step in range(first, end):
        state, loss = update(state, step)
        losses.append(loss)
    mean = float(np.mean(jax.device_get(losses)))
    return state, mean, (time.perf_counter() - started) / (end - first)

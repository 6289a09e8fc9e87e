"""Workloads of worlds: (key, workload) -> `Requests`, drawn inside the compiled program.

A workload of your own is such a function, with parameters of its own; `of_arrays` has requests that
are given, such as those of a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.twin.cost import MICROSECONDS
from experiments.twin.scheduler import Requests, Sizes, blocks_for

Draw = Callable[[jax.Array, Any], Requests]

LATEST = 2**30  # microseconds: a later arrival would leave too little time in an int32
MOST_TOKENS = 2**30  # of all requests together, at their longest: sums are int32
MOST_PREDICTED = 2**27 - 2  # as learned.log2 has room for
LARGEST_PRIORITY = 2**20  # of either sign


class Lengths(NamedTuple):
    """A log-normal distribution of tokens, rounded and cut off: float32 [] or [kinds]."""

    median: Any
    sigma: Any  # of the logarithm
    shortest: Any = 1.0
    longest: Any = 4096.0


class Poisson(NamedTuple):
    """Requests that arrive at random, of several kinds.

    rate: requests a second.
    kinds: float32 [kinds], the shares of the kinds. A kind is a user, numbered from 0.
    prompt, output: `Lengths` by kind.
    spread: how wrong predictions are: a predicted length is the true one times a log-normal factor
        with this sigma; 0 is an oracle.
    max_tokens: output tokens that each request may have. It does not end sooner for them, but they
        are its `limit`.
    """

    rate: Any
    kinds: Any
    prompt: Lengths
    output: Lengths
    spread: Any = 1.0
    max_tokens: Any = 4096


def poisson(count: int) -> Draw:
    """Draws of `count` requests of a `Poisson`. A draw raises ValueError if there are more kinds
    than requests, because each kind is a user.
    """

    def draw(key: jax.Array, workload: Poisson) -> Requests:
        num_kinds = jnp.shape(workload.kinds)[0]
        if num_kinds > count:
            raise ValueError(
                f"the workload has {num_kinds} kinds, and an episode {count} requests; each kind is "
                f"a user, and users are numbered below the requests: draw at least {num_kinds}"
            )
        gaps, kinds, prompts, outputs, errors = jax.random.split(key, 5)
        seconds = jnp.cumsum(jax.random.exponential(gaps, (count,))) / workload.rate
        kind = jax.random.choice(kinds, num_kinds, (count,), p=jnp.asarray(workload.kinds))
        prompt_len = _lengths(prompts, workload.prompt, kind)
        output = jnp.minimum(_lengths(outputs, workload.output, kind), workload.max_tokens)
        error = jnp.exp(workload.spread * jax.random.normal(errors, (count,)))
        predicted = jnp.clip(jnp.round(output * error), 1, workload.max_tokens)
        return Requests(
            arrival=jnp.minimum(jnp.round(MICROSECONDS * seconds), LATEST).astype(jnp.int32),
            prompt_len=prompt_len,
            final_len=prompt_len + output,
            limit=(prompt_len + workload.max_tokens).astype(jnp.int32),
            predicted=predicted.astype(jnp.int32),
            priority=jnp.zeros((count,), jnp.int32),
            user=kind.astype(jnp.int32),
        )

    return draw


def mixed(rate: float, spread: float) -> Poisson:
    """Chats, summaries (long prompts, short answers) and essays (short prompts, long answers). Each
    has at most 1,600 tokens. So the shortest prompt is a bad guess of the shortest request.
    """
    return Poisson(
        rate=rate,
        kinds=np.asarray([0.5, 0.3, 0.2], np.float32),
        prompt=Lengths(
            np.asarray([60, 400, 40], np.float32), np.asarray([0.8, 0.5, 0.5], np.float32), 4, 1000
        ),
        output=Lengths(
            np.asarray([60, 25, 250], np.float32), np.asarray([0.8, 0.5, 0.5], np.float32), 2, 600
        ),
        spread=spread,
        max_tokens=600,
    )


def _lengths(key: jax.Array, lengths: Lengths, kind: jax.Array) -> jax.Array:
    """int32 [N]: a length of each request."""

    def of_kind(parameter: Any) -> jax.Array:
        values = jnp.asarray(parameter, jnp.float32)
        return values[kind] if values.ndim else values

    noise = of_kind(lengths.sigma) * jax.random.normal(key, kind.shape)
    tokens = jnp.round(of_kind(lengths.median) * jnp.exp(noise))
    limits = of_kind(lengths.shortest), of_kind(lengths.longest)
    return jnp.clip(tokens, *limits).astype(jnp.int32)


def given(key: jax.Array, requests: Requests) -> Requests:
    """The requests themselves, in each episode."""
    return requests


def of_arrays(
    seconds: Any,
    prompt_len: Any,
    output_len: Any,
    max_tokens: int,
    *,
    sizes: Sizes | None = None,
    **columns: Any,
) -> Requests:
    """Requests of a trace, for `given`.

    Args:
        seconds: arrivals, ascending, [N].
        prompt_len, output_len: tokens, at least 1 each, [N].
        max_tokens: output tokens that each may have.
        sizes: of the scheduler. If they are given, a request that can grow beyond the pool is
            refused, as the scheduler refuses it; else it never ends.
        columns: "priority", "user" (0 to N - 1) and "predicted", [N]; 0 if they are left out.

    Raises:
        ValueError: a column is unknown or has another length, arrivals do not ascend, or a value is
            out of its range.
    """
    names = ("priority", "user", "predicted")
    for name in columns:
        if name not in names:
            raise ValueError(f"there is no column {name!r}; give some of {', '.join(names)}")
    arrival = np.round(MICROSECONDS * np.asarray(seconds, np.float64))
    prompts = np.asarray(prompt_len)
    outputs = np.asarray(output_len)
    zeros = np.zeros_like(prompts)
    filled = {name: np.asarray(columns.get(name, zeros)) for name in names}
    for name, column in {"prompt_len": prompts, "output_len": outputs, **filled}.items():
        if column.shape != arrival.shape:
            raise ValueError(
                f"{name} has the shape {column.shape} and seconds {arrival.shape}; "
                "give one number for each request"
            )
    if not (np.all(np.diff(arrival) >= 0) and np.all(arrival >= 0)):  # nor are they NaN
        raise ValueError("seconds must ascend from 0; sort the requests by their arrivals")
    if np.any(arrival > LATEST):
        raise ValueError(
            f"the last request arrives after {arrival.max() / MICROSECONDS:.0f} seconds; at most "
            f"{LATEST / MICROSECONDS:.0f} fit: cut the trace into parts"
        )
    if np.any(prompts < 1) or np.any(outputs < 1) or np.any(outputs > max_tokens):
        raise ValueError(
            "each request needs a prompt of at least 1 token, and from 1 to max_tokens "
            f"({max_tokens}) tokens of output; leave the others out"
        )
    limits = prompts.astype(np.int64) + max_tokens
    if limits.sum() > MOST_TOKENS:
        raise ValueError(
            f"the requests have up to {limits.sum()} tokens together; at most {MOST_TOKENS} fit: "
            "lower max_tokens, or cut the trace into parts"
        )
    bounds = {
        "user": (0, len(arrival) - 1),
        "predicted": (0, MOST_PREDICTED),
        "priority": (-LARGEST_PRIORITY, LARGEST_PRIORITY),
    }
    for name, (lowest, highest) in bounds.items():
        outside = (filled[name] < lowest) | (filled[name] > highest)
        if np.any(outside):
            raise ValueError(
                f"{name} of a request is {filled[name][outside][0]}; number it within {lowest} and "
                f"{highest}"
            )
    if sizes is not None:
        need = int(blocks_for(limits.max(initial=0), sizes))
        if need > sizes.num_blocks:
            raise ValueError(
                f"a request can grow to {limits.max()} tokens, which is {need} blocks of "
                f"{sizes.block_size}, but the pool has {sizes.num_blocks}; raise num_blocks to "
                f"{need}, or lower max_tokens, or leave the request out"
            )
    return Requests(
        arrival.astype(np.int32),
        prompts.astype(np.int32),
        (prompts + outputs).astype(np.int32),
        (prompts + max_tokens).astype(np.int32),
        filled["predicted"].astype(np.int32),
        filled["priority"].astype(np.int32),
        filled["user"].astype(np.int32),
    )

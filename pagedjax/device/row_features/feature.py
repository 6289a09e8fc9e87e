"""`RowFeature`: one sampling option, from the parameters of a request to the logits of its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax

if TYPE_CHECKING:
    from pagedjax.options.params import SamplingParams

Stage = Literal["logits", "probs"]
Values = Mapping[str, Any]  # by field: the numbers of one row, or their arrays for B rows


class RowContext(NamedTuple):
    """What a feature may read of the rows beside its own arrays."""

    tokens: jax.Array  # [P, S] int32 token ids of the cache's slots
    block_tables: jax.Array  # [B, M] int32
    seq_lens: jax.Array  # [B] int32 tokens known, with those of this step
    prompt_len: jax.Array  # [B] int32
    position: jax.Array  # [B] int32 index of the sampled token among the outputs


class RowFeature(NamedTuple):
    """A sampling option.

        BOOST = RowFeature(
            name="boost_eos",
            stage="logits",
            off={"boost": np.float32(0)},
            read=lambda params, stop_ids: {"boost": params.extra_args["boost_eos"]},
            apply=lambda x, rows, context: x.at[:, EOS].add(rows["boost"]),
            params=("boost_eos",),
        )

    Attributes:
        name: unique in a chain.
        stage: "logits" changes [B, V] logits, also of greedy rows; "probs" changes [B, V]
            unnormalised probabilities, after the temperature.
        off: by field, the value that changes nothing: a numpy scalar or array. It fixes the dtype
            and the shape of the field.
        read: (params, stop_ids) -> the value of each field for one request, or None if it does not
            use the feature. It is called once for each request. It may raise ValueError; the
            message that a user sees begins with "request 'a': ".
        apply: (x, fields, context) -> x, traced. Each field is an array [B, ...]; rows that do not
            use the feature have the `off` values and must not change.
        params: what the feature reads: fields of `SamplingParams`, and names in its `extra_args`. A
            request is read if one of the fields has another value than its default, or extra_args
            has one of the names.
        per_step: whether each sample of a step has values of its own (engine/pack.py), in the place
            of the request's values.
        reads_tokens: whether `apply` reads the context's tokens. The blocks of a request that uses
            it are never given back, because the tokens are in them.
        threshold: (x, cutoff, fields) -> [B] int32, of a feature of the stage "probs" that zeroes
            small weights and does nothing else: bits of a float32, below which weights are zeroed.
            Those below `cutoff` [B] are zeroed already, though x still has them. The larger one of
            the two holds. Rows that do not use the feature must lose no weight by it. Such features
            are computed before others, and do what `apply` does. None: only `apply` says what the
            feature does.
    """

    name: str
    stage: Stage
    off: Mapping[str, Any]
    read: Callable[[SamplingParams, tuple[int, ...]], Values | None]
    apply: Callable[[jax.Array, Mapping[str, jax.Array], RowContext], jax.Array]
    params: tuple[str, ...]
    per_step: bool = False
    reads_tokens: bool = True
    threshold: Callable[[jax.Array, jax.Array, Mapping[str, jax.Array]], jax.Array] | None = None

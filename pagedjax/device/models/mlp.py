"""The MLP of a layer, and a mixture of experts in its place.

    MLP         down(activation(gate) * up), or down(activation(up))
    SparseMLP   each token goes through a few of many MLPs, and through shared ones in some models

`Experts` says how a mixture chooses, and what it has beside the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.device.extras import TokenAdapters
from pagedjax.device.layers import Linear, add_weight, product, summed, values
from pagedjax.device.linear import Matrix, linear
from pagedjax.device.row_reductions import rounded, row_sums, softmax, weighted_sums

if TYPE_CHECKING:
    from pagedjax.device.models.decoder import DecoderConfig

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
IN_BOUNDS = "promise_in_bounds"
LEAST_SUM = 1e-20  # is added to a sum of sigmoids, all of which may be zero


class Groups(NamedTuple):
    """A token chooses among the experts of a few groups alone (DeepSeek V2, arXiv 2405.04434).

    count: of groups of equal size; the experts of a group are neighbours.
    chosen: how many groups a token uses.
    best: a group's score is the sum of its `best` largest scores.
    """

    count: int
    chosen: int
    best: int


class ClampedGates(NamedTuple):
    """Gates and ups of experts are clamped: (up + 1) * gate * sigmoid(alpha * gate), with gates of
    at most `limit` and ups within -limit to limit (GPT-OSS).
    """

    alpha: float
    limit: float

    def __call__(self, products: jax.Array) -> jax.Array:
        """Gates and ups [T, 2 F] -> [T, F], float32."""
        gate, up = jnp.split(products, 2, axis=1)
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(self.alpha * gate))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (Shazeer et al. 2017): each token uses `chosen` of `count` MLPs of size
    F.

    normalised: the weights of the chosen experts add up to 1; else they are the scores.
    devices: each device has `count / devices` experts, in the order of the mesh's axis `expert`.
    scores: of all experts, by the router's products; "softmax" or "sigmoid".
    corrected: each expert has a number that is added to its score for the choice alone, and not in
        its weight (Wang et al. 2024, arXiv 2408.15664).
    groups: None: a token may choose any experts.
    factor: of the weights, after all else.
    rounds_scores: the router's products are rounded to the activations' dtype, as Mixtral's and
        Qwen's are; else they stay float32.
    shared: the size of an MLP that all tokens use, beside the experts (DeepSeekMoE, arXiv
        2401.06066); 0: there is none. Several shared experts are one MLP of their joint size.
    shared_gate: the shared MLP has a gate: its result is multiplied by the sigmoid of one more
        product of the router (Qwen2-MoE).
    biases: the router and the matrices of the experts have biases.
    clamped: None: the gates are those of the model's MLPs.
    """

    count: int
    chosen: int
    intermediate: int
    normalised: bool
    devices: int = 1
    scores: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    groups: Groups | None = None
    factor: float = 1.0
    rounds_scores: bool = True
    shared: int = 0
    shared_gate: bool = False
    biases: bool = False
    clamped: ClampedGates | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count:
            raise ValueError(
                f"a token uses {self.chosen} of {self.count} experts; it must use at least one, "
                "and at most all"
            )
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores is {self.scores!r}; it must be 'softmax' or 'sigmoid'")
        if self.biases and self.shared_gate:
            raise ValueError(
                "biases and shared_gate are true; the gate of a shared MLP here has no bias: use "
                "one of the two"
            )
        if self.shared_gate and not self.shared:
            raise ValueError("shared_gate is true and shared is 0; give the size of what it gates")
        if self.groups is not None:
            self._check_groups(self.groups)

    def _check_groups(self, groups: Groups) -> None:
        if self.count % groups.count:
            raise ValueError(
                f"{self.count} experts are not {groups.count} groups of equal size; the number of "
                "experts must be a multiple of that of groups"
            )
        if not 1 <= groups.chosen <= groups.count:
            raise ValueError(
                f"a token uses {groups.chosen} of {groups.count} groups of experts; it must use at "
                "least one, and at most all"
            )
        size = self.count // groups.count
        if self.chosen > groups.chosen * size:
            raise ValueError(
                f"a token uses {self.chosen} experts, and the {groups.chosen} groups that it uses "
                f"have {groups.chosen * size}; let it use more groups or fewer experts"
            )
        if not 1 <= groups.best <= size:
            raise ValueError(
                f"a group's score is the sum of its {groups.best} largest scores, and a group has "
                f"{size} experts; use fewer groups"
            )


class MLP(nnx.Module):
    """down(activation(gate) * up) or down(activation(up)); gate and up are one product."""

    def __init__(self, c: DecoderConfig, dtype: str):
        options = {"bias": c.mlp_bias, "dtype": dtype, "stored": c.stored, "impl": c.linear}
        self.up = Linear(c.hidden, c.intermediate, gated=c.gated, **options)
        self.down = Linear(c.intermediate, c.hidden, axes=c.axes, **options)
        self.activation = c.activation
        self.gated = c.gated
        self.up_parts = c.parts["mlp.up"]
        self.down_parts = c.parts["mlp.down"]

    def __call__(
        self,
        x: jax.Array,
        *,
        norm,
        residual=None,
        used: jax.Array | None = None,
        adapters: TokenAdapters | None = None,
    ) -> jax.Array:
        """norm(x) [T, H] -> y + residual [T, H].

        Args:
            used: [1] how many tokens are not padding; None: all.
            adapters: of the tokens in this layer.
        """
        low_up = adapters.low("mlp.up", self.up_parts) if adapters else None
        low_down = adapters.low("mlp.down", self.down_parts) if adapters else None
        if self.gated:
            y = self.up(x, norm=norm, activation=self.activation, sizes=used, low=low_up)
        else:  # rounded once, after the activation
            y = self.up(x, norm=norm, sizes=used, low=low_up, dtype=jnp.float32)
            y = ACTIVATIONS[self.activation](y).astype(x.dtype)
        return self.down(y, residual=residual, sizes=used, low=low_down)


class Routes(NamedTuple):
    """The experts of each token, in the order in which its router prefers them: the one with the
    largest weight first, unless the choice is by corrected scores.
    """

    experts: jax.Array  # [T, chosen] int32
    weights: jax.Array  # [T, chosen] float32


class Router(nnx.Module):
    """Which experts compute a token. Its weight is always floats. The last row of the weight is the
    gate of the shared MLP, if that has one.
    """

    weight: Any

    def __init__(self, c: DecoderConfig, experts: Experts, dtype: str):
        rows = experts.count + experts.shared_gate
        add_weight(self, "weight", Matrix(rows, c.hidden), dtype, None, c.linear)
        self.bias = nnx.Param(jnp.zeros((rows,), dtype)) if experts.biases else None
        # never rounded: corrections grow, and only their differences matter
        correction = jnp.zeros((experts.count,), jnp.float32)
        self.correction = nnx.Param(correction) if experts.corrected else None
        self.experts = experts

    def __call__(
        self, x: jax.Array, used: jax.Array | None = None
    ) -> tuple[Routes, jax.Array | None]:
        """x [T, H] -> (experts and weights, the gate [T, 1] float32 of the shared MLP or None).

        Args:
            used: [1] how many tokens are not padding; None: all.
        """
        e = self.experts
        y = self._products(x, used).astype(jnp.float32)
        gate = None
        if e.shared_gate:
            gate = jax.nn.sigmoid(y[:, e.count :])
            y = y[:, : e.count]
        scores = softmax(y) if e.scores == "softmax" else jax.nn.sigmoid(y)
        preferences = scores
        if self.correction is not None:
            preferences = preferences + self.correction[...]
        if e.groups is not None:
            preferences = jnp.where(_in_groups(preferences, e.groups), preferences, -jnp.inf)
        weights, chosen = jax.lax.top_k(preferences, e.chosen)
        if preferences is not scores:
            weights = jnp.take_along_axis(scores, chosen, axis=1, mode=IN_BOUNDS)
        if e.normalised:
            total = row_sums(weights)[:, None]
            weights = weights / (total if e.scores == "softmax" else total + LEAST_SUM)
        if e.factor != 1:
            weights = weights * e.factor
        return Routes(chosen, weights), gate

    def _products(self, x: jax.Array, used: jax.Array | None) -> jax.Array:
        """[T, count], and one more column for a gate."""
        dtype = x.dtype if self.experts.rounds_scores else jnp.float32
        impl = self.weight.implementation
        bias = values(self.bias)
        if impl.name != "xla":
            options = {"impl": impl, "sizes": used, "bias": bias, "dtype": dtype}
            return linear(x, self.weight[...], self.weight.matrix, **options)
        # by default a TPU rounds the factors of a product to bfloat16, which may choose another
        # expert
        y = jax.lax.dot_general(
            x,
            self.weight[...],
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return (y if bias is None else y + bias).astype(dtype)


def _in_groups(preferences: jax.Array, groups: Groups) -> jax.Array:
    """[T, count] -> [T, count] bool: whether an expert is of one of the groups that its token
    uses.
    """
    of_groups = preferences.reshape(len(preferences), groups.count, -1)
    group_scores = row_sums(jax.lax.top_k(of_groups, groups.best)[0])
    _, chosen = jax.lax.top_k(group_scores, groups.chosen)
    is_chosen = (chosen[:, :, None] == jnp.arange(groups.count)).any(1)
    return jnp.repeat(is_chosen, of_groups.shape[2], axis=1)


class SharedMLP(nnx.Module):
    """A gated MLP that all tokens use, beside the experts."""

    def __init__(self, c: DecoderConfig, size: int, dtype: str):
        options = {"dtype": dtype, "stored": c.stored, "impl": c.linear}
        self.up = Linear(c.hidden, size, gated=True, **options)
        self.down = Linear(size, c.hidden, **options)  # of a part: it is summed with the experts
        self.activation = c.activation

    def __call__(
        self, x: jax.Array, gate: jax.Array | None, used: jax.Array | None = None
    ) -> jax.Array:
        """x [T, H] -> [T, H] float32, times the gate [T, 1] if there is one."""
        y = self.up(x, activation=self.activation, sizes=used)
        y = self.down(y, sizes=used, dtype=jnp.float32)
        return y if gate is None else rounded(gate * y)


class SparseMLP(nnx.Module):
    """A mixture of gated MLPs. Tokens are sorted by expert, so the weights of each expert are read
    once.

    Where devices have different experts, each device computes the pairs (token, expert) of its own
    experts, and its part of the shared MLP.
    """

    def __init__(self, c: DecoderConfig, dtype: str):
        assert c.experts is not None
        e = c.experts
        self.router = Router(c, e, dtype)
        count = e.count // e.devices
        is_gated = e.clamped is None  # else the gates are no part of the product
        up = Matrix(count * 2 * e.intermediate, c.hidden, gated=is_gated, count=count)
        down = Matrix(count * c.hidden, e.intermediate, count=count)
        add_weight(self, "up", up, dtype, c.stored, c.linear)
        add_weight(self, "down", down, dtype, c.stored, c.linear)
        self.up_bias = nnx.Param(jnp.zeros((up.outputs,), dtype)) if e.biases else None
        self.down_bias = nnx.Param(jnp.zeros((down.outputs,), dtype)) if e.biases else None
        self.shared = SharedMLP(c, e.shared, dtype) if e.shared else None
        self.config = c

    def __call__(
        self, x: jax.Array, *, norm, residual=None, used: jax.Array | None = None
    ) -> jax.Array:
        """norm(x) [T, H] -> y + residual [T, H]. used: [1] how many tokens are not padding; None:
        all.
        """
        return self.routed(x, norm=norm, residual=residual, used=used)[0]

    def routed(
        self, x: jax.Array, *, norm, residual=None, used: jax.Array | None = None
    ) -> tuple[jax.Array, Routes]:
        """The same, and the experts of the tokens. The experts of padding mean nothing."""
        c = self.config
        x = x if norm is None else norm(x)
        assert c.experts is not None
        e = c.experts
        routes, gate = self.router(x, used)
        count = e.count // e.devices  # experts of this device
        expert = routes.experts.reshape(-1)  # of each of the T * e.chosen pairs (token, expert)
        if e.devices > 1:
            # this device's experts become 0, 1, ..., so their pairs are sorted first
            expert = (expert - count * jax.lax.axis_index("expert")) % e.count
        if used is not None:  # padding has no expert
            expert = jnp.where(jnp.arange(len(expert)) < used * e.chosen, expert, e.count)
        order = jnp.argsort(expert, stable=True)
        sizes = (expert[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
        pairs = x[order // e.chosen]
        pairs = self._outputs(pairs, sizes)
        if e.devices > 1 or used is not None:
            # pairs of other devices, or of padding, have undefined numbers
            pairs = jnp.where((expert[order] < count)[:, None], pairs, 0)
        pairs = jnp.zeros_like(pairs).at[order].set(pairs).reshape(len(x), e.chosen, c.hidden)
        y = weighted_sums(pairs, routes.weights)
        if self.shared is not None:
            y = y + self.shared(x, gate, used)
        y = summed(y, c.axes)
        return (y if residual is None else y + residual).astype(x.dtype), routes

    def _outputs(self, pairs: jax.Array, sizes: jax.Array) -> jax.Array:
        """Pairs (token, expert) [T, H], expert after expert -> their results [T, H] float32, or the
        part of this device. sizes: [count] the pairs of each expert.
        """
        c = self.config
        assert c.experts is not None
        clamped = c.experts.clamped
        biases = [values(bias) for bias in (self.up_bias, self.down_bias)]
        options = {"sizes": sizes, "bias": biases[0]}
        if clamped is None:
            hidden = product(self, "up", pairs, activation=c.activation, **options)
        else:  # rounded once, after the gates
            hidden = clamped(product(self, "up", pairs, dtype=jnp.float32, **options))
            hidden = hidden.astype(pairs.dtype)
        down_bias = biases[1]
        if down_bias is not None and c.axes:  # the parts of an expert's width are added
            down_bias = jnp.where(jax.lax.axis_index("tensor") == 0, down_bias, 0)
        return product(self, "down", hidden, dtype=jnp.float32, sizes=sizes, bias=down_bias)

"""`RowChain`: the sampling options of an engine in their order, and how their values get to the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.row_features.bad_words import BAD_WORDS
from pagedjax.device.row_features.feature import RowContext, RowFeature, Stage
from pagedjax.device.row_features.listed_tokens import LISTED_TOKENS
from pagedjax.device.row_features.penalties import PENALTIES
from pagedjax.device.row_features.token_mask import token_mask
from pagedjax.device.row_features.truncation import MIN_P, TOP_K, TOP_P, cut
from pagedjax.options.own_values import own_value

if TYPE_CHECKING:
    from pagedjax.options.params import SamplingParams

# Bytes. If the fields of a feature are larger, only the rows that use the feature carry them.
SMALL = 64


class FeatureRows(NamedTuple):
    """A feature's arrays in a step."""

    on: Any  # [B] bool: the row uses the feature
    fields: dict[str, Any]  # [B, ...] each


class RowOptions(NamedTuple):
    """What one request asks of a chain, ready to be packed."""

    names: frozenset[str]  # of the features that it uses
    record: bytes  # one `RowChain.record`
    large: dict[str, bytes]  # by feature, the fields that are not in the record


class RowChain:
    """Features in the order in which they are applied.

    Attributes:
        features: all of them.
        record: the numpy dtype of a row's options: which features it uses, and the fields of the
            small ones.
    """

    def __init__(self, features: Sequence[RowFeature]) -> None:
        self.features = tuple(features)
        names = [f.name for f in self.features]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"row_features use the name {twice[0]!r} twice")
        for f in self.features:
            if f.stage not in ("logits", "probs"):
                raise ValueError(
                    f"row feature {f.name!r} has stage {f.stage!r}; it must be 'logits' or 'probs'"
                )
        self._off = {f.name: _record(f.off) for f in self.features}
        per_step = {f.name for f in self.features if f.per_step}
        small = [
            (name, off.dtype)
            for name, off in self._off.items()
            if off.nbytes <= SMALL and name not in per_step
        ]
        self._small = frozenset(name for name, _ in small)
        self.record = np.dtype([("on", "?", (len(self.features),)), *small])
        self._blank = np.zeros((), self.record)
        for name, _ in small:
            self._blank[name] = self._off[name]

    def stage(self, stage: Stage) -> tuple[RowFeature, ...]:
        return tuple(f for f in self.features if f.stage == stage)

    @cached_property
    def is_built_in(self) -> bool:
        """Whether no option is a user's own."""
        built_in = {feature.apply for feature in (*BUILT_IN, token_mask(1))}
        return all(feature.apply in built_in for feature in self.features)

    @cached_property
    def nothing(self) -> RowOptions:
        return RowOptions(frozenset(), self._blank.tobytes(), {})

    # a request ------------------------------------------------------------------------------------

    def read(self, params: SamplingParams, stop_ids: tuple[int, ...] = ()) -> RowOptions:
        """What a request asks of the features.

        Raises:
            ValueError: extra_args has a name that no feature reads, or a value that a feature
                refuses.
        """
        extra = params.extra_args or {}
        default = type(params)
        extra_names = [
            name for f in self.features for name in f.params if not hasattr(default, name)
        ]
        for name in extra:
            if name not in extra_names:
                names_text = ", ".join(map(repr, extra_names)) or "none"
                raise ValueError(
                    f"extra_args has {name!r}; the names that this engine knows are: {names_text}"
                )
        record = self._blank.copy()
        names = []
        large = {}
        for i, f in enumerate(self.features):
            if not any([_is_set(params, name) for name in f.params]):
                continue
            try:
                values = f.read(params, stop_ids)
            except ValueError:
                raise
            except Exception as error:  # a user's own `read` got values that it did not expect
                arguments = {name: getattr(params, name, extra.get(name)) for name in f.params}
                raise ValueError(
                    f"row feature {f.name!r} cannot read {arguments!r:.200} "
                    f"({type(error).__name__}: {error}); give what its `read` expects"
                ) from error
            if values is None:
                continue
            names.append(f.name)
            record["on"][i] = True
            if f.name in self._small:
                record[f.name] = _record(f.off, values)
            else:
                large[f.name] = _record(f.off, values).tobytes()
        return RowOptions(frozenset(names), record.tobytes(), large) if names else self.nothing

    def reads_tokens(self, options: RowOptions) -> bool:
        """Whether a feature that a request uses reads the tokens of its sequence."""
        return any(f.reads_tokens and f.name in options.names for f in self.features)

    # a step ---------------------------------------------------------------------------------------

    def blank(self, b: int) -> dict[str, FeatureRows]:
        """The arrays of `b` rows that use no feature, by feature."""
        return {f.name: self._rows(f.name, np.zeros(b, bool)) for f in self.features}

    def pack(
        self,
        records: np.ndarray,
        large: Callable[[int, str], bytes],
        b: int,
        without: str | None = None,
    ) -> dict[str, FeatureRows]:
        """The arrays of the features that some row uses, by feature. They have `b` rows: those of
        the records, and behind them rows that use nothing.

        Args:
            records: [rows] of the dtype `record`.
            large: (row, feature) -> the bytes of the feature in `RowOptions.large`.
            without: the name of a feature that is left out.
        """
        packed = {}
        for i in np.flatnonzero(records["on"].any(axis=0)):
            name = self.features[i].name
            if name == without:
                continue
            on = np.zeros(b, bool)
            on[: len(records)] = records["on"][:, i]
            if name in self._small:
                rows = slice(len(records))
                values = records[name]
            else:
                rows = np.flatnonzero(on)
                values = np.frombuffer(
                    b"".join([large(row, name) for row in rows.tolist()]), self._off[name].dtype
                )
            packed[name] = self._rows(name, on, rows, values)
        return packed

    def _rows(
        self, name: str, on: np.ndarray, rows: Any = (), values: np.ndarray | None = None
    ) -> FeatureRows:
        """The arrays of a feature: `values` in these rows, and the values that change nothing in
        all others.
        """
        off = self._off[name]
        fields = {}
        for field in off.dtype.names or ():
            fields[field] = np.empty((len(on), *off[field].shape), off[field].dtype)
            if values is None or len(values) < len(on):
                fields[field][:] = off[field]
            if values is not None:
                fields[field][rows] = values[field]
        return FeatureRows(on, fields)

    # on the device --------------------------------------------------------------------------------

    def uses(self, stage: Stage, rows: Mapping[str, FeatureRows]) -> jax.Array:
        """[B] bool: the row uses a feature of this stage."""
        return _uses(self.stage(stage), rows)

    def apply(
        self,
        stage: Stage,
        x: jax.Array,
        rows: Mapping[str, FeatureRows] | None,
        context: RowContext,
    ) -> jax.Array:
        """x after the features of a stage. Each one is computed only if some row uses it. Those
        with values of their own for each step come first, and before them those with a threshold.

        Args:
            rows: None: no row uses a feature.
        """
        if rows is None:
            return x

        def apply_all(
            features: Sequence[RowFeature],
            x: jax.Array,
            rows: Mapping[str, FeatureRows],
            context: RowContext,
        ) -> jax.Array:
            for f in features:
                on, fields = rows[f.name]
                if len(features) == 1:  # the branch around this function is enough
                    return f.apply(x, fields, context)
                x = jax.lax.cond(jnp.any(on), f.apply, lambda x, *_: x, x, fields, context)
            return x

        # Each group is in one more branch. A conditional copies x even where it changes nothing,
        # and most steps use no feature, or token masks alone.
        features = [f for f in self.stage(stage) if f.threshold is None]
        cuts = [f for f in self.stage(stage) if f.threshold is not None]
        if cuts:
            x = cut(x, _cutoffs(cuts, x, rows))
        by_step = [f for f in features if f.per_step]
        by_request = [f for f in features if not f.per_step]
        for group in (by_step, by_request):
            if group:
                x = jax.lax.cond(
                    jnp.any(_uses(group, rows)),
                    partial(apply_all, group),
                    lambda x, *_: x,
                    x,
                    dict(rows),
                    context,
                )
        return x


def _cutoffs(
    features: Sequence[RowFeature], weights: jax.Array, rows: Mapping[str, FeatureRows]
) -> jax.Array:
    """[B] int32 the threshold that features leave of the weights [B, V]. Each one is computed only
    if some row uses it.

    No conditional returns weights: XLA would copy them where a feature is not used.
    """

    def thresholds(weights: jax.Array, rows: Mapping[str, FeatureRows]) -> jax.Array:
        cutoff = jnp.zeros(len(weights), jnp.int32)
        for f in features:
            on, fields = rows[f.name]
            assert f.threshold is not None
            raised = partial(_raised, f.threshold)
            cutoff = jax.lax.cond(
                jnp.any(on), raised, lambda weights, cutoff, _: cutoff, weights, cutoff, fields
            )
        return cutoff

    return jax.lax.cond(
        jnp.any(_uses(features, rows)),
        thresholds,
        lambda weights, _: jnp.zeros(len(weights), jnp.int32),
        weights,
        dict(rows),
    )


def _raised(
    threshold: Callable[..., jax.Array], weights: jax.Array, cutoff: jax.Array, fields: Any
) -> jax.Array:
    """[B] int32 the larger one of a cutoff and the threshold of a feature."""
    return jnp.maximum(cutoff, threshold(weights, cutoff, fields))


def _uses(features: Sequence[RowFeature], rows: Mapping[str, FeatureRows]) -> jax.Array:
    """[B] bool: the row uses one of the features, of which there is at least one."""
    return reduce(jnp.logical_or, [rows[f.name].on for f in features])


def _is_set(params: SamplingParams, name: str) -> bool:
    """Whether a request sets a parameter: a field to another value than its default, or a name in
    `extra_args`.
    """
    default = type(params)
    if hasattr(default, name):
        return getattr(params, name) != getattr(default, name)
    return name in (params.extra_args or {})


def _record(off: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> np.ndarray:
    """[] a record with the fields of `off`, and with these values or those of `off`."""
    arrays = {name: np.asarray(value) for name, value in off.items()}
    record = np.zeros((), np.dtype([(name, a.dtype, a.shape) for name, a in arrays.items()]))
    values = off if values is None else values
    if values.keys() != off.keys():
        raise ValueError(f"a row feature has the fields {sorted(off)} and reads {sorted(values)}")
    for name, value in values.items():
        try:
            record[name] = value
        except (TypeError, ValueError, OverflowError):
            a = arrays[name]
            raise ValueError(
                f"{name} is {value!r:.80}; it must fit {a.dtype} of shape {list(a.shape)}"
            ) from None
    return record


BUILT_IN = (LISTED_TOKENS, BAD_WORDS, PENALTIES, MIN_P, TOP_K, TOP_P)


def find(name: str) -> RowFeature:
    """A feature of a user's own, by "module:NAME" or "folder/file.py:NAME".

    Raises:
        ValueError: there is no such module, file or feature.
    """
    return own_value("row_features", name, RowFeature, ())


def chain(extra: Sequence[RowFeature] = (), vocab_size: int | None = None) -> RowChain:
    """The built-in options in vLLM's order, and a user's own after those of their stage.

    Args:
        vocab_size: of the model; None: the chain has no `structured_outputs`.

    Raises:
        ValueError: two features have one name, or a stage is unknown.
    """
    masks = () if vocab_size is None else (token_mask(vocab_size),)
    return RowChain((*masks, *BUILT_IN, *extra))


DEFAULT = chain()

"""Rotary positions (Su et al. 2021): a pair of a head's numbers is turned by an angle that is
proportional to the position. `Rope` says by which angles.

A head's pairs are always (i, i + D / 2). Files of some models have other pairs, or turn only the
first numbers of a head. Their rows are brought into this order when they are read (`pair_order`),
and a pair that is not turned has the frequency 0. So there is one `rotate` for all models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.device.checks import check_shape

Entries = Mapping[str, Any]  # of a Hugging Face `rope_scaling`
ORIGINAL = "original_max_position_embeddings"  # the longest text of the first training


@dataclass(frozen=True)
class Rope:
    """The angles of one rotation.

    theta: the base of the wavelengths.
    scaling: the entries of a Hugging Face `rope_scaling`, sorted; None: no scaling.
    rotated: how many of a head's D numbers are turned (partial rotary positions); None: all.

    Raises:
        ValueError: a kind of scaling or an entry of it that is not supported, or that is missing.
    """

    theta: float
    scaling: tuple[tuple[str, Any], ...] | None = None
    rotated: int | None = None

    def __post_init__(self) -> None:
        check_scaling(self.entries)

    @property
    def entries(self) -> dict[str, Any]:
        """`scaling` as a dict."""
        return dict(self.scaling or ())

    @property
    def depends_on_context(self) -> bool:
        """Whether short texts are turned by other angles than long ones."""
        return _kind(self.entries) == "longrope"

    def check(self, head_dim: int) -> None:
        """Raises ValueError if heads of D numbers cannot be turned like this."""
        rotated = head_dim if self.rotated is None else self.rotated
        if not 2 <= rotated <= head_dim or rotated % 2 or head_dim % 2:
            raise ValueError(
                f"{rotated} of the {head_dim} numbers of a head are rotated; both must be even, "
                f"and the first is at least 2 and at most {head_dim}"
            )
        lists = {key: x for key, x in self.entries.items() if isinstance(x, (tuple, list))}
        for key, values in lists.items():
            if len(values) != rotated // 2:
                raise ValueError(
                    f"rope scaling has {len(values)} values in {key}; a head has {rotated // 2} "
                    "pairs that are rotated, and each needs one value"
                )

    def frequencies(self, head_dim: int, context: int | None = None) -> list[float]:
        """The angle, in radians for each position, of each of the D / 2 pairs of a head.

        Args:
            context: the longest text; "longrope" has other frequencies for long texts. None: it is
                long.
        """
        rotated = head_dim if self.rotated is None else self.rotated
        turned = rope_frequencies(rotated, self.theta, self.entries, context)
        return turned + [0.0] * ((head_dim - rotated) // 2)

    def table(self, head_dim: int, positions: int, context: int | None = None) -> np.ndarray:
        """Cosines and sines of the first positions: [2, positions, D / 2], float32.

        A table, because a compiler may compute a sine again in every layer and head that uses it.
        """
        frequencies = np.asarray(self.frequencies(head_dim, context), np.float32)
        angle = np.arange(positions, dtype=np.float32)[:, None] * frequencies
        table = np.stack([np.cos(angle), np.sin(angle)])
        factor = attention_factor(self.entries)
        if factor != 1:
            table[:, :, frequencies != 0] *= np.float32(factor)
        return table


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turn the pairs (i, i + D / 2) of each head: x [T, N, D], angles [2, T, D / 2] from
    `Rope.table` -> [T, N, D].
    """
    check_shape("angles", angles, (2, x.shape[0], x.shape[2] // 2))
    cos, sin = angles[:, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotate_first(x: jax.Array, angles: jax.Array) -> jax.Array:
    """As `rotate`, with one table for heads of several sizes: x [T, N, D], angles [2, T, P].

    Heads with fewer than P pairs do not use the end of the table. In heads with more, the pairs
    behind the first P are not turned.
    """
    pairs = x.shape[2] // 2
    turned = min(pairs, angles.shape[2])
    a, b = jnp.split(x, 2, axis=-1)
    first = jnp.concatenate([a[..., :turned], b[..., :turned]], axis=-1)
    first_a, first_b = jnp.split(rotate(first, angles[:, :, :turned]), 2, axis=-1)
    halves = first_a, a[..., turned:], first_b, b[..., turned:]
    return jnp.concatenate(halves, axis=-1)


def pair_order(head_dim: int, rotated: int | None = None, interleaved: bool = False) -> list[int]:
    """The order in which a head's rows of a file become pairs (i, i + D / 2), for queries and keys.

    Args:
        rotated: the first `rotated` rows are turned; None: all of them.
        interleaved: the file's pairs are (2 i, 2 i + 1), as in GPT-J and GLM; else they are
            (i, i + rotated / 2), as in GPT-NeoX.
    """
    rotated = head_dim if rotated is None else rotated
    turned = list(range(rotated))
    first = turned[::2] if interleaved else turned[: rotated // 2]
    second = turned[1::2] if interleaved else turned[rotated // 2 :]
    middle = (rotated + head_dim) // 2
    return [*first, *range(rotated, middle), *second, *range(middle, head_dim)]


# --- kinds of scaling -----------------------------------------------------------------------------


class Scaling(NamedTuple):
    """A kind of `rope_scaling`, by the names of transformers.

    required, optional: its entries.
    frequencies: (frequencies without scaling, entries, theta, context) -> frequencies. context: the
        longest text; None: long.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    frequencies: Callable[[Sequence[float], Entries, float, int | None], list[float]]


def rope_frequencies(
    rotated: int, theta: float, entries: Entries | None = None, context: int | None = None
) -> list[float]:
    """The angle, in radians for each position, of each of the `rotated` / 2 pairs.

    Args:
        entries: of the scaling; None or empty: no scaling.
        context: as in `Rope.frequencies`.
    """
    frequencies = [theta ** (-2 * i / rotated) for i in range(rotated // 2)]
    if not entries:
        return frequencies
    return SCALINGS[_kind(entries)].frequencies(frequencies, entries, theta, context)


def attention_factor(entries: Entries) -> float:
    """What sines and cosines are multiplied with: the temperature of attention in YaRN (Peng et al.
    2023, section 3.4) and LongRoPE (Ding et al. 2024); 1 for other scalings.
    """
    kind = _kind(entries)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if entries.get("attention_factor") is not None:
        return entries["attention_factor"]
    factor = entries["factor"]
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        original = entries[ORIGINAL]
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale = entries.get("mscale")
    mscale_all_dim = entries.get("mscale_all_dim")
    if mscale and mscale_all_dim:  # DeepSeek's form
        return temperature(factor, mscale) / temperature(factor, mscale_all_dim)
    return temperature(factor)


def temperature(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of queries and of keys where positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def check_scaling(entries: Entries) -> None:
    """Raises ValueError for a kind that is not supported, and for entries that the kind does not
    have, or that are missing or of the wrong type.
    """
    if not entries:
        return
    kind = _kind(entries)
    if kind not in SCALINGS:
        raise ValueError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(SCALINGS)}"
        )
    scaling = SCALINGS[kind]
    present = {key: value for key, value in entries.items() if value is not None}
    for key in scaling.required:
        if key not in present:
            raise ValueError(f"rope scaling {kind!r} has no {key}; add it to rope_scaling")
    entry_names = ("rope_type", "type", *scaling.required, *scaling.optional)
    for key, value in present.items():
        if key not in entry_names:
            having = [name for name, kind_of in SCALINGS.items() if key in kind_of.required]
            nearest = f"; {', '.join(having)} has it" if having else ""
            raise ValueError(
                f"rope scaling {kind!r} has {key} = {value!r:.40}, which is not supported; its "
                f"entries are {', '.join(entry_names[2:]) or 'none'}{nearest}"
            )
        if key in ("rope_type", "type"):
            continue
        takes_list = key in ("factors", "short_factor", "long_factor")
        is_list = isinstance(value, (tuple, list))
        numbers = value if is_list else (value,)
        if takes_list != is_list or not all(isinstance(x, (int, float)) for x in numbers):
            rule = "a list of numbers" if takes_list else "a number"
            raise ValueError(f"rope scaling {kind!r}: {key} is {value!r:.40}; it must be {rule}")
    if present.get("factor", 1) < 1:
        raise ValueError(f"rope scaling {kind!r}: factor is {present['factor']}; it is at least 1")


def _kind(entries: Entries) -> str:
    return entries.get("rope_type") or entries.get("type") or "default"


def _unscaled(frequencies: Sequence[float], *_: Any) -> list[float]:
    return list(frequencies)


def _linear(frequencies: Sequence[float], entries: Entries, *_: Any) -> list[float]:
    return [f / entries["factor"] for f in frequencies]


def _divided(frequencies: Sequence[float], entries: Entries, *_: Any) -> list[float]:
    """A divisor for each frequency, from a GGUF file."""
    return [f / divisor for f, divisor in zip(frequencies, entries["factors"], strict=True)]


def _llama3(frequencies: Sequence[float], entries: Entries, *_: Any) -> list[float]:
    factor = entries["factor"]
    low = entries["low_freq_factor"]
    high = entries["high_freq_factor"]
    original = entries[ORIGINAL]

    def scale(f: float) -> float:
        turns = original * f / (2 * math.pi)  # rotations within the original context
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))  # 1: f as it is, 0: f / factor
        return f * blend + f / factor * (1.0 - blend)

    return [scale(f) for f in frequencies]


def _yarn(frequencies: Sequence[float], entries: Entries, theta: float, _: Any) -> list[float]:
    """Peng et al. 2023, section 3.2: fast pairs keep their frequency, slow pairs are stretched by
    the factor, and the pairs between them are blended by their index.
    """
    pairs = len(frequencies)
    factor = entries["factor"]
    original = entries[ORIGINAL]

    def index_of(turns: float) -> float:
        """Which pair turns so often in the original context."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first = index_of(entries.get("beta_fast") or 32)
    last = index_of(entries.get("beta_slow") or 1)
    if entries.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * pairs - 1)
    width = last - first or 0.001  # as in transformers, so that nothing is divided by 0

    def scale(i: int, f: float) -> float:
        stretched = min(1.0, max(0.0, (i - first) / width))
        return f / factor * stretched + f * (1.0 - stretched)

    return [scale(i, f) for i, f in enumerate(frequencies)]


def _longrope(
    frequencies: Sequence[float], entries: Entries, theta: float, context: int | None
) -> list[float]:
    """Ding et al. 2024: a divisor for each frequency, others for texts that are longer than those
    of the first training.
    """
    is_long = context is None or context > entries[ORIGINAL]
    divisors = entries["long_factor" if is_long else "short_factor"]
    return [f / divisor for f, divisor in zip(frequencies, divisors, strict=True)]


SCALINGS = {
    "default": Scaling((), (), _unscaled),
    "linear": Scaling(("factor",), (ORIGINAL,), _linear),
    "llama3": Scaling(("factor", "low_freq_factor", "high_freq_factor", ORIGINAL), (), _llama3),
    "yarn": Scaling(
        ("factor", ORIGINAL),
        (
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",  # this and the next are in some files, and nothing reads them
            "max_position_embeddings",
        ),
        _yarn,
    ),
    "longrope": Scaling(
        ("factor", ORIGINAL, "short_factor", "long_factor"), ("attention_factor",), _longrope
    ),
    "freqs": Scaling(("factors",), (), _divided),
}

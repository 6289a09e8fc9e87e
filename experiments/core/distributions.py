"""Random lengths (tokens), arrival times and waits (seconds), users and classes: the parts of a
workload.

Pure functions of a generator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from pagedjax.options.config import check_above_zero

# Lengths, in tokens -------------------------------------------------------------------------------

LONGEST = 1 << 24  # tokens; a longer draw is refused as a mistake
ROUNDING = 1e-6  # tokens; more than the rounding error of a product of two floats
MOST_EXPONENT = 10  # the largest exponent of `ZipfUsers`
MOST_ERROR = 10  # the largest `error` of `Predicted`


def _check_limits(low: int, high: int | None) -> None:
    if low < 1 or (high is not None and high < low):
        raise ValueError(f"min is {low!r} and max {high!r}; they must be 1 <= min <= max")


@dataclass(frozen=True)
class Fixed:
    dist: Literal["fixed"]
    value: int
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        _check_limits(self.min, self.max)


@dataclass(frozen=True)
class Uniform:
    """Integers from `low` to `high`, both included."""

    dist: Literal["uniform"]
    low: int
    high: int
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError(f"high is {self.high!r}; it must be at least low ({self.low})")
        _check_limits(self.min, self.max)


@dataclass(frozen=True)
class Exponential:
    dist: Literal["exponential"]
    mean: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        check_above_zero("mean", self.mean)
        _check_limits(self.min, self.max)


@dataclass(frozen=True)
class Lognormal:
    """exp(normal(mu, sigma)): the median is exp(mu)."""

    dist: Literal["lognormal"]
    mu: float
    sigma: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma is {self.sigma!r}; it must be at least 0, and finite")
        if not -math.inf < self.mu <= math.log(LONGEST):
            raise ValueError(
                f"mu is {self.mu!r}, a median of exp(mu) tokens; it must be at most "
                f"{math.log(LONGEST):.1f}, the logarithm of a length, such as 6.63 for 757 tokens"
            )
        _check_limits(self.min, self.max)


Lengths = Fixed | Uniform | Exponential | Lognormal


@dataclass(frozen=True)
class Multiple:
    """`times` as many tokens as the request's output has, rounded up."""

    dist: Literal["multiple"]
    times: float
    min: int = 1
    max: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.times < math.inf:
            raise ValueError(
                f"times is {self.times!r}; it must be at least 1, because a request ends at its "
                "limit, and finite"
            )
        _check_limits(self.min, self.max)


Limits = int | Lengths | Multiple


def draw_limits(spec: Limits, outputs: Sequence[int], rng: np.random.Generator) -> list[int]:
    """The most tokens that each request asks for.

    Args:
        outputs: the length of each request's output.

    Raises:
        ValueError: see `draw_lengths`.
    """
    if isinstance(spec, int):
        return [spec] * len(outputs)
    if isinstance(spec, Multiple):
        # 1.1 * 100 is 110.00000000000001, and the limit is 110
        limits = [math.ceil(spec.times * output - ROUNDING) for output in outputs]
        return clip(limits, spec.min, spec.max)[0]
    return draw_lengths(spec, len(outputs), rng)[0]


def draw_lengths(spec: Lengths, count: int, rng: np.random.Generator) -> tuple[list[int], int]:
    """`count` lengths within [spec.min, spec.max], and how many of them had to be moved to a limit.

    Raises:
        ValueError: a drawn length is beyond LONGEST; the spec needs a `max`.
    """
    if isinstance(spec, Fixed):
        drawn = np.full(count, spec.value)
    elif isinstance(spec, Uniform):
        drawn = rng.integers(spec.low, spec.high, size=count, endpoint=True)
    elif isinstance(spec, Exponential):
        drawn = rng.exponential(spec.mean, size=count)
    else:
        drawn = rng.lognormal(spec.mu, spec.sigma, size=count)
    # 2**31 avoids an overflow; a draw beyond it is clipped by `max` or refused below
    lengths, num_cut = clip(
        [int(n) for n in np.rint(np.minimum(drawn, 2.0**31))], spec.min, spec.max
    )
    if max(lengths, default=0) > LONGEST:
        raise ValueError(
            f"{spec} draws a length of {max(lengths):,} tokens, beyond {LONGEST:,}; give it a `max`"
        )
    return lengths, num_cut


def clip(lengths: Sequence[int], low: int, high: int | None) -> tuple[list[int], int]:
    """Lengths moved into [low, high] (None: no upper limit), and how many were moved."""
    clipped = [max(low, n if high is None else min(n, high)) for n in lengths]
    return clipped, sum(a != b for a, b in zip(lengths, clipped, strict=True))


@dataclass(frozen=True)
class Predicted:
    """Predictions of the lengths of outputs, as a policy reads them: `seq.predicted`.

    error: the standard deviation of log(prediction / length), whose mean is 0; with 0 predictions
        are exact. Each request has one random number, which `error` multiplies, so that sweeps over
        `error` are paired.
    """

    error: float

    def __post_init__(self) -> None:
        if not 0 <= self.error <= MOST_ERROR:
            raise ValueError(
                f"error is {self.error!r}; it must be from 0 (exact) to {MOST_ERROR}, which is "
                "random: it is the sigma of a log-normal factor"
            )


def predicted_lengths(
    spec: Predicted, outputs: Sequence[int], rng: np.random.Generator
) -> list[int]:
    """A prediction of each length, in tokens, at least 1."""
    factors = np.exp(spec.error * rng.standard_normal(len(outputs)))
    return [max(1, round(length * factor)) for length, factor in zip(outputs, factors, strict=True)]


# Arrivals, in seconds -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AtOnce:
    process: Literal["at_once"] = "at_once"


@dataclass(frozen=True)
class Poisson:
    """`rate` requests a second, exponential gaps."""

    process: Literal["poisson"]
    rate: float

    def __post_init__(self) -> None:
        check_above_zero("rate", self.rate, "requests a second")


@dataclass(frozen=True)
class Gamma:
    """`rate` requests a second, gamma gaps of shape `burstiness` (vLLM's term): below 1 bursts, 1
    is Poisson.
    """

    process: Literal["gamma"]
    rate: float
    burstiness: float

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            check_above_zero(name, value)


@dataclass(frozen=True)
class ClosedLoop:
    """Each of `clients` sends the workload's next request when its last request has ended."""

    process: Literal["closed_loop"]
    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"clients is {self.clients!r}; it must be at least 1")


@dataclass(frozen=True)
class Changing:
    """A rate that changes: steps, ramps and bursts.

    rates: [seconds, requests a second] of each change, beginning at 0: [[0, 2], [60, 8]] is a rate
        of 2 in the first minute, and of 8 from then on.
    ramp: the rate changes evenly from one of `rates` to the next; false: at once.
    repeat_s: seconds after which the rates begin anew: [[0, 2], [50, 20]] with 60 is a burst of ten
        seconds in each minute. null: the last rate stays.
    burstiness: the shape of gamma gaps, which are measured in expected requests, not in seconds;
        see `Gamma`.
    scale: multiplies all rates.
    """

    process: Literal["changing"]
    rates: tuple[tuple[float, ...], ...]
    ramp: bool = False
    repeat_s: float | None = None
    burstiness: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("burstiness", "scale"):
            check_above_zero(name, getattr(self, name))
        for i, pair in enumerate(self.rates):
            if len(pair) != 2 or not all(0 <= number < math.inf for number in pair):
                raise ValueError(
                    f"rates[{i}] is {list(pair)!r}; it must be [seconds, requests a second], both "
                    "at least 0"
                )
        times = [pair[0] for pair in self.rates]
        if not times or times[0] != 0 or any(a >= b for a, b in pairwise(times)):
            raise ValueError(f"rates change at {times!r} s; these must begin at 0 and ascend")
        if self.repeat_s is None and not self.rates[-1][1]:
            raise ValueError(
                f"rates end with 0 requests a second at {times[-1]:g} s, so that later requests "
                "never arrive; end with a rate above 0, or set repeat_s"
            )
        if self.repeat_s is None:
            return
        if not times[-1] < self.repeat_s < math.inf:
            raise ValueError(
                f"repeat_s is {self.repeat_s!r}; it must be above {times[-1]:g} s, the last of "
                "`rates`, and finite"
            )
        if not any(pair[1] for pair in self.rates):
            raise ValueError("rates are all 0, so that no request arrives; give one above 0")


Arrivals = AtOnce | Poisson | Gamma | ClosedLoop | Changing
AT_ONCE = AtOnce()


def draw_arrivals(spec: Arrivals, count: int, rng: np.random.Generator) -> list[float]:
    """Arrival times, ascending. The first one is 0, so that a run begins with work.

    In a closed loop all are 0: a request may be sent from then on, and a driver sends it when a
    client is free.
    """
    if isinstance(spec, AtOnce | ClosedLoop):
        return [0.0] * count
    if isinstance(spec, Changing):
        gaps = rng.gamma(spec.burstiness, 1.0 / spec.burstiness, size=count)
        gaps[0] = 0.0
        return _times_of(spec, np.cumsum(gaps))
    shape = spec.burstiness if isinstance(spec, Gamma) else 1.0
    gaps = rng.gamma(shape, 1.0 / (spec.rate * shape), size=count)
    gaps[0] = 0.0
    return [float(t) for t in np.cumsum(gaps)]


def _times_of(spec: Changing, expected: np.ndarray) -> list[float]:
    """The times in seconds at which the integral of the rate reaches each value of `expected`.

    Args:
        expected: float64 [requests], ascending from 0: expected requests until each arrival.
    """
    starts = np.array([pair[0] for pair in spec.rates])
    rates = spec.scale * np.array([pair[1] for pair in spec.rates])
    seconds = np.diff(starts)
    slopes = np.diff(rates) / seconds if spec.ramp else np.zeros(len(seconds))
    # expected requests until each change, [changes]
    until_change = np.append(0.0, np.cumsum(seconds * (rates[:-1] + slopes * seconds / 2)))
    slopes = np.append(slopes, 0.0)
    periods = np.zeros(len(expected))  # whole periods before each arrival
    if spec.repeat_s is not None:
        per_period = until_change[-1] + rates[-1] * (spec.repeat_s - starts[-1])
        periods = expected // per_period
        expected = expected - periods * per_period
    # the index of the last change before each arrival
    changes = np.searchsorted(until_change, expected, side="right") - 1
    since_change = expected - until_change[changes]  # expected requests
    # the seconds t after a change solve since_change = rate * t + slope * t^2 / 2
    root = np.sqrt(np.maximum(rates[changes] ** 2 + 2 * slopes[changes] * since_change, 0.0))
    divisor = rates[changes] + root
    seconds_after = np.divide(
        2 * since_change, divisor, out=np.zeros(len(since_change)), where=divisor > 0
    )
    times = periods * (spec.repeat_s or 0.0) + starts[changes] + seconds_after
    times[0] = 0.0
    return [float(time) for time in times]


# Waits, in seconds --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedWait:
    dist: Literal["fixed"]
    value: float

    def __post_init__(self) -> None:
        _check_seconds("value", self.value)


@dataclass(frozen=True)
class UniformWait:
    """Seconds from `low` to `high`."""

    dist: Literal["uniform"]
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_seconds("low", self.low)
        _check_seconds("high", self.high)
        if self.high < self.low:
            raise ValueError(f"high is {self.high!r}; it must be at least low ({self.low})")


@dataclass(frozen=True)
class ExponentialWait:
    dist: Literal["exponential"]
    mean: float

    def __post_init__(self) -> None:
        check_above_zero("mean", self.mean, "seconds")


@dataclass(frozen=True)
class LognormalWait:
    """exp(normal(mu, sigma)): the median is exp(mu). Longer waits than `max` are `max`."""

    dist: Literal["lognormal"]
    mu: float
    sigma: float
    max: float

    def __post_init__(self) -> None:
        check_above_zero("max", self.max, "seconds")
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma is {self.sigma!r}; it must be at least 0, and finite")


Waits = FixedWait | UniformWait | ExponentialWait | LognormalWait


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be seconds, at least 0, and finite")


def draw_waits(spec: Waits, count: int, rng: np.random.Generator) -> list[float]:
    """`count` waits, in seconds."""
    if isinstance(spec, FixedWait):
        return [spec.value] * count
    if isinstance(spec, UniformWait):
        drawn = rng.uniform(spec.low, spec.high, size=count)
    elif isinstance(spec, ExponentialWait):
        drawn = rng.exponential(spec.mean, size=count)
    else:
        drawn = np.minimum(rng.lognormal(spec.mu, spec.sigma, size=count), spec.max)
    return drawn.tolist()


# Users and classes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvenUsers:
    """`count` users; each request is of each user with the same probability."""

    skew: Literal["uniform"]
    count: int

    def __post_init__(self) -> None:
        _check_users(self.count)


@dataclass(frozen=True)
class ZipfUsers:
    """`count` users; a request is of the user k = 0, 1, ... with a probability that is proportional
    to 1 / (k + 1) ** exponent.
    """

    skew: Literal["zipf"]
    count: int
    exponent: float = 1.0

    def __post_init__(self) -> None:
        _check_users(self.count)
        if not 0 <= self.exponent <= MOST_EXPONENT:
            raise ValueError(
                f"exponent is {self.exponent!r}; it must be from 0 (all users alike) to "
                f"{MOST_EXPONENT}"
            )


@dataclass(frozen=True)
class OneHeavyUser:
    """`count` users; the share `share` of the requests is of the user u0, and the other users have
    equal parts of the rest.
    """

    skew: Literal["one_heavy"]
    count: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(
                f"count is {self.count!r}; it must be at least 2, the heavy user's and another"
            )
        if not 0 < self.share < 1:
            raise ValueError(
                f"share is {self.share!r}; it must be above 0 and below 1, the part of the heavy "
                "user's requests"
            )


Users = EvenUsers | ZipfUsers | OneHeavyUser


def _check_users(count: int) -> None:
    if count < 1:
        raise ValueError(f"count is {count!r}; it must be at least 1 user")


def shares_of_users(spec: Users) -> np.ndarray:
    """The probability of each user, float64 [users]."""
    if isinstance(spec, OneHeavyUser):
        shares = np.full(spec.count, (1 - spec.share) / (spec.count - 1))
        shares[0] = spec.share
        return shares
    exponent = spec.exponent if isinstance(spec, ZipfUsers) else 0.0
    weights = np.arange(1, spec.count + 1) ** -exponent
    return weights / weights.sum()


def draw_users(spec: Users | int, count: int, rng: np.random.Generator) -> list[int]:
    """The number of the user of each of `count` requests. An int: so many users, drawn evenly."""
    if isinstance(spec, int):
        return rng.integers(0, spec, count).tolist()
    return draw_choices(shares_of_users(spec), count, rng)


def draw_choices(
    shares: Sequence[float] | np.ndarray, count: int, rng: np.random.Generator
) -> list[int]:
    """`count` indices of `shares`, each with a probability that is proportional to its share."""
    bounds = np.cumsum(shares)
    choices = np.searchsorted(bounds, rng.random(count) * bounds[-1], side="right")
    return np.minimum(choices, len(bounds) - 1).tolist()


@dataclass(frozen=True)
class ServiceClass:
    """A class of requests, such as chat, with its targets in seconds; null: no target.

    share: the share of the requests that are of this class, relative to those of the other classes.
    ttft: the target of the time to first token.
    itl: the target of the mean gap between output tokens.
    e2e: the target of the end, counted from the arrival. It is the `deadline` of the requests.
    priority: of the class's requests. A lower number is more urgent.
    """

    name: str
    share: float = 1.0
    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(
                f"name is {self.name!r}; it must have letters, digits, '-' and '_', because columns "
                "of summaries have it"
            )
        check_above_zero("share", self.share)
        for name in ("ttft", "itl", "e2e"):
            value = getattr(self, name)
            if value is not None:
                check_above_zero(name, value, "seconds")

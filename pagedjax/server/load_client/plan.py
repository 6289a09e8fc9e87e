"""The requests of a load and their times: a pure function of (`Load`, the text of its file).

Each random choice has a separate random stream. So other arrivals change no prompt, and the first k
requests do not depend on the number of requests. The same seed gives the same requests at the same
times. A server with a prefix cache finds all of them in a second run, so use another seed for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from pagedjax.server.load_client.text_files import lines, trace_rows

Endpoint = Literal["completions", "chat"]
Process = Literal["poisson", "gamma", "uniform", "at-once"]
FIRST_TOKEN = 17  # ids below are special in many vocabularies (padding, beginning, chat marks)
_ENGLISH = (
    "a about after again air all also and animal answer any around as ask at away back be because "
    "been before began between big book boy but by call came can change city close cold come could "
    "country cut day did different do door down draw each early earth eat end even every example "
    "eye face family far father feet few find fire first fish follow food for form found four "
    "friend from full gave get girl give go good great green ground group grow had hand hard has "
    "have he head hear help her here high him his hold home horse hour house how if important in "
    "is it just keep kind king know land large last late learn left letter life light like line "
    "list little live long look made make man many may me mean might mile money moon more morning "
    "most mother mountain move much music must my name near need never new next night no north not "
    "now number of off often old on once one only open or other our out over own page paper part "
    "people picture place plant play point problem put question rain read ready real red right "
    "river road rock room run said same saw say school sea second see seem sentence set she ship "
    "short should show side small snow so some song soon sound south stand star start state still "
    "stop story street strong study such sun table take talk tell ten than that the their them "
    "then there these they thing think this those thought three through time to together too took "
    "town travel tree true try turn two under until up us use very voice walk want war warm was "
    "watch water way we week well went were what wheel when where which while white who whole why "
    "wind window with without wood word work world would write year yes yet you young your"
)
WORDS = tuple(_ENGLISH.split())


@dataclass(frozen=True)
class Load:
    """The description of a load.

    Lengths are tokens, in the formats of `Lengths`; times are seconds.
    There are three kinds: lengths and arrivals are drawn at random; `trace` is the name of a file
    with both; or `prompts` is the name of a file of texts, and arrivals and output lengths are
    drawn.

    Raises:
        ValueError: a value out of its range, or values that exclude each other.
    """

    endpoint: Endpoint = "completions"
    arrivals: Process = "poisson"
    rate: float | None = None
    burstiness: float = 1.0
    requests: int | None = None  # None: 100, or every line of the file
    prompt_tokens: str = "128"
    output_tokens: str = "64"
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    trace: str | None = None
    time_scale: float = 1.0
    prompts: str | None = None
    vocab: int = 32000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kinds in (("endpoint", Endpoint), ("arrivals", Process)):
            value = getattr(self, name)
            if value not in get_args(kinds):
                raise ValueError(
                    f"{name} is {value!r}; it must be one of {', '.join(get_args(kinds))}"
                )
        for name in ("requests", "max_prompt_tokens", "max_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.trace is not None and self.prompts is not None:
            raise ValueError(
                "there is a trace and a file of prompts; a trace has lengths and no texts, so give "
                "one of them"
            )
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(
                f"rate is {self.rate}; it must be above 0 requests a second (or use arrivals "
                "at-once)"
            )
        if self.rate is None and self.trace is None and self.arrivals != "at-once":
            raise ValueError(
                f"arrivals {self.arrivals} need a rate, in requests a second; give --rate 4, or "
                "--arrivals at-once"
            )
        if not 0 < self.burstiness < math.inf:
            raise ValueError(
                f"burstiness is {self.burstiness}; it must be above 0 (below 1 bursts, 1 is "
                "Poisson)"
            )
        if not 0 <= self.time_scale < math.inf:
            raise ValueError(
                f"time_scale is {self.time_scale}; it must be at least 0 (0.5 doubles the rate)"
            )
        if self.vocab <= FIRST_TOKEN:
            raise ValueError(
                f"vocab is {self.vocab}; random prompts draw ids from {FIRST_TOKEN} up, so it must "
                "be more"
            )
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
        for name in ("prompt_tokens", "output_tokens"):
            Lengths.read(name, getattr(self, name))


class PlannedRequest(NamedTuple):
    """One request: when it arrives, what it asks, and how many tokens it may get.

    `arrival` is seconds after the start; `prompt` is token ids or a text. `user` is who sends it;
    "": not known.
    """

    arrival: float
    prompt: tuple[int, ...] | str
    max_tokens: int
    user: str = ""


class LoadPlan(NamedTuple):
    """Requests by arrival, and the number of lengths that were clipped."""

    items: tuple[PlannedRequest, ...]
    clipped_prompts: int = 0
    clipped_outputs: int = 0


def make_plan(load: Load, content: str = "", *, stream: int = 3) -> LoadPlan:
    """The plan of `load`: its requests and their times.

    Args:
        content: the text of its trace or its prompts, "" if it has neither.
        stream: the random stream of random prompts.

    Raises:
        ValueError: a file without requests, or a line of it that cannot be read.
    """
    prompt_lengths, arrival_gaps, output_lengths = (
        np.random.default_rng([load.seed, i]) for i in range(3)
    )
    texts: list[str] | None = None
    users: list[str] = []
    if load.trace is not None:
        times, prompts, outputs, users = read_trace(
            load.trace, content, load.requests, load.time_scale
        )
    else:
        if load.prompts is not None:
            texts = read_prompts(load.prompts, content, load.requests)
        count = len(texts) if texts is not None else load.requests or 100
        times = arrivals(load.arrivals, load.rate, load.burstiness, count, arrival_gaps)
        prompts = Lengths.read("prompt_tokens", load.prompt_tokens).draw(count, prompt_lengths)
        outputs = Lengths.read("output_tokens", load.output_tokens).draw(count, output_lengths)
    outputs, clipped_outputs = clip(outputs, load.max_output_tokens)
    if texts is not None:
        return LoadPlan(tuple(map(PlannedRequest, times, texts, outputs)), 0, clipped_outputs)
    prompts, clipped_prompts = clip(prompts, load.max_prompt_tokens)
    random_prompts = [
        random_prompt(load, tokens, np.random.default_rng([load.seed, stream, i]))
        for i, tokens in enumerate(prompts)
    ]
    users = users or [""] * len(times)
    requests = tuple(map(PlannedRequest, times, random_prompts, outputs, users))
    return LoadPlan(requests, clipped_prompts, clipped_outputs)


def warm_up(load: Load, count: int) -> LoadPlan:
    """A plan of `count` random requests at once, for a warm-up.

    Their prompts differ from those of `make_plan`, so that no prefix of these is cached.
    """
    return make_plan(
        replace(load, trace=None, prompts=None, arrivals="at-once", requests=count), stream=4
    )


# times --------------------------------------------------------------------------------------------


def arrivals(
    process: Process, rate: float | None, burstiness: float, count: int, rng: np.random.Generator
) -> list[float]:
    """Arrival times in seconds, ascending. The first is 0, so that a run begins with work.

    The gaps have the mean 1 / rate: exponential ones (poisson), those of a gamma distribution of
    shape `burstiness`, whose coefficient of variation is burstiness ** -0.5 (gamma), or equal ones
    (uniform).
    """
    if process == "at-once" or rate is None:
        return [0.0] * count
    if process == "uniform":
        return [i / rate for i in range(count)]
    shape = burstiness if process == "gamma" else 1.0
    gaps = rng.gamma(shape, 1.0 / (rate * shape), size=count)
    gaps[:1] = 0.0
    return np.cumsum(gaps).tolist()


# lengths ------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """A distribution of lengths, in tokens.

    Either uniform integers from `low` to `high`, both included, or lognormal numbers.
    """

    kind: Literal["uniform", "lognormal"]
    low: float  # of lognormal: mu
    high: float  # of lognormal: sigma

    @classmethod
    def read(cls, name: str, text: str) -> Lengths:
        """Read "128", "16:256" or "lognormal:6.63,0.99".

        The last has mu and sigma of the logarithm; its median is exp(mu).

        Raises:
            ValueError: something else; names the field `name`.
        """
        problem = ValueError(
            f'{name} is {text!r}; it must be like "128", "16:256" (from 1 up, the larger last) or '
            '"lognormal:6.63,0.99" (mu, sigma of at least 0)'
        )
        start, colon, end = text.partition(":")
        try:
            if start == "lognormal":
                mu, sigma = map(float, end.split(","))
                if not (math.isfinite(mu) and 0 <= sigma < math.inf):
                    raise problem
                return cls("lognormal", mu, sigma)
            low = int(start)
            high = int(end) if colon else low
        except ValueError:
            raise problem from None
        if not 1 <= low <= high < 2**31:
            raise problem
        return cls("uniform", low, high)

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Draw `count` lengths of at least 1 token."""
        if self.kind == "uniform":
            return rng.integers(int(self.low), int(self.high), size=count, endpoint=True).tolist()
        lengths = np.minimum(rng.lognormal(self.low, self.high, size=count), 2.0**31)
        return [max(1, round(length)) for length in lengths]


def clip(lengths: Sequence[int], limit: int | None) -> tuple[list[int], int]:
    """Clip lengths to [1, limit] (None: no limit) -> the lengths, and how many were changed.

    A recorded length may be 0, so it is raised to 1.
    """
    clipped = [max(1, length if limit is None else min(length, limit)) for length in lengths]
    return clipped, sum(old != new for old, new in zip(lengths, clipped, strict=True))


# files and prompts --------------------------------------------------------------------------------


def read_trace(
    file: str, content: str, limit: int | None, scale: float
) -> tuple[list[float], list[int], list[int], list[str]]:
    """Read the first `limit` rows of a recorded service -> (arrivals, prompt and output lengths,
    users).

    Arrivals are seconds after the first one.

    Args:
        scale: multiplies the recorded gaps.

    Raises:
        ValueError: a column is missing, there are no rows, or one cannot be read.
    """
    rows = trace_rows(file, content, limit=limit)
    if not rows:
        raise ValueError(f"{file} has no requests; a trace has a row for each")
    times = [(row.at - rows[0].at).total_seconds() * scale for row in rows]
    prompts = [row.prompt_tokens for row in rows]
    outputs = [row.output_tokens for row in rows]
    return times, prompts, outputs, [row.user for row in rows]


def read_prompts(file: str, content: str, count: int | None) -> list[str]:
    """The first `count` texts of a file, one a line; blank lines do not count.

    If `count` is above their number, they repeat; None means each text once.

    Raises:
        ValueError: there are none.
    """
    texts = lines(content)
    if not texts:
        raise ValueError(f"{file} holds no prompts; write one a line")
    return [texts[i % len(texts)] for i in range(len(texts) if count is None else count)]


def random_prompt(load: Load, tokens: int, rng: np.random.Generator) -> tuple[int, ...] | str:
    """A random prompt: for completions `tokens` ids of [17, vocab), for chat as many common words.

    Most of the words are one token. Such prompts are valid to measure speed, which does not depend
    on the tokens; they are not for prefix caching or speculative decoding.
    """
    if load.endpoint == "completions":
        return tuple(rng.integers(FIRST_TOKEN, load.vocab, size=tokens).tolist())
    return " ".join(WORDS[i] for i in rng.integers(len(WORDS), size=tokens))

"""030: what a prefix cache of a hybrid model finds, by the states that it keeps; and what that does
to first tokens and to preempted requests.

The first part serves Mooncake's conversation trace (Qin et al., FAST 2025; FAST25-release/traces of
https://github.com/kvcache-ai/Mooncake, Apache-2.0) one request after the other, as study 026 does,
with the answers in the prompts of the next turns (`sessions: true`): the order of requests decides,
and not time. The second one has times (sessions.yaml, preemption.yaml), the third one real engines
(measured.py).

Memory is counted in tokens of keys and values. If a token has K bytes of these in the layers of
attention, and a checkpoint (the states of one block in all other layers) has B bytes, then

    rho = B / K             the tokens that could be cached in the place of a checkpoint
    1 + rho / L             the memory of a cached token, with a checkpoint every L tokens

So a cache of C tokens should find what a model with attention alone finds with
(C - reserve) / (1 + rho / L), less what lies behind the last checkpoint. `reserve` are the states
that a step writes while it computes a chunk: one for each block of the chunk. `predicted` says that,
and the tables have it beside the replay. For a hit rate that grows by `slope` with each logarithm of
the memory, `share` of requests that hit, and prompts of `mean` tokens, the best interval follows
(`best_interval`).
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.analysis import figures
from experiments.core.field_files import MOONCAKE, BlockIds
from experiments.core.workloads import Mooncake, WorkItem, build
from experiments.simulation.cache_plan import cache_plan
from experiments.simulation.checkpoint_replay import (
    CacheSizes,
    CheckpointCache,
    Content,
    Text,
    keys_of,
)
from experiments.simulation.cost import named_shape
from experiments.studies.findings import (
    Claim,
    Findings,
    Interval,
    interval,
    markdown,
    over,
    recorded_file,
    results_of,
    rounded,
    simulated,
    span,
)
from pagedjax.host.types import StepResult
from pagedjax.options.config import EngineConfig, PrefixCheckpoints

measured = importlib.import_module("experiments.studies.030_hybrid_prefixes.measured")

QUESTION = "Which states should the prefix cache of a hybrid model keep, and what does it find by its size?"
TRACES = "conversation"  # the word in the name of the file
FETCH = MOONCAKE
MODELS = ("lfm2-1.2b", "qwen3.5-0.8b", "qwen3-next-80b-a3b", "granite-4-h-small")
BLOCK_SIZE = 64
CHUNK = 2048  # tokens of a step
SIZES = (1_000_000, 3_000_000, 10_000_000)  # tokens of keys and values
# of models with attention alone, from which others are predicted
GRID = (
    150_000,
    250_000,
    500_000,
    1_000_000,
    2_000_000,
    3_000_000,
    5_000_000,
    7_000_000,
    10_000_000,
)
EVERY = "every block"
BEST = "texts, junctions"
INTERVALS = (256, 1024, 4096, 16384)
POLICIES: Mapping[str, PrefixCheckpoints | None] = {
    EVERY: None,
    **{f"every {tokens:,} tokens": PrefixCheckpoints(tokens) for tokens in INTERVALS},
    "prompts": PrefixCheckpoints(prompts=True),
    "texts": PrefixCheckpoints(texts=True),
    "last": PrefixCheckpoints(prompts=True, texts=True),
    BEST: PrefixCheckpoints(texts=True, junctions=True),
}
SYSTEM_PROMPT = 1024  # tokens; a longer prefix is one of a conversation
MARCONI = "Pan et al. 2024 (Marconi, arXiv 2411.19379), abstract: up to 34.4"


# --- models and texts -----------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What a hybrid keeps.

    token_bytes: keys and values of a token.
    layers, attention: all layers, and those with attention.
    states: pages of a checkpoint, each as large as the keys and values of a block.
    """

    token_bytes: float
    layers: int
    attention: int
    states: int

    @property
    def rho(self) -> int:
        """Tokens of keys and values that are as large as a checkpoint."""
        return self.states * BLOCK_SIZE

    @property
    def widening(self) -> float:
        """How many times the keys and values a model with attention alone has."""
        return self.layers / self.attention

    @property
    def reserve(self) -> int:
        """Tokens of keys and values that are as large as the states that a chunk writes."""
        return CHUNK // BLOCK_SIZE * self.rho


def sizes_of(name: str) -> Sizes:
    shape = named_shape(name)
    plan = cache_plan(EngineConfig(block_size=BLOCK_SIZE, max_model_len=8192), shape)
    states = sum([view.window is not None for view in plan.views])
    attention = sum([len(kind.layers) for kind in shape.kinds if kind.mixer is None])
    assert plan.groups == 1 + states, "one group has all attention"
    return Sizes(shape.token_bytes, shape.layers, attention, states)


def texts_of(items: Sequence[WorkItem]) -> list[Text]:
    """The conversations of a workload of Mooncake's with sessions."""
    key_by_block: dict[Hashable, int] = {}
    pieces_of: dict[str, list[tuple[Hashable, int, int]]] = {"": []}
    texts: list[Text] = []
    for item in items:
        assert isinstance(item.prompt_token_ids, BlockIds)
        prompt = [*pieces_of[item.follows], *item.prompt_token_ids.pieces]
        length = sum([end - start for _, start, end in prompt])
        pieces = [*prompt, (item.request_id, 0, item.longest_output)]
        pieces_of[item.request_id] = pieces
        computed = (length + item.longest_output - 1) // BLOCK_SIZE
        texts.append(
            Text(keys_of(pieces, BLOCK_SIZE, key_by_block)[:computed], length, item.longest_output)
        )
    return texts


def recorded(traces: Path, limit: int | None) -> tuple[WorkItem, ...]:
    """The requests of the conversation trace, as turns of sessions.

    Raises:
        NoTraces: it is not in the folder.
    """
    file = recorded_file(traces, f"*{TRACES}*.jsonl", FETCH)
    spec = Mooncake("mooncake", file.name, sessions=True, limit=limit)
    return build(spec, file.read_text(encoding="utf-8"), 0, 1000, lambda text: ()).items


# --- replays --------------------------------------------------------------------------------------


class Hits(NamedTuple):
    """A replay.

    hit_tokens: by text, the tokens of its prompt behind which it began.
    content: of the cache at the end.
    """

    hit_tokens: np.ndarray
    content: Content


def replay(texts: Sequence[Text], tokens: int, states: int, policy: Any) -> Hits | None:
    """All texts in a cache of so many tokens of keys and values; None: one of them does not fit."""
    cache = CheckpointCache(CacheSizes(BLOCK_SIZE, tokens // BLOCK_SIZE, states, CHUNK), policy)
    try:
        hit_tokens = np.array([cache.serve(text).hit_tokens for text in texts])
    except ValueError:
        return None
    return Hits(hit_tokens, cache.content)


class Curve:
    """What a model with attention alone finds, by the tokens that its cache holds."""

    def __init__(self, texts: Sequence[Text], sizes: Sequence[int]) -> None:
        hits = {size: replay(texts, size, 0, None) for size in sizes}
        self.hits = {
            size: of_size.hit_tokens for size, of_size in hits.items() if of_size is not None
        }
        self.prompts = np.array([text.prompt for text in texts])

    def rate(self, tokens: float, step: int = 1) -> float | None:
        """The share of prompt tokens that are found behind multiples of `step` tokens, interpolated
        in the logarithm of the size; None for a cache that is smaller than all that were tried.
        """
        sizes = list(self.hits)
        if not sizes or tokens < sizes[0]:
            return None
        rates = [float((self.hits[size] // step * step).sum()) for size in sizes]
        return float(np.interp(math.log(tokens), np.log(sizes), rates)) / float(self.prompts.sum())

    def slope(self, tokens: float) -> float:
        """By how much the rate grows when the size grows by the factor e, over half and twice it."""
        below = self.rate(max(tokens / 2, min(self.hits))) or 0.0
        above = self.rate(min(tokens * 2, max(self.hits))) or 0.0
        return (above - below) / math.log(4)

    def share(self, tokens: float) -> float:
        """The share of requests that find more than a system prompt."""
        size = min(self.hits, key=lambda tried: abs(math.log(tried / tokens)))
        return float((self.hits[size] > SYSTEM_PROMPT).mean())


def usable(sizes: Sizes, tokens: int, distance: float) -> float:
    """The tokens of a model with attention alone whose cache is as large as this one.

    Args:
        distance: tokens for each checkpoint.
    """
    return (tokens - sizes.reserve) / (1 + sizes.rho / distance)


def predicted(curve: Curve, sizes: Sizes, tokens: int, distance: int) -> float | None:
    """The hit rate with a checkpoint every `distance` tokens, from that of attention alone."""
    room = usable(sizes, tokens, distance)
    return curve.rate(room, distance) if room > 0 else None


def best_interval(rho: float, slope: float, share: float, mean: float) -> float:
    """The interval L at which the derivative of

        rate(room / (1 + rho / L)) - share * (L / 2) / mean

    is zero, if the rate grows by slope * d log(room): slope * rho / (L (L + rho)) = share / (2 mean).
    """
    product = 2 * slope * rho * mean / share
    return -rho / 2 + math.sqrt(rho * rho / 4 + product)


Replays = dict[tuple[str, int, str], Hits]  # model, tokens, policy


def replays_of(texts: Sequence[Text], sizes: Mapping[str, Sizes], quick: bool) -> Replays:
    """All models, sizes and policies, as far as the longest text fits."""
    replays: Replays = {}
    for name, of_model in sizes.items():
        for tokens in SIZES[:2] if quick else SIZES:
            for policy, checkpoints in POLICIES.items():
                hits = replay(texts, tokens, of_model.states, checkpoints)
                if hits is not None:
                    replays[name, tokens, policy] = hits
    return replays


# --- times and preemptions ------------------------------------------------------------------------


class Preempted(NamedTuple):
    """Of a run. recomputed_tokens: those that were computed again. seconds: until its end."""

    preemptions: int
    recomputed_tokens: int
    seconds: float


def preempted(results: Sequence[StepResult]) -> Preempted:
    seen_names: set[str] = set()
    preemptions = 0
    recomputed_tokens = 0
    for result in results:
        plan = result.plan
        preemptions += len(plan.preempted)
        for name, length, cached in zip(plan.admitted, plan.known, plan.cached, strict=True):
            if name in seen_names:
                recomputed_tokens += length - 1 - cached  # the last token was not computed before
            seen_names.add(name)
    return Preempted(preemptions, recomputed_tokens, results[-1].finished)


def label(engine: EngineConfig) -> str:
    """The states that an engine keeps, as in POLICIES."""
    if not engine.enable_prefix_caching:
        return "no prefix cache, swapped" if engine.preemption == "swap" else "no prefix cache"
    return next(name for name, policy in POLICIES.items() if policy == engine.prefix_checkpoints)


Times = dict[str, list[dict[str, Any]]]
Preemptions = dict[str, list[Preempted]]


def times_of(folder: Path, quick: bool) -> Times:
    options = ("workload.count=4",) if quick else ()
    points = simulated(folder / "sessions.yaml", *options, repeats=2 if quick else None)
    return {label(point.experiment.engine): summaries for point, summaries in points}


def preemptions_of(folder: Path, quick: bool) -> Preemptions:
    options = ("workload.count=20",) if quick else ()
    points = results_of(folder / "preemption.yaml", *options, repeats=2 if quick else None)
    return {
        label(point.experiment.engine): [preempted(results) for _, results in runs]
        for point, runs in points
    }


MEASURED: Mapping[str, dict[str, Any]] = {
    EVERY: {},
    "no prefix cache": {"enable_prefix_caching": False},
    "last": {"prefix_checkpoints": "last"},
    BEST: {"prefix_checkpoints": {"texts": True, "junctions": True}},
}


def measurements_of(items: Sequence[WorkItem], quick: bool) -> dict[str, Any]:
    """By hybrid and policy."""
    requests = measured.small_requests(items, 3 if quick else 12)
    hybrids = list(measured.HYBRIDS.items())
    return {
        name: measured.measure(mixer, requests, MEASURED, 1 if quick else 4)
        for name, mixer in (hybrids[:1] if quick else hybrids)
    }


# --- findings -------------------------------------------------------------------------------------


class Results(NamedTuple):
    sizes: Mapping[str, Sizes]
    curve: Curve
    replays: Replays
    times: Times
    preemptions: Preemptions
    measurements: Mapping[str, Any]

    def rate(self, name: str, tokens: int, policy: str) -> float | None:
        hits = self.replays.get((name, tokens, policy))
        return None if hits is None else float(hits.hit_tokens.sum() / self.curve.prompts.sum())

    @property
    def places(self) -> list[tuple[str, int]]:
        """Models and sizes in which all policies ran."""
        pairs = dict.fromkeys([(name, tokens) for name, tokens, _ in self.replays])
        return [
            (name, tokens)
            for name, tokens in pairs
            if all([(name, tokens, policy) in self.replays for policy in POLICIES])
        ]


def run(folder: Path, quick: bool, traces: Path) -> Findings:
    items = recorded(traces, 300 if quick else None)
    texts = texts_of(items)
    sizes = {name: sizes_of(name) for name in MODELS}
    results = Results(
        sizes,
        Curve(texts, GRID[3:6] if quick else GRID),
        replays_of(texts, sizes, quick),
        times_of(folder, quick),
        preemptions_of(folder, quick),
        measurements_of(items, quick),
    )
    tables = [
        model_table(results),
        rate_table(results),
        memory_table(results),
        prediction_table(results),
        time_table(results),
        preemption_table(results),
        measured_table(results),
    ]
    return Findings(claims(results), answer(results), {"rates.svg": figure(results)}, tables)


def claims(results: Results) -> list[Claim]:
    gains: list[float] = []
    for name, tokens in results.places:
        best = results.rate(name, tokens, BEST)
        every = results.rate(name, tokens, EVERY)
        if best and every:
            gains.append(best / every)
    return [
        Claim(
            MARCONI,
            "tokens found with states where texts end and junctions are, over those with a state of "
            "every block",
            (1.0, 34.4),
            span(gains),
            1.0,
            "x",
            "another trace, and eviction by time alone",
        )
    ]


def percent(rate: float | None, missing: str = "does not fit") -> str:
    return missing if rate is None else f"{100 * rate:.1f} %"


def millions(tokens: int) -> str:
    return f"{tokens / 1e6:g}M"


def attention_alone(results: Results, name: str, tokens: int) -> float | None:
    """The rate of a model of as many layers that all have attention, in a cache of equal bytes."""
    return results.curve.rate(tokens / results.sizes[name].widening)


def errors(results: Results, policies: Mapping[str, float]) -> list[float]:
    """Predicted rates less those of the replay.

    Args:
        policies: tokens for each checkpoint.
    """
    differences: list[float] = []
    for name, tokens in results.places:
        for policy, distance in policies.items():
            rate = results.rate(name, tokens, policy)
            guess = prediction(results, name, tokens, policy, distance)
            if rate is not None and guess is not None:
                differences.append(guess - rate)
    return differences


def distances(results: Results) -> dict[str, float]:
    """Tokens for each checkpoint, by policy: a text has one where it ends."""
    mean = float(results.curve.prompts.mean())
    return {f"every {tokens:,} tokens": tokens for tokens in INTERVALS} | {BEST: mean}


def prediction(
    results: Results, name: str, tokens: int, policy: str, distance: float
) -> float | None:
    """The rate of a policy by the rule of thumb."""
    sizes = results.sizes[name]
    if policy == BEST:  # nothing lies behind a checkpoint
        room = usable(sizes, tokens, distance)
        return results.curve.rate(room) if room > 0 else None
    return predicted(results.curve, sizes, tokens, int(distance))


def answer(results: Results) -> list[str]:
    best = [
        max(POLICIES, key=lambda policy: results.rate(name, tokens, policy) or 0.0)
        for name, tokens in results.places
    ]
    won = sum([policy == BEST for policy in best])
    compared_places = [
        place for place in results.places if attention_alone(results, *place) is not None
    ]
    num_ahead = {
        policy: sum(
            [
                (results.rate(*place, policy) or 0.0) > (attention_alone(results, *place) or 0.0)
                for place in compared_places
            ]
        )
        for policy in (BEST, EVERY)
    }
    by_distance = distances(results)
    of_best = by_distance.pop(BEST)
    interval_errors = errors(results, by_distance)
    text_errors = errors(results, {BEST: of_best})
    rhos = ", ".join([f"{sizes.rho:,} of {name}" for name, sizes in results.sizes.items()])
    reserves = [sizes.reserve for sizes in results.sizes.values()]
    sentences = [
        "**Keep the state where a text ends, and where a beginning ends that two requests share** "
        '(`prefix_checkpoints={"texts": True, "junctions": True}`). Of the policies tried it finds '
        f"the most in {won} of {len(best)} caches; {others(best)}. It finds "
        f"{claims(results)[0].ours.low:.1f} to {claims(results)[0].ours.high:.1f} times what the "
        "state of every block finds.",
        "The number that decides is rho, the tokens whose keys and values are as large as one "
        f"checkpoint: {rhos}. A cached token costs 1 + rho / L of its keys and values with a "
        "checkpoint every L tokens, so a state of every block fills the cache with states: see the "
        "table of memory.",
        "A model of as many layers that all have attention needs layers / (layers of attention) "
        "times the bytes a token. So a hybrid caches more than it in equal memory if its "
        "checkpoints are further apart than rho / (layers / attention - 1). With "
        f"{BEST} it finds more than such a model in {num_ahead[BEST]} of {len(compared_places)} "
        f"caches, and with a state of every block in {num_ahead[EVERY]}.",
        "**Rule of thumb.** The rate is that of attention alone with (C - reserve) / (1 + rho / L) "
        "tokens, counted in whole intervals. For intervals it is "
        f"{spread(interval_errors)} of prompt tokens away from the replay; for {BEST}, with the "
        f"mean prompt of {of_best:,.0f} tokens as L, {spread(text_errors)}: an upper bound, because "
        "a prefix that ends inside an earlier text is found the second time at best.",
        *interval_sentences(results),
        "Where the rule fails: a beginning that all requests share and that is shorter than L is "
        "never found by an interval, and always by `junctions` (here a system prompt of 512 tokens, "
        "4 % of all prompt tokens). Prompts and texts of very different lengths have no one L. And "
        "keys and values whose states are gone stay in the cache: they are found by no request, "
        "are computed again, and are evicted by time alone.",
        "**The budget of a step is a part of the cache.** A chunk writes a state for each of its "
        f"blocks before it gives them back: with {CHUNK:,} tokens a step and blocks of "
        f"{BLOCK_SIZE} these are as large as {min(reserves):,} to {max(reserves):,} tokens of keys "
        "and values. A prompt of a chunk or more enters only where they are free, so smaller chunks let more "
        "requests run in a small pool.",
        growth_sentence(results),
        *time_sentences(results),
        *preemption_sentences(results),
        measured_sentence(results),
        "What this does not know: requests come one after the other in the first part, so rows that "
        "run take nothing of the cache; times are those of a roofline; one trace of an hour.",
    ]
    return sentences


def others(best: Sequence[str]) -> str:
    counts = {policy: best.count(policy) for policy in dict.fromkeys(best) if policy != BEST}
    if not counts:
        return "no other one is ahead anywhere"
    words = [f"{policy} in {count}" for policy, count in counts.items()]
    return f"in others {', '.join(words)}"


def spread(differences: Sequence[float]) -> str:
    """Differences of rates in words."""
    if not differences:
        return "not known"
    middle = statistics.fmean([abs(difference) for difference in differences])
    worst = max(differences, key=abs)
    return f"{100 * middle:.1f} points on average ({100 * worst:+.1f} at most)"


def interval_sentences(results: Results) -> list[str]:
    """Which interval is the best one, and what the formula says."""
    words: list[str] = []
    mean = float(results.curve.prompts.mean())
    for name, tokens in results.places:
        if tokens != SIZES[2]:
            continue
        sizes = results.sizes[name]
        rates = {
            length: results.rate(name, tokens, f"every {length:,} tokens") for length in INTERVALS
        }
        best = max(rates, key=lambda length: rates[length] or 0.0)
        room = max(usable(sizes, tokens, best), min(results.curve.hits))
        formula = best_interval(
            sizes.rho, results.curve.slope(room), results.curve.share(room), mean
        )
        words.append(f"{name} {best:,} ({formula:,.0f})")
    if not words:
        return []
    return [
        "If states are kept by an interval alone, the best one solves L (L + rho) = 2 slope rho P / "
        "f, where slope is the growth of the hit rate with the logarithm of the memory, P the mean "
        "prompt, and f the share of requests that find more than the system prompt. For a large rho "
        "it is 2 slope P / f, whatever rho is; for a small one sqrt(2 slope rho P / f), as with "
        f"checkpoints against failures (Young 1974). With {millions(SIZES[2])} tokens the best of "
        f"those tried, and in brackets the formula's: {'; '.join(words)}."
    ]


def time_sentences(results: Results) -> list[str]:
    if BEST not in results.times:
        return []
    ratio = ratio_of(results.times, "ttft_s.mean", BEST, EVERY)
    ratio_off = ratio_of(results.times, "ttft_s.mean", BEST, "no prefix cache")
    return [
        f"First tokens of conversations (sessions.yaml) take {ratio.middle:.2f} "
        f"({ratio.low:.2f} to {ratio.high:.2f}) times as long with {BEST} as with a state of every "
        f"block, and {ratio_off.middle:.2f} ({ratio_off.low:.2f} to {ratio_off.high:.2f}) times as "
        "long as without a prefix cache."
    ]


def ratio_of(times: Times, path: str, above: str, below: str) -> Interval:
    """The ratio of a number of two policies, seed by seed."""
    pairs = zip(times[above], times[below], strict=True)
    return interval([over([a], path).middle / over([b], path).middle for a, b in pairs])


def growth_sentence(results: Results) -> str:
    """How a sequence grows: it has the states of two blocks, and more and more keys and values."""
    words: list[str] = []
    for name, sizes in results.sizes.items():
        before, after = [2 * sizes.states + tokens // BLOCK_SIZE for tokens in (1024, 2048)]
        words.append(f"{100 * (after / before - 1):.0f} % in {name}")
    return (
        "Hybrids are preempted less: from 1,024 to 2,048 tokens a sequence grows by "
        f"{', '.join(words)}, and by 100 % with attention alone."
    )


def preemption_sentences(results: Results) -> list[str]:
    recomputed = {
        name: statistics.fmean([run.recomputed_tokens / max(run.preemptions, 1) for run in runs])
        for name, runs in results.preemptions.items()
    }
    if not {"texts", "no prefix cache"} <= recomputed.keys():
        return []
    return [
        f"A preempted request computes {recomputed['no prefix cache']:,.0f} tokens again without a "
        f"prefix cache, {recomputed[EVERY]:,.0f} with a state of every block, and "
        f"{recomputed['texts']:,.0f} with `texts`, which keeps the state at which "
        "it stopped; swapping computes none again."
    ]


def measured_sentence(results: Results) -> str:
    pairs = [
        (name, policy, measurement)
        for name, of_policies in results.measurements.items()
        for policy, measurement in of_policies.items()
    ]
    equal = sum([measurement.equal for _, _, measurement in pairs])
    return (
        f"Measured: tiny hybrids ({', '.join(results.measurements)}) with random weights in a real "
        f"engine, with the trace at a sixty-fourth of its lengths: hits, chunks and the ids of all "
        f"blocks of all steps are those of the simulation in {equal} of {len(pairs)} runs."
    )


def figure(results: Results) -> str:
    shown_policies = (EVERY, f"every {INTERVALS[2]:,} tokens", "last", BEST)
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in dict.fromkeys([name for name, _ in results.places]):
        sizes = [tokens for place, tokens in results.places if place == name]
        lines: dict[str, list[tuple[float, float]]] = {}
        for policy in shown_policies:
            rates = [(tokens, results.rate(name, tokens, policy)) for tokens in sizes]
            lines[policy] = [(tokens, 100 * rate) for tokens, rate in rates if rate is not None]
        alone = [(tokens, attention_alone(results, name, tokens)) for tokens in sizes]
        lines["attention in all layers"] = [
            (tokens, 100 * rate) for tokens, rate in alone if rate is not None
        ]
        panels[name] = {line: points for line, points in lines.items() if points}
    return figures.curves(
        panels,
        "memory, in tokens of keys and values",
        "prompt tokens found, %",
        log_x=10,
        lowest=0,
        dashed=("attention in all layers",),
    )


# --- tables ---------------------------------------------------------------------------------------


def model_table(results: Results) -> str:
    rows = [
        (
            name,
            f"{sizes.token_bytes / 1024:g}",
            f"{sizes.attention} of {sizes.layers}",
            f"{sizes.rho * sizes.token_bytes / 2**20:.0f}",
            f"{sizes.rho:,}",
            f"{sizes.rho / (sizes.widening - 1):,.0f}",
            f"{sizes.reserve:,}",
        )
        for name, sizes in results.sizes.items()
    ]
    head = (
        f"blocks of {BLOCK_SIZE}",
        "keys and values of a token, KiB",
        "layers with attention",
        "a checkpoint, MiB",
        "rho, tokens",
        "rho / (layers / attention - 1)",
        f"reserve of a chunk of {CHUNK:,}, tokens",
    )
    return markdown(head, rows)


def rate_table(results: Results) -> str:
    rows = [
        (
            name,
            millions(tokens),
            *[percent(results.rate(name, tokens, policy)) for policy in POLICIES],
            percent(attention_alone(results, name, tokens)),
        )
        for name, tokens in dict.fromkeys([key[:2] for key in results.replays])
    ]
    head = ("prompt tokens found", "tokens", *POLICIES, "attention in all layers, equal bytes")
    return markdown(head, rows)


def memory_table(results: Results) -> str:
    """The share of the cache that states have, at the end."""
    rows: list[Sequence[str]] = []
    for name, tokens in dict.fromkeys([key[:2] for key in results.replays]):
        shares: list[str] = []
        for policy in POLICIES:
            hits = results.replays.get((name, tokens, policy))
            if hits is None:
                shares.append("does not fit")
            else:
                content = hits.content
                shares.append(percent(content.states / max(1, content.states + content.attention)))
        rows.append((name, millions(tokens), *shares))
    return markdown(("share of states in the cache", "tokens", *POLICIES), rows)


def prediction_table(results: Results) -> str:
    by_distance = distances(results)
    rows = [
        (
            name,
            millions(tokens),
            *[
                f"{percent(prediction(results, name, tokens, policy, distance), 'not known')} "
                f"({percent(results.rate(name, tokens, policy))})"
                for policy, distance in by_distance.items()
            ],
        )
        for name, tokens in results.places
    ]
    return markdown(("predicted (replay)", "tokens", *by_distance), rows)


def time_table(results: Results) -> str:
    rows = [
        (
            name,
            percent(over(summaries, "prefix_hit_share").middle),
            over(summaries, "ttft_s.mean").middle,
            over(summaries, "ttft_s.p90").middle,
            over(summaries, "output_tokens_per_s").middle,
        )
        for name, summaries in results.times.items()
    ]
    head = (
        "conversations, simulated",
        "prompt tokens found",
        "first token, mean s",
        "p90",
        "output tokens/s",
    )
    return markdown(head, rows)


def preemption_table(results: Results) -> str:
    rows = [
        (
            name,
            statistics.fmean([run.preemptions for run in runs]),
            statistics.fmean([run.recomputed_tokens for run in runs]),
            statistics.fmean([run.recomputed_tokens / max(run.preemptions, 1) for run in runs]),
            statistics.fmean([run.seconds for run in runs]),
        )
        for name, runs in results.preemptions.items()
    ]
    head = (
        "long answers in a small pool, simulated",
        "preemptions",
        "tokens computed again",
        "of each",
        "seconds",
    )
    return markdown(head, rows)


def measured_table(results: Results) -> str:
    rows = [
        (
            name,
            policy,
            percent(measurement.hit_share),
            "yes" if measurement.equal else "no",
            f"{rounded(measurement.time.middle, 2)} ({rounded(measurement.time.low, 2)} to "
            f"{rounded(measurement.time.high, 2)})",
        )
        for name, of_policies in results.measurements.items()
        for policy, measurement in of_policies.items()
    ]
    head = (
        "tiny hybrid, measured",
        "states",
        "prompt tokens found",
        "as simulated",
        f"processor time over {EVERY}, median (all)",
    )
    return markdown(head, rows)

"""029: an order of the queue that was learnt in many worlds at once, against orders by hand and an
oracle: on arrays, in the simulator, in an engine, on other loads and on recorded requests.

There is no published number. The runs of training are in runs/029_learnt_order, and go on where they
were stopped. The engine has a random Llama, because an order knows no token; its seconds are those
of this machine. Its requests arrive at the multiple of its capacity that the worlds have
(twin/measured.py). How many episodes it plays, and how long at most, is fixed here: more than twice
as many as the worlds need, because the time of a machine scatters, too. The answer says how many
worlds with the engine's own step times need.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.analysis import figures
from experiments.bench.random_llama import SHAPES, random_model
from experiments.core.workloads import AZURE
from experiments.simulation.cost import CHIPS, Roofline
from experiments.simulation.cost import SHAPES as SIMULATED
from experiments.studies.findings import Findings, markdown, recorded_file
from experiments.training import train_policy
from experiments.training.policy_methods import METHODS
from experiments.training.train_policy import Setup, world_of
from experiments.twin import learned, measured, network, policies, simulated, workloads
from experiments.twin.cost import MICROSECONDS, Cost
from experiments.twin.environment import Environment, Params
from experiments.twin.measured import Speed
from experiments.twin.network import Integers
from experiments.twin.policies import Decide, all_offered
from experiments.twin.rollout import Difference, cached, difference, returns, shortest_left
from experiments.twin.scheduler import Order, Requests, Sizes
from experiments.twin.scheduler import State as Scheduled
from experiments.twin.workloads import LATEST, Lengths, Poisson, of_arrays
from pagedjax.engine.engine import Engine
from pagedjax.host import replay
from pagedjax.options.config import EngineConfig
from pagedjax.options.own_values import own_value
from pagedjax.server.load_client.text_files import trace_rows

QUESTION = (
    "What does an order of the queue gain that was learnt in many worlds at once, and where does it "
    "fail?"
)
FETCH = AZURE  # which files, and where they are
TRACES = {"chat": "conv", "code": "code"}
RUNS = Path(__file__).parents[3] / "runs" / "029_learnt_order"
SETUP = Setup(steps=24, pairs=8, worlds=16, held_out=128, simulated=0)
SEEDS = (0, 1)
EVERY = 4
LEARNED = "learned"
ORACLE = "oracle"
PREDICTED = "fewest predicted tokens left"
SPREAD = SETUP.spread  # of predictions
RATES = (12.0, 18.0, 24.0, 30.0, 48.0)  # requests a second
SCALES = (1.0, 0.75, 0.5)  # of the times of the recorded requests
LONGEST_PROMPT = 7000
LONGEST_OUTPUT = 1000
EPISODES_KEY = 29_000_000
CAPACITY_EPISODES = 6  # by which the capacity of the engine is measured
IN_ENGINE = "in the engine"
EXPECTED = "in worlds with the engine's step times"
# the engine: a step of this model takes milliseconds on a CPU, most of them on the host
MODEL = SHAPES["small"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}
PROMPTS = (20, 60, 200, 600)
PREDICTIONS = (10, 30, 100, 300)


class Size(NamedTuple):
    """How much the study runs.

    setup: of the training. seeds: of the training.
    episodes: on arrays. simulated: in the simulator. measured: in the engine, at most.
    measured_s: seconds after which no episode begins in the engine.
    windows: of a trace.
    """

    setup: Setup
    seeds: Sequence[int]
    episodes: int
    simulated: int
    measured: int
    measured_s: float
    windows: int


FULL = Size(SETUP, SEEDS, episodes=256, simulated=24, measured=48, measured_s=240.0, windows=16)
QUICK = Size(
    dataclasses.replace(SETUP, steps=2, pairs=2, worlds=2, held_out=8, requests=12, units=3),
    seeds=(0,),
    episodes=8,
    simulated=2,
    measured=2,
    measured_s=60.0,
    windows=2,
)


def run(folder: Path, quick: bool, traces: Path) -> Findings:
    size = QUICK if quick else FULL
    files = {name: recorded_file(traces, f"*{TRACES[name]}*.csv", FETCH) for name in TRACES}
    if quick:
        with TemporaryDirectory() as runs:
            return findings_of(size, Path(runs), files)
    return findings_of(size, RUNS, files)


def findings_of(size: Size, runs: Path, files: Mapping[str, Path]) -> Findings:
    curves = {
        method: [learn(size, runs, method, seed) for seed in size.seeds] for method in METHODS
    }
    method, seed = best(curves, size.seeds)
    file = runs / f"{method}-{seed}" / "learned.py"
    policy = f"{file}:POLICY"
    net = own_value("policy", f"{file}:NETWORK", learned.Network, {})
    twin = Twin(size.setup, network.weights_of(net))
    in_engine = compare_in_engine(twin, policy, size)
    places = {
        "on arrays": twin.latencies(twin.params, size.episodes),
        "in the simulator": simulated_latencies(twin, policy, size.simulated),
        IN_ENGINE: in_engine.latencies,
        EXPECTED: {name: in_engine.expected[name] for name in in_engine.latencies},
    }
    loads = {
        name: twin.latencies(twin.params._replace(workload=workload), size.episodes)
        for name, workload in scenarios(size.setup).items()
    }
    recorded_loads = recorded_latencies(twin, size, files)
    answer = [
        learning_sentence(curves),
        chosen_sentence(method, seed, places["on arrays"]),
        *[place_sentence(place, values) for place, values in places.items()],
        load_sentence(in_engine, size),
        decisions_sentence(in_engine.equal_steps),
        weights_sentence(net),
        failure_sentence(loads, recorded_loads),
    ]
    return Findings(
        [],
        answer,
        {"learning.svg": learning_figure(curves)},
        [
            places_table(places),
            curves_table(curves, size.seeds),
            scores_table(net),
            loads_table(loads, recorded_loads),
        ],
    )


# --- learning -------------------------------------------------------------------------------------

Curve = list[tuple[int, float]]  # (step, share of the oracle's gain) on held-out episodes


def learn(size: Size, runs: Path, method: str, seed: int) -> Curve:
    """Train, or go on with a run of this study."""
    setup = dataclasses.replace(size.setup, method=method, seed=seed)
    losses = train_policy.train(
        runs / f"{method}-{seed}", setup, min(EVERY, setup.steps), say=lambda line: None
    )
    return [(loss["step"], loss["gap"]) for loss in losses]


def best(curves: Mapping[str, Sequence[Curve]], seeds: Sequence[int]) -> tuple[str, int]:
    """The method and the seed whose last policy is the best one on the held-out episodes of its
    training. The study compares it on others.
    """
    lasts = {
        (method, seed): runs[i][-1][1]
        for method, runs in curves.items()
        for i, seed in enumerate(seeds)
    }
    return max(lasts, key=lambda key: lasts[key])


def learning_figure(curves: Mapping[str, Sequence[Curve]]) -> str:
    means = {method: mean_curve(runs) for method, runs in curves.items()}
    return figures.curves(
        {"held-out episodes": means},
        "step of training",
        "share of the oracle's gain over first come",
    )


def mean_curve(runs: Sequence[Curve]) -> Curve:
    """The mean of several runs by step."""
    return [
        (points[0][0], statistics.fmean([gap for _, gap in points]))
        for points in zip(*runs, strict=True)
    ]


# --- on arrays ------------------------------------------------------------------------------------

Latencies = dict[str, np.ndarray]  # mean seconds from arrival to end, of each episode, by policy


def predicted_left(policy: None, state: Scheduled, requests: Requests) -> Order:
    """The fewest predicted tokens left first, without a limit of age and without preemption."""
    output = state.length - requests.prompt_len
    return all_offered(requests.predicted - output)


class Twin:
    """The worlds of a setup, and the policies that play in them."""

    def __init__(self, setup: Setup, weights: Integers) -> None:
        self.setup = setup
        self.weights = weights
        self.world, self.params = world_of(setup)
        self.decides: dict[str, tuple[Decide, Any]] = {
            LEARNED: (network.order, weights),
            **{
                name: (policies.without_parameters(policies.POLICIES[name]), None)
                for name in ("fcfs", "shortest", "fair")
            },
            PREDICTED: (predicted_left, None),
            ORACLE: (shortest_left, None),
        }

    @cache  # noqa: B019 - a few programs, as long as the study runs
    def _program(self, world: Environment, name: str) -> Callable[[Params, jax.Array], jax.Array]:
        decide, policy = self.decides[name]
        return jax.jit(
            lambda params, keys: returns(world, decide, policy, params, keys, together=cached())
        )

    def latencies(self, params: Params, episodes: int) -> Latencies:
        """Of drawn episodes, the same for all policies; none of them was played in training."""
        keys = jax.random.split(jax.random.key(EPISODES_KEY), episodes)
        return {
            name: -np.asarray(self._program(self.world, name)(params, keys))
            for name in self.decides
        }

    def of_windows(self, windows: Sequence[Params]) -> Latencies:
        """Of recorded requests: an episode for each window."""
        world = self.world._replace(own_draw=workloads.given)
        keys = jax.random.split(jax.random.key(0), 1)
        return {
            name: -np.concatenate(
                [np.asarray(self._program(world, name)(params, keys)) for params in windows]
            )
            for name in self.decides
        }

    def drawn(self, episodes: int) -> list[Requests]:
        """The first episodes of `latencies`, as numpy arrays."""
        keys = jax.random.split(jax.random.key(EPISODES_KEY), episodes)
        draw = jax.jit(self.world.draw)
        return [jax.device_get(draw(key, self.params.workload)) for key in keys]


def scenarios(setup: Setup) -> dict[str, Poisson]:
    """Workloads that differ from that of the training in one thing."""
    trained = workloads.mixed(setup.rate, setup.spread)

    def longer(lengths: Lengths, factor: float) -> Lengths:
        return lengths._replace(median=factor * lengths.median)

    def shares(*kinds: float) -> Poisson:
        return trained._replace(kinds=np.asarray(kinds, np.float32))

    by_rate = {
        f"{rate:g} requests/s": trained._replace(rate=rate) for rate in RATES if rate != setup.rate
    }
    return {
        "as trained": trained,
        **by_rate,
        "chats alone": shares(1.0, 0.0, 0.0),
        "summaries alone": shares(0.0, 1.0, 0.0),
        "essays alone, 12 requests/s": shares(0.0, 0.0, 1.0)._replace(rate=12.0),
        "answers of half the length, 40 requests/s": trained._replace(
            rate=40.0, output=longer(trained.output, 0.5)
        ),
        "answers of twice the length, 14 requests/s": trained._replace(
            rate=14.0, output=longer(trained.output, 2.0)
        ),
        "exact predictions": trained._replace(spread=0.0),
        "predictions wrong by twice as much": trained._replace(spread=2 * setup.spread),
        "predictions wrong by four times as much": trained._replace(spread=4 * setup.spread),
    }


def recorded_latencies(
    twin: Twin, size: Size, files: Mapping[str, Path]
) -> dict[tuple[str, float], Latencies]:
    """Of recorded requests, by the name of the trace and the scale of its times."""
    return {
        (name, scale): twin.of_windows(windows_of(path, size, scale))
        for name, path in files.items()
        for scale in SCALES
    }


def windows_of(file: Path, size: Size, scale: float) -> list[Params]:
    """Windows of a recorded day, evenly spaced, with as many requests as an episode has. The times
    of each are multiplied by `scale`; predictions are wrong as in the training.
    """
    rows = [
        row
        for row in trace_rows(file.name, file.read_text(encoding="utf-8"), 0, None, FETCH)
        if 1 <= row.prompt_tokens <= LONGEST_PROMPT and 1 <= row.output_tokens <= LONGEST_OUTPUT
    ]
    count = size.setup.requests
    starts = np.linspace(0, len(rows) - count, size.windows).astype(int)
    _, params = world_of(size.setup)
    need = -(-(LONGEST_PROMPT + LONGEST_OUTPUT) // size.setup.block_size)
    sizes = params.sizes._replace(num_blocks=2 * need)
    rng = np.random.default_rng(0)
    windows = []
    for start in starts:
        part = rows[start : start + count]
        seconds = [scale * (row.at - part[0].at).total_seconds() for row in part]
        output = np.asarray([row.output_tokens for row in part])
        wrong = np.exp(SPREAD * rng.normal(size=count))
        requests = of_arrays(
            np.minimum(seconds, LATEST / MICROSECONDS),
            [row.prompt_tokens for row in part],
            output,
            LONGEST_OUTPUT,
            sizes=Sizes(*sizes),
            predicted=np.clip(np.round(output * wrong), 1, LONGEST_OUTPUT).astype(int),
        )
        windows.append(params._replace(sizes=sizes, workload=requests))
    return windows


# --- in the simulator and in an engine ------------------------------------------------------------


def simulated_latencies(twin: Twin, policy: str, episodes: int) -> Latencies:
    """Of the first episodes of `Twin.latencies`, with the scheduler itself."""
    roofline = Roofline(SIMULATED[twin.setup.model], CHIPS[twin.setup.chip])
    drawn = twin.drawn(episodes)
    names = {LEARNED: policy, "fcfs": "fcfs", "shortest": "shortest", "fair": "fair"}
    names |= {"srtf": "srtf"}
    return {
        name: np.asarray(
            [
                simulated.mean_latency(
                    simulated.run(requests, simulated.engine_config(twin.setup, value), roofline),
                    requests,
                )
                for requests in drawn
            ]
        )
        for name, value in names.items()
    }


class InEngine(NamedTuple):
    """What was measured of an engine.

    load: requests a second over the capacity.
    expected: what the worlds with the engine's step times say.
    equal_steps: of each run, see `measured.equal_steps`.
    """

    speed: Speed
    load: float
    latencies: Latencies
    expected: Latencies
    equal_steps: list[int]


def compare_in_engine(twin: Twin, policy: str, size: Size) -> InEngine:
    """Measure the learnt order and two by hand in an engine."""
    names = {LEARNED: policy, "fcfs": "fcfs", "shortest": "shortest"}
    engines = engines_of(twin.setup, names)
    drawn = twin.drawn(size.measured)
    roofline = Roofline(SIMULATED[twin.setup.model], CHIPS[twin.setup.chip])
    config = simulated.engine_config(twin.setup, "fcfs")
    speed = measured.speed_of(engines["fcfs"], config, roofline, drawn[:CAPACITY_EPISODES])
    for name in engines:
        measured.run(engines[name], drawn[0])  # warms up
    episodes = [measured.stretched(requests, speed.stretch) for requests in drawn]
    expected = twin.latencies(params_of_engine(twin, speed), size.episodes)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        latencies = measured.mean_latencies(engines, episodes, folder, size.measured_s)
        runs = [
            (name, number) for name, values in latencies.items() for number in range(len(values))
        ]
        equal_steps = equal_steps_of(twin, policy, folder, runs, episodes)
    load = measured.load(episodes, speed.capacity)
    return InEngine(speed, load, latencies, expected, equal_steps)


def equal_steps_of(
    twin: Twin,
    policy: str,
    folder: Path,
    runs: Sequence[tuple[str, int]],
    episodes: Sequence[Any],
) -> list[int]:
    """What `measured.equal_steps` says of recorded runs: the name of a policy, and the number of an
    episode.
    """
    by_name = replay.with_own([policy])
    sizes = twin.params.sizes
    return [
        measured.equal_steps(
            measured.recording(folder, name, number),
            by_name,
            episodes[number],
            sizes,
            *twin.decides[name],
        )
        for name, number in runs
    ]


def engines_of(setup: Setup, policies_by_name: Mapping[str, str]) -> dict[str, Engine]:
    """Engines of one model that differ in their policies."""
    model = random_model(MODEL, "float32")
    configs = {name: engine_config(setup, policy) for name, policy in policies_by_name.items()}
    return {name: Engine(model, config) for name, config in configs.items()}


def engine_config(setup: Setup, policy: str) -> EngineConfig:
    """Of an engine with the sizes of a setup, and a program of few rows for decodes."""
    budget = setup.max_num_batched_tokens
    config = simulated.engine_config(setup, policy)
    return dataclasses.replace(
        config,
        max_model_len=MODEL["max_position_embeddings"],
        token_buckets=(min(setup.max_num_seqs, budget), budget),
    )


def params_of_engine(twin: Twin, speed: Speed) -> Params:
    """The worlds with the step times of an engine, and requests at its rate."""
    workload = twin.params.workload
    return twin.params._replace(
        cost=Cost.of(speed.step_time, twin.params.sizes),
        workload=workload._replace(rate=workload.rate / speed.stretch),
    )


# --- findings -------------------------------------------------------------------------------------


def gain(latencies: Latencies, base: str) -> Difference:
    """By how many seconds the learnt order is faster than the order `base`, paired by episode."""
    return difference(latencies[base], latencies[LEARNED])


def gap(latencies: Latencies) -> float:
    """The share of the oracle's gain over first come that the learnt order has."""
    means = {name: float(np.mean(values)) for name, values in latencies.items()}
    gain_of_oracle = means["fcfs"] - means[ORACLE]
    gain_of_learnt = means["fcfs"] - means[LEARNED]
    return gain_of_learnt / gain_of_oracle if gain_of_oracle else float("nan")


def interval_text(result: Difference, digits: int = 3) -> str:
    return f"{result.mean:.{digits}f} [{result.low:.{digits}f}, {result.high:.{digits}f}]"


def learning_sentence(curves: Mapping[str, Sequence[Curve]]) -> str:
    lasts = {name: statistics.fmean([run[-1][1] for run in runs]) for name, runs in curves.items()}
    middles = {name: mean_curve(runs)[(len(runs[0]) - 1) // 2] for name, runs in curves.items()}
    better = max(lasts, key=lambda name: lasts[name])
    parts = [
        f"{name} has {middles[name][1]:.2f} of the oracle's gain over first come after "
        f"{middles[name][0]} steps and {lasts[name]:.2f} after {runs[0][-1][0]}"
        for name, runs in curves.items()
    ]
    return (
        f"Under equal steps, {' and '.join(parts)} (means of {len(curves[better])} runs on held-out "
        f"episodes): {better} is better."
    )


def chosen_sentence(method: str, seed: int, latencies: Latencies) -> str:
    return (
        f"The policy of the rest is that of {method}, seed {seed}, the best one on the held-out "
        f"episodes of its training; on {len(latencies[LEARNED])} others it has {gap(latencies):.2f} "
        "of the gain of an oracle that knows all lengths."
    )


def place_sentence(place: str, latencies: Latencies) -> str:
    parts = [
        f"{interval_text(gain(latencies, name))} s a request less than {name}"
        for name in ("fcfs", "shortest")
    ]
    return (
        f"{place[0].upper()}{place[1:]} it takes {np.mean(latencies[LEARNED]):.3f} s: "
        f"{' and '.join(parts)} (95 %, {len(latencies[LEARNED])} paired episodes)."
    )


def load_sentence(in_engine: InEngine, size: Size) -> str:
    """How the rate and the number of episodes were chosen."""
    speed = in_engine.speed
    needed = {
        name: measured.episodes_needed(in_engine.expected[name] - in_engine.expected[LEARNED])
        for name in in_engine.latencies
        if name != LEARNED
    }
    counts = [
        f"{count or f'more than {measured.MOST_EPISODES}'} episodes against {name}"
        for name, count in needed.items()
    ]
    return (
        f"In the engine, the requests of an episode arrive at {in_engine.load:.2f} times its "
        f"capacity, as in the worlds. The capacity was measured before: {speed.capacity:.0f} "
        f"requests a second, {1 / speed.stretch:.1f} times that of the worlds. Worlds with its step "
        f"times need {' and '.join(counts)} to exclude no difference with a probability of "
        f"{measured.POWER}. The rule, fixed before: stop after {size.measured} episodes, or the "
        f"first one behind {size.measured_s:.0f} s. {len(in_engine.latencies[LEARNED])} were played."
    )


def decisions_sentence(equal_steps: Sequence[int]) -> str:
    """equal_steps: of each run, see `measured.equal_steps`."""
    equal = sum([number > 0 for number in equal_steps])
    runs = len(equal_steps)
    return (
        f"In {equal} of {runs} measured runs, those of all three orders, the {sum(equal_steps):,} "
        "decisions of the engine are those of the scheduler on arrays, given the arrivals that the "
        "recording has, and the recording replays byte for byte in the simulator's scheduler."
    )


def score_of(net: learned.Network, prompt: int, predicted: int) -> float:
    """The score of a request that waits, in arrivals."""
    seq = learned.features_of(prompt, 0, 600, predicted, 0)
    return learned.score(net, seq) / 2**learned.FRACTION


def slopes(net: learned.Network) -> dict[str, float]:
    """Arrivals that a doubling costs, on average over a grid."""
    grid = [(prompt, predicted) for prompt in PROMPTS for predicted in PREDICTIONS]
    return {
        "predicted length": statistics.fmean(
            [score_of(net, p, 2 * n + 1) - score_of(net, p, n) for p, n in grid]
        ),
        "prompt": statistics.fmean(
            [score_of(net, 2 * p + 1, n) - score_of(net, p, n) for p, n in grid]
        ),
    }


def weights_sentence(net: learned.Network) -> str:
    by_doubling = slopes(net)
    parts = [
        f"a doubling of the {name} moves a request {abs(slope):.1f} arrivals "
        f"{'back' if slope > 0 else 'forward'}"
        for name, slope in by_doubling.items()
    ]
    return f"What it learnt, read from its weights: {' and '.join(parts)}."


def named_loads(
    loads: Mapping[str, Latencies],
    recorded_loads: Mapping[tuple[str, float], Latencies],
    label: str,
) -> dict[str, Latencies]:
    """All loads by name. label: of a recorded one, with its name and its rate over the recorded."""
    labelled = {
        label.format(name=name, rate=1 / scale): latencies
        for (name, scale), latencies in recorded_loads.items()
    }
    return dict(loads) | labelled


def failure_sentence(
    loads: Mapping[str, Latencies], recorded_loads: Mapping[tuple[str, float], Latencies]
) -> str:
    named = named_loads(loads, recorded_loads, "{name} x {rate:.2g}")
    by_hand = ("fcfs", "shortest")
    lost = [
        f"{name} ({base})"
        for name, latencies in named.items()
        for base in by_hand
        if gain(latencies, base).high < 0
    ]
    even = [
        f"{name} ({base})"
        for name, latencies in named.items()
        for base in by_hand
        if gain(latencies, base).low <= 0 <= gain(latencies, base).high
    ]
    guessed = sum(gain(latencies, PREDICTED).high < 0 for latencies in named.values())
    return (
        f"Of {len(named)} loads it is slower, by an interval that excludes no difference, on "
        f"{', '.join(lost) or 'none'}; no difference is excluded on {', '.join(even) or 'none'}. The "
        f"{PREDICTED} first, which promises nobody an end, is faster on {guessed} of them."
    )


def places_table(places: Mapping[str, Latencies]) -> str:
    rows = [
        (
            place,
            name,
            float(np.mean(values)),
            "" if name == LEARNED else interval_text(gain(latencies, name), 4),
        )
        for place, latencies in places.items()
        for name, values in latencies.items()
    ]
    return markdown(("where", "order", "mean latency, s", "the learnt one's gain, s, 95 %"), rows)


def curves_table(curves: Mapping[str, Sequence[Curve]], seeds: Sequence[int]) -> str:
    rows = [
        (method, seed, *[f"{share:.2f}" for _, share in run])
        for method, runs in curves.items()
        for seed, run in zip(seeds, runs, strict=True)
    ]
    steps = [step for step, _ in next(iter(curves.values()))[0]]
    return markdown(("method", "seed", *[f"gain after {step} steps" for step in steps]), rows)


def scores_table(net: learned.Network) -> str:
    rows = [
        (f"{predicted} predicted", *[f"{score_of(net, p, predicted):.1f}" for p in PROMPTS])
        for predicted in PREDICTIONS
    ]
    head = (
        "score of a request that waits, in arrivals",
        *[f"{p} tokens of prompt" for p in PROMPTS],
    )
    return markdown(head, rows)


def loads_table(
    loads: Mapping[str, Latencies], recorded_loads: Mapping[tuple[str, float], Latencies]
) -> str:
    label = "recorded {name}, {rate:.2g} times as recorded"
    named = named_loads(loads, recorded_loads, label)
    rows = [
        (
            name,
            len(latencies[LEARNED]),
            float(np.mean(latencies[LEARNED])),
            *[
                interval_text(gain(latencies, base))
                for base in ("fcfs", "shortest", "fair", PREDICTED)
            ],
            f"{gap(latencies):.2f}",
        )
        for name, latencies in named.items()
    ]
    head = (
        "load",
        "episodes",
        "learnt, s",
        "gain over fcfs",
        "over shortest",
        "over fair",
        f"over {PREDICTED}",
        "share of the oracle's gain",
    )
    return markdown(head, rows)

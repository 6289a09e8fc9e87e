"""The measured part of 030: tiny hybrids of random weights in a real engine on JAX's device, beside
the simulation of the same engine.

The requests are the beginning of the recorded conversations at a small scale: a block of 512 tokens
becomes one of eight. Both engines get the same requests at once, so both must make the same plans:
equal tokens from the cache, and equal blocks. Times are processor seconds, which other jobs change
less than seconds. They are quoted as ratios of runs that take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.core.drive import drive
from experiments.core.field_files import BLOCK, BlockIds
from experiments.core.workloads import WorkItem
from experiments.simulation.cache_plan import cache_plan
from experiments.simulation.cost import Simulate, shape_of_decoder
from experiments.simulation.simulate import SimulatedEngine
from experiments.studies.findings import Interval
from pagedjax import LLM, SamplingParams
from pagedjax.device.models.mixers.gated_delta import GatedDelta
from pagedjax.device.models.mixers.mamba2 import Mamba2
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.host.types import StepResult
from pagedjax.models import Decoder, DecoderConfig, LayerKind, Rope
from pagedjax.options.config import EngineConfig

SCALE = 64  # tokens of the trace for one of ours
SMALL_BLOCK = BLOCK // SCALE
OUTPUT = 6  # tokens
VOCABULARY = 320
HYBRIDS = {
    "convolutions (LFM2)": ShortConv(3),
    "the delta rule (Qwen3.5)": GatedDelta(4, heads=4, key_heads=2, key_dim=16, value_dim=16),
    "Mamba 2 (Granite 4)": Mamba2(4, heads=4, key_heads=2, key_dim=16, value_dim=16),
}
ENGINE: dict[str, Any] = {
    "block_size": SMALL_BLOCK,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "max_model_len": 512,
    "num_blocks": 100,
    "dtype": "float32",
}


class Counts(NamedTuple):
    """What an engine decided, step by step.

    hit_tokens: by request, the tokens of its prompt that were in the cache.
    plans: starts, counts and block tables of each step.
    """

    hit_tokens: Mapping[str, int]
    plans: Sequence[Any]


class Measurement(NamedTuple):
    """One hybrid under one policy.

    hit_share: the share of the prompt tokens that the real engine had in its cache.
    equal: whether the simulation made the same plans.
    time: processor seconds of the run over those of the engine that keeps every state.
    """

    hit_share: float
    equal: bool
    time: Interval


def hybrid(mixer: Any) -> tuple[DecoderConfig, Any]:
    """A decoder of four layers, the second of which has attention, and random parameters."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        max_len=ENGINE["max_model_len"],
        tied=True,
        eps=1e-6,
        kinds=(LayerKind(mixer=mixer), LayerKind(), LayerKind(mixer=mixer), LayerKind(mixer=mixer)),
        ropes=(Rope(10000.0),),
    )
    rng = np.random.default_rng(30)
    state = nnx.eval_shape(lambda: nnx.state(Decoder(config, "float32"), nnx.Param))
    return config, jax.tree.map(
        lambda x: rng.normal(0, x.shape[-1] ** -0.5, x.shape).astype("float32"), state
    )


def small_requests(items: Sequence[WorkItem], conversations: int) -> list[WorkItem]:
    """The turns of the first conversations of several turns at a small scale, all at once, as far
    as they fit the model. Equal blocks have equal tokens.

    Args:
        items: of a workload of Mooncake's, with sessions.
        conversations: how many.
    """
    chosen = list(dict.fromkeys([item.session for item in items if item.turn]))[:conversations]
    small: list[WorkItem] = []
    ends: dict[str, int] = {"": 0}  # by request, tokens of the conversation up to its answer
    for item in items:
        history = ends.get(item.follows)
        if item.session not in chosen or history is None:
            continue
        assert isinstance(item.prompt_token_ids, BlockIds)
        tokens: list[int] = []
        for block, start, end in item.prompt_token_ids.pieces:
            draw = np.random.default_rng([block, SCALE])
            ids = draw.integers(3, VOCABULARY, SMALL_BLOCK).tolist()
            tokens += ids[start // SCALE : -(-end // SCALE)]
        end = history + len(tokens) + OUTPUT
        if end > ENGINE["max_model_len"]:
            continue
        small.append(
            item._replace(
                arrival=0.0, prompt_token_ids=tuple(tokens), max_tokens=OUTPUT, history=history
            )
        )
        ends[item.request_id] = end
    return small


def counts_of(results: Sequence[StepResult]) -> Counts:
    hit_tokens: dict[str, int] = {}
    plans = []
    for result in results:
        plan = result.plan
        for name, cached in zip(plan.admitted, plan.cached, strict=True):
            hit_tokens.setdefault(name, cached)
        plans.append((plan.starts, plan.counts, [seq.blocks for seq in plan.seqs]))
    return Counts(hit_tokens, plans)


def simulated(config: DecoderConfig, items: Sequence[WorkItem], options: Any) -> Counts:
    """The counts of the simulated engine."""
    engine_config = EngineConfig(**ENGINE, **options)
    shape = shape_of_decoder(config)._replace(kv_bytes=4)
    engine = SimulatedEngine(
        engine_config,
        lambda work: 1.0,
        vocab_size=VOCABULARY,
        simulate=Simulate(step_s=1.0),
        plan=cache_plan(engine_config, shape),
    )
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return counts_of(drive(engine, items, params, engine.clock, engine.sleep)[1])


def measure(
    mixer: Any, items: Sequence[WorkItem], policies: Mapping[str, Any], repeats: int
) -> dict[str, Measurement]:
    """A measurement of each policy. The others are compared with the first one."""
    config, parameters = hybrid(mixer)
    engines = {
        name: LLM(params=parameters, config=config, progress=False, **ENGINE, **options).engine
        for name, options in policies.items()
    }
    seconds, counts = run_in_turn(engines, items, repeats)
    total = sum([item.prompt_tokens for item in items])
    first = next(iter(policies))
    measurements: dict[str, Measurement] = {}
    for name, options in policies.items():
        ratios = [a / b for a, b in zip(seconds[name][1:], seconds[first][1:], strict=True)]
        measurements[name] = Measurement(
            sum(counts[name].hit_tokens.values()) / total,
            counts[name] == simulated(config, items, options),
            Interval(min(ratios), statistics.median(ratios), max(ratios), "range", repeats),
        )
    return measurements


def run_in_turn(
    engines: Mapping[str, Any], items: Sequence[WorkItem], repeats: int
) -> tuple[dict[str, list[float]], dict[str, Counts]]:
    """Runs the engines in turn, `repeats` times after a first time -> (processor seconds by engine,
    of each time and of the first one; counts by engine).
    """
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    counts: dict[str, Counts] = {}
    for _ in range(1 + repeats):
        for name, engine in engines.items():
            engine.reset()
            started = time.process_time()
            _, results = drive(engine, items, params)
            seconds[name].append(time.process_time() - started)
            counts[name] = counts_of(results)
    return seconds, counts

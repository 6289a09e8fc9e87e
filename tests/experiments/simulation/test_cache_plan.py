"""A simulated engine of a model whose layers are not all alike: the blocks, bytes and decisions of
the real engine, and the counts of its steps.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.core.drive import drive
from experiments.core.records import step_records
from experiments.core.workloads import WorkItem
from experiments.simulation.cache_plan import cache_plan
from experiments.simulation.cost import Simulate, Work, named_shape, shape_of_decoder
from experiments.simulation.simulate import SimulatedEngine, SimulatedLLM, resolved
from pagedjax import LLM
from pagedjax.device import cache
from pagedjax.device.models import Model, assemble
from pagedjax.device.models.decoder import DecoderConfig, LayerHeads, LayerKind
from pagedjax.device.models.latent import Latent
from pagedjax.device.models.mixers.short_conv import ShortConv
from pagedjax.engine.geometry import geometry
from pagedjax.host.kv_policies import ALL
from pagedjax.host.types import Plan
from pagedjax.options.config import EngineConfig
from pagedjax.weights.architectures import FAMILIES, normalised
from tests.engine.page_kinds import DELTA, MAMBA, random_parameters
from tests.experiments.core.summaries import GREEDY
from tests.experiments.simulation.test_model_configs import PUBLISHED
from tests.experiments.simulation.test_simulate import COLUMNS

pytestmark = pytest.mark.few_optimisations
FULL = LayerKind()
WIDE = LayerHeads(heads=3, kv_heads=1, head_dim=64, shared_values=True)
MODELS = {
    "some windows": (LayerKind(window=9), FULL, LayerKind(window=9), LayerKind(window=9)),
    "two windows": (LayerKind(window=5), FULL, LayerKind(window=14)),
    "one window": (LayerKind(window=9), LayerKind(window=9)),
    "long windows": (LayerKind(window=500), FULL),
    "convolutions": (LayerKind(mixer=ShortConv(3)), FULL, LayerKind(mixer=ShortConv(3))),
    "states": (LayerKind(mixer=DELTA), FULL, LayerKind(mixer=DELTA), LayerKind(mixer=DELTA)),
    "a state and a window": (FULL, LayerKind(mixer=DELTA), LayerKind(window=9)),
    "all kinds": (
        LayerKind(mixer=ShortConv(3)),
        FULL,
        LayerKind(mixer=DELTA),
        LayerKind(mixer=MAMBA),
        LayerKind(window=9),
    ),
    "heads of two sizes": (
        LayerKind(window=9, rope=None),
        LayerKind(rope=None, heads=WIDE),
        LayerKind(window=9, rope=None),
        LayerKind(rope=None, heads=WIDE),
    ),
    "no attention": (LayerKind(mixer=MAMBA), LayerKind(mixer=DELTA)),
}
LATENTS = "latents"
LATENT = Latent(rank=16, rotated=8, key=4, value=6)


def decoder_of_kinds(kinds: tuple[LayerKind, ...], config: DecoderConfig) -> DecoderConfig:
    return dataclasses.replace(config, kinds=kinds)


# --- blocks and bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*MODELS, LATENTS])
def test_blocks_and_bytes_are_those_of_the_engines_plan(tiny, name, dtype, block_size):
    decoder = decoder_of_kinds(MODELS.get(name, (FULL, FULL)), tiny.model.config)
    if name == LATENTS:
        decoder = dataclasses.replace(decoder, latent=LATENT, kv_heads=1, head_dim=LATENT.row)
    for options in ({}, {"max_model_len": 20}, {"free_window_blocks": False}):
        sizes = {"block_size": block_size, "max_model_len": 96, **options}
        config = EngineConfig(dtype=dtype, **sizes)
        no_arrays: Any = None
        real = geometry(config, Model(decoder, no_arrays, no_arrays, dtype), dtype)
        kv_bytes = {"float32": 4, "bfloat16": 2}[dtype]
        plan = cache_plan(config, shape_of_decoder(decoder)._replace(kv_bytes=kv_bytes))
        assert plan.views == real.views
        assert plan.groups == real.groups
        assert plan.shares_filling == (not real.keeps_states)
        token_ids = cache.TOKEN_BYTES * block_size * real.groups
        assert plan.block_bytes == real.block_bytes - token_ids
        assert plan.layers == real.block["layers"]


GEMMA_3_1B = {  # google/gemma-3-1b-it
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
}


def test_gemma_3_1b_keeps_a_fifth_of_its_tokens():
    """kv-policies.md: 512 + 6 * 33 of 7 * 512 blocks of four layers, of 8,192 tokens."""
    simulate = Simulate(chip="h100", model="gemma-3-1b")
    config = EngineConfig(max_model_len=8192, max_num_seqs=8)
    engine = SimulatedLLM(simulate, config, "none").engine
    limits = engine.scheduler_state.config
    family = FAMILIES["gemma3_text"].from_hf(normalised(GEMMA_3_1B, "a test"))
    assert named_shape("gemma-3-1b") == shape_of_decoder(family)
    widths = [view.width(512) for view in limits.views]
    assert widths == [512, *[33] * 6]
    assert 4 * sum(widths) / (26 * 512) == pytest.approx(0.21, abs=0.01)
    plan = cache_plan(engine.config, named_shape("gemma-3-1b"))
    # four layers of a key head of 256 in 16 bits, and 28 places for 26 layers
    assert plan.block_bytes == 7 * 4 * 16 * 2 * 256 * 2


def test_the_documents_bytes_of_named_models():
    page = Path(__file__).parents[3] / "docs" / "design" / "layer-costs.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    for name, total, active, token, *sizes in table:
        model = name.strip("`")
        shape = named_shape(model)
        assert float(total) == pytest.approx(PUBLISHED[model][0], rel=0.002)
        assert float(active) == pytest.approx(PUBLISHED[model][1], rel=0.01)
        assert token == f"{shape.token_bytes / 1024:.0f} KiB"
        for length, text in zip((8192, 32768), sizes, strict=True):
            config = EngineConfig(block_size=16, max_model_len=length)
            plan = cache_plan(config, shape)
            per_group = length // 16
            views = plan.views or (ALL,)
            num_blocks = sum(view.width(per_group) for view in views)
            num_bytes = num_blocks * plan.block_bytes / plan.groups
            assert text == f"{num_bytes / 2**20:.0f} MiB"
    assert {name.strip("`") for name, *_ in table} == set(PUBLISHED)


def test_the_cache_of_a_model_with_windows_fills_the_memory():
    shape = named_shape("gpt-oss-20b")
    config = resolved(EngineConfig(memory_fraction=0.9, max_num_seqs=4096), shape, 80e9)
    plan = cache_plan(config, shape)
    free = 80e9 - shape.total_bytes
    assert plan.groups == 2
    assert plan.block_bytes == 16 * shape.token_bytes, "12 layers of each kind"
    assert config.num_blocks == int(0.9 * free / plan.block_bytes)
    with pytest.raises(ValueError, match=r"weights of 41.8 GB leave 0.0 of 40.0 GB"):
        resolved(EngineConfig(), shape, 40e9)


PIECES = {"reservation": "max", "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            "gpt-oss-20b",
            {"kv_policy": "streaming"},
            r"windows of \[128\] tokens, .* kv_policy='full'",
        ),
        ("granite-4-h-micro", {"kv_policy": "streaming"}, r"a kv_policy cannot thin out"),
        ("granite-4-h-micro", PIECES, r"leave reservation, .* at their defaults"),
        (
            "deepseek-v3",
            {"batch_invariant": True},
            r"the model keeps latents .*, whose results may",
        ),
        (
            "deepseek-v3",
            {"kv_policy": {"name": "quest", "tokens": 64}},
            "no blocks are selected yet",
        ),
        ("granite-4-h-micro", {"batch_invariant": True}, r"layers without attention \(Mamba2\)"),
        (
            "qwen3-next-80b-a3b",
            {"kv_cache_dtype": "float8_e4m3fn"},
            r"kv_cache_dtype is 'float8_e4m3fn', .* leave it out",
        ),
    ],
)
def test_options_that_the_engine_refuses_are_refused(model, options, message):
    simulate = Simulate(step_s=1.0, model=model)
    with pytest.raises(ValueError, match=message):
        SimulatedLLM(simulate, EngineConfig(num_blocks=64, max_model_len=512, **options), "none")


# --- decisions ------------------------------------------------------------------------------------


class Visible:
    """What a step's queries see, token by token."""

    def __init__(self, plan: Any, block_size: int) -> None:
        ends = zip(plan.starts, plan.counts, strict=True)
        self.rows = [range(start, start + count) for start, count in ends]
        self.entered = sum(at % block_size == 0 for row in self.rows for at in row)

    def through(self, window: int) -> tuple[int, int]:
        visible = [[set(range(max(0, at - window + 1), at + 1)) for at in row] for row in self.rows]
        context = sum(len(set.union(*row)) for row in visible if row)
        return context, sum(len(tokens) for row in visible for tokens in row)


def long_answers() -> tuple[WorkItem, ...]:
    """Requests that outgrow a small pool; some begin alike."""
    draw = np.random.default_rng(0)
    common = tuple(draw.integers(20, 300, 9).tolist())
    return tuple(
        WorkItem(
            f"r{i}",
            0.0,
            (common if i % 3 else ()) + tuple(draw.integers(20, 300, 1 + 3 * i).tolist()),
            int(draw.integers(15, 35)),
        )
        for i in range(9)
    )


def run_long_answers(engine: Any) -> tuple[tuple[list[Any], list[Any]], list[Plan]]:
    """((columns of the records, rows and blocks) of each step, plans with rows)."""
    start, results = drive(engine, long_answers(), GREEDY)
    steps = step_records(results, start, 4, engine.scheduler_state.config)
    plans = [result.plan for result in results if result.plan.seqs]
    blocks = [
        (p.counts, p.starts, p.swap_out, p.swap_in, [seq.blocks for seq in p.seqs]) for p in plans
    ]
    return ([COLUMNS(step) for step in steps], blocks), plans


OPTIONS = {
    "recomputed": {"num_blocks": 8},
    "swapped": {"num_blocks": 8, "preemption": "swap", "swap_space_gib": 0.01},
    "roomy": {"enable_prefix_caching": False, "policy": "shortest"},
}


@pytest.mark.default_cases("recomputed-a state and a window")
@pytest.mark.slow_cases(
    "recomputed-some windows", "swapped-some windows", "swapped-convolutions", "roomy-all kinds"
)
@pytest.mark.parametrize(
    "name", ["some windows", "one window", "a state and a window", "convolutions", "all kinds"]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_decisions_blocks_and_counts_are_those_of_the_real_engine(tiny, name, options):
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 6}
    settings |= {"max_model_len": 96, "max_num_batched_tokens": 32, "token_buckets": (32,)}
    settings |= OPTIONS[options]
    decoder = decoder_of_kinds(MODELS[name], tiny.model.config)
    model = assemble(decoder, random_parameters(decoder), "float32")
    loaded = dataclasses.replace(tiny, model=model)
    real = LLM(loaded, progress=False, **settings).engine
    shape = shape_of_decoder(decoder)._replace(kv_bytes=4)
    config = EngineConfig(dtype="float32", **settings)
    works: list[Work] = []
    simulated = SimulatedEngine(
        config,
        lambda work: works.append(work) or 0.01,
        vocab_size=320,
        host_blocks=real.scheduler_state.config.host_blocks,
        simulate=Simulate(chip="h200", model="opt-13b"),
        plan=cache_plan(config, shape),
    )
    assert simulated.scheduler_state.config == real.scheduler_state.config
    history, _ = run_long_answers(real)
    simulated_history, plans = run_long_answers(simulated)
    assert simulated_history == history
    preempted = sum(row[0] for row in history[0])
    assert (preempted > 0) == (options != "roomy")
    assert len(works) == len(plans)
    for work, plan in zip(works, plans, strict=True):
        visible = Visible(plan, 4)
        assert work.seen == tuple(visible.through(window) for window in shape.windows)
        assert work.entered == (visible.entered if shape.keeps_states else 0)
        if all(view.window is None for view in real.scheduler_state.config.views[:1]):
            assert (work.context, work.pairs) == visible.through(96)

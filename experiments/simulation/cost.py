"""The seconds of a step, without running it: a roofline of a chip and a model's shape, or a fit to
measured steps.

    Work      pure counts of a step's plan
    Roofline  Work -> seconds, from bytes, operations and overheads (Williams et al. 2009)
    Fitted    Work -> seconds, least squares through the steps of a measured run

Published coefficients of other engines are in profiles.py, published times in measured.py.

A step reads its weights once and multiplies them with its tokens. Then it reads the keys and values
of every context and multiplies with them. Each part takes the longer of its memory traffic and its
arithmetic:

    launch + max(weights / bandwidth, 2 * numbers * tokens / rate) + max(kv / bandwidth, attention / rate)

In a mixture of experts, the step reads the experts that at least one token chose, as expected of
tokens that choose evenly and independently (Shape.experts_read), and multiplies with the experts of
each token. Where layers are not all alike, each kind has a maximum of its own (layer_kinds.py).

A mesh of devices takes the time of one device's part of the model (`part`), and that of what the
devices exchange (collectives.py).

Two shares say what kernels reach of the chip's bandwidth and arithmetic. With the default of 1, a
time is a lower bound. Imports no jax, except for the shape of a checkpoint or of a mesh's part.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments.simulation import collectives, model_configs, profiles
from experiments.simulation.collectives import Exchanged, Network
from experiments.simulation.layer_kinds import (
    Kind,
    Seen,
    decoder_of,
    entered_blocks,
    kinds_of,
    layer_costs,
    mixing_numbers,
    seen,
)
from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.types import Plan, SchedulerConfig, pick
from pagedjax.options.config import MeshConfig, check_above_zero, from_dict, one_of
from pagedjax.options.own_errors import placed
from pagedjax.options.own_values import own_function

if TYPE_CHECKING:
    from experiments.simulation.cache_plan import CachePlan
    from pagedjax.device.models.decoder import DecoderConfig
    from pagedjax.device.models.latent import Latent
    from pagedjax.weights.architectures import Family

STEPS = "steps.jsonl"  # a file of a run folder
SIMULATED = "simulated"  # prefix of the name of a simulated device


# Work -> seconds: a float; for a `Work` with arrays, float64 [steps] or a float
StepTime = Callable[["Work"], Any]


class Work(NamedTuple):
    """The counts of a step that decide its time; tokens unless stated otherwise.

    For several steps that only decode, `context`, `pairs`, `single_context` and what `seen` has are
    int64 [steps]. A user's own function gets the integers of one step (`own_step_time`).

    `context` and `pairs` are those of layers that see the most.
    """

    tokens: int  # computed, padding included
    sequences: int
    sampled: int  # rows with logits
    context: int  # keys and values read: the context of each sequence after the step, summed
    pairs: int  # (query, key) pairs of causal attention
    moved_blocks: int = 0  # between device and host
    single: int = 0  # sequences that compute one token, as decodes do
    single_context: int = 0  # the part of `context` of these sequences
    # through each window of the model's layers (`Shape.windows`); () in models without windows
    seen: tuple[Seen, ...] = ()
    entered: int = 0  # blocks that get their first token; 0 in models whose layers keep no states
    # of rows that make keys and values of latents: their pairs, and the tokens that they see and do
    # not compute; 0 in other models
    expanded_pairs: int = 0
    expanded_context: int = 0


def work_of(
    plan: Plan,
    padded: int,
    *,
    cached: bool = True,
    config: SchedulerConfig | None = None,
    shape: Shape | None = None,
) -> Work:
    """The work of a plan.

    Args:
        cached: False is an engine without a KV cache, which computes every token again.
        config: the scheduler's configuration, which decides what queries see; None: queries see
            everything.
        shape: of a model whose layers are not all alike, whose windows, states and latents count,
            too. It needs `config`.
    """
    if shape is not None and shape.kinds:
        assert config is not None, "windows and states are those of a configuration"
        work = work_of(plan, padded, cached=cached, config=config)
        work = _with_kinds(work, plan, config, shape, cached=cached)
        fewest = shape.latent.expands_from if shape.latent else None
        return work if fewest is None else _with_expanded(work, plan, config, fewest, cached=cached)
    moved = len(plan.swap_out) + len(plan.swap_in)
    if config is not None and config.views and config.views[0] != ALL:
        return _work_with_view(plan, padded, moved, config.views[0], config.block_size)
    if cached and plan.num_tokens == len(plan.seqs):  # decodes only: the most frequent step
        context = sum(plan.starts) + len(plan.seqs)
        if context == sum(plan.lengths):
            rows = len(plan.seqs)
            return Work(padded, rows, rows, context, context, moved, rows, context)
    starts = np.asarray(plan.starts)
    counts = np.asarray(plan.counts)
    ends = starts + counts
    if not cached:
        padded += int(starts.sum())
        starts = np.zeros_like(starts)
        counts = ends
    single = counts == 1
    return Work(
        tokens=padded,
        sequences=len(ends),
        sampled=int((ends >= np.asarray(plan.lengths)).sum()) + sum(plan.drafts),
        context=int(ends.sum()),
        pairs=int((counts * starts + counts * (counts + 1) // 2).sum()),
        moved_blocks=moved,
        single=int(single.sum()),
        single_context=int(ends[single].sum()),
    )


def _with_kinds(
    work: Work, plan: Plan, config: SchedulerConfig, shape: Shape, *, cached: bool
) -> Work:
    """The work, with what queries see through windows, and the blocks that sequences enter."""
    starts = np.asarray(plan.starts)
    counts = np.asarray(plan.counts)
    if not cached:
        counts = starts + counts
        starts = np.zeros_like(starts)
    return work._replace(
        seen=tuple(
            [
                seen(starts, counts, window)
                if window < config.max_model_len
                else Seen(work.context, work.pairs)
                for window in shape.windows
            ]
        ),
        entered=entered_blocks(starts, counts, config.block_size) if shape.keeps_states else 0,
    )


def _with_expanded(
    work: Work, plan: Plan, config: SchedulerConfig, fewest: int, *, cached: bool
) -> Work:
    """The work, with what rows of at least `fewest` tokens see, which make keys and values."""
    counts = plan.counts
    if not cached:
        counts = tuple([start + count for start, count in zip(plan.starts, counts, strict=True)])
    rows = [i for i, count in enumerate(counts) if count >= fewest]
    if not rows:
        return work
    part = plan._replace(
        seqs=pick(plan.seqs, rows),
        starts=pick(plan.starts, rows),
        counts=pick(plan.counts, rows),
        lengths=pick(plan.lengths, rows),
        drafts=pick(plan.drafts, rows) if plan.drafts else (),
    )
    seen = work_of(part, part.num_tokens, cached=cached, config=config)
    computed = sum(pick(counts, rows))
    return work._replace(
        expanded_pairs=seen.pairs, expanded_context=max(seen.context - computed, 0)
    )


def _work_with_view(plan: Plan, padded: int, moved: int, view: View, block_size: int) -> Work:
    """The work of a plan where a query sees some blocks of its sequence."""

    def hidden(position: int) -> int:
        """Tokens that the query at this position does not see."""
        block = position // block_size
        return (view.first(block) - len(view.outside(block))) * block_size

    sampled = sum(plan.drafts)
    context = 0
    pairs = 0
    single = 0
    single_context = 0
    for length, start, count in zip(plan.lengths, plan.starts, plan.counts, strict=True):
        end = start + count
        visible = end - hidden(start)
        sampled += end >= length
        context += visible
        pairs += sum([position + 1 - hidden(position) for position in range(start, end)])
        if count == 1:
            single += 1
            single_context += visible
    return Work(
        tokens=padded,
        sequences=len(plan.seqs),
        sampled=sampled,
        context=context,
        pairs=pairs,
        moved_blocks=moved,
        single=single,
        single_context=single_context,
    )


class Shape(NamedTuple):
    """The sizes of a decoder that its costs depend on, or of one device's part of it (`part`)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    longest: int  # most tokens of a request
    gated: bool = True  # three matrices in an MLP, or two
    tied: bool = False  # the embedding is the head
    weight_bytes: float = 2  # bytes of a weight
    kv_bytes: float = 2
    sparse: int = 0  # layers with experts in place of one MLP
    experts: int = 0  # experts of such a layer
    chosen: int = 0  # experts that each token chooses
    expert: int = 0  # intermediate size of an expert
    # devices that share the experts; each has an equal part of `experts` and of the chosen experts
    dealt: int = 1
    shared: int = 0  # intermediate size of the MLP that each token uses beside its experts
    gated_attention: bool = False  # each query head has a gate, as wide as the head
    kinds: tuple[Kind, ...] = ()  # of layers; () if all have attention that sees all tokens

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of its layers, each once, ascending."""
        return tuple(sorted({kind.window for kind in self.kinds if kind.window}))

    @property
    def latent(self) -> Latent | None:
        """The latents of its layers, which all layers have or none."""
        return self.kinds[0].latent if self.kinds else None

    @property
    def keeps_states(self) -> bool:
        """Whether some layers have no attention."""
        return any(kind.mixer is not None for kind in self.kinds)

    def layer_numbers(self, experts: float) -> float:
        """Numbers in the matrices of all layers.

        experts: how many experts count in each layer with experts, those of all devices together.
        """
        # numbers of an MLP for each intermediate channel
        per_channel = (3 if self.gated else 2) * self.hidden
        router = self.hidden * self.experts
        mixture = router + experts / self.dealt * per_channel * self.expert
        if self.shared:
            mixture += per_channel * self.shared
        if self.kinds or self.gated_attention:
            mixing = mixing_numbers(self)
        else:
            mixing = self.layers * self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return (
            mixing
            + (self.layers - self.sparse) * per_channel * self.intermediate
            + self.sparse * mixture
        )

    def experts_read(self, tokens: int) -> float:
        """Experts of a layer chosen by at least one token, expected for even and independent
        choices.
        """
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)

    @property
    def head_numbers(self) -> int:
        return self.hidden * self.vocabulary

    def read_bytes(self, tokens: int) -> float:
        """Bytes of the weights that a step of `tokens` tokens reads: layers and head."""
        return self.weight_bytes * (
            self.layer_numbers(self.experts_read(tokens)) + self.head_numbers
        )

    def products(self, tokens: int, sampled: int) -> float:
        """Operations of the products with weights."""
        return 2 * (self.layer_numbers(self.chosen) * tokens + self.head_numbers * sampled)

    @property
    def total_bytes(self) -> float:
        """Bytes of all weights, with the embedding if it is not tied to the head."""
        return self.weight_bytes * (
            self.layer_numbers(self.experts) + (1 if self.tied else 2) * self.head_numbers
        )

    @property
    def token_bytes(self) -> float:
        """Bytes of the keys and values, or latents, of one token in all layers that have some."""
        if not self.kinds:
            return self.kv_bytes * 2 * self.layers * self.kv_heads * self.head_dim
        costs = layer_costs(self, block_size=1, activation_bytes=2)
        return sum([cost.layers * cost.token_bytes for cost in costs])


def shape_of(
    config: Mapping[str, Any],
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    *,
    family: Family | None = None,
) -> Shape:
    """The shape in a Hugging Face config.json. The model's family reads it, so defaults are those
    of the loader.

    Raises:
        ValueError: the model is not supported.
    """
    from pagedjax.weights.architectures import normalised
    from pagedjax.weights.families import built_in, config_of  # imports jax, but starts no backend

    values = normalised(config, "the model's config.json", family)
    decoder = config_of(family or built_in(values["model_type"]), values, "the model's config.json")
    return shape_of_decoder(decoder)._replace(weight_bytes=weight_bytes, kv_bytes=kv_bytes)


def shape_of_decoder(decoder: DecoderConfig) -> Shape:
    """The shape of a decoder of the engine. One with latents has one key head, whose size is that
    of a row.
    """
    shape = Shape(
        layers=decoder.layers,
        hidden=decoder.hidden,
        heads=decoder.heads,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        intermediate=decoder.intermediate,
        vocabulary=decoder.vocab_size,
        longest=decoder.max_len,
        gated=decoder.gated,
        tied=decoder.tied,
        gated_attention=decoder.attn_gate,
        kinds=kinds_of(decoder),
    )
    if decoder.experts is None:
        return shape
    return shape._replace(
        sparse=sum(kind.sparse for kind in decoder.kinds),
        experts=decoder.experts.count,
        chosen=decoder.experts.chosen,
        expert=decoder.experts.intermediate,
        shared=decoder.experts.shared,
    )


def named_shape(name: str) -> Shape:
    """The shape of a model by its name, one of `MODELS`, with 16-bit weights and cache."""
    return SHAPES[name] if name in SHAPES else shape_of(model_configs.CONFIGS[name])


def part(shape: Shape, mesh: MeshConfig) -> Shape:
    """The shape of one device's part of a model: heads, widths and vocabulary with padding
    (models/split.py).

    With experts on several devices, it is the part of a device whose experts get an equal share of
    the tokens.

    Raises:
        ValueError: the model cannot be split over the mesh, or keeps latents.
    """
    if shape.latent:
        raise ValueError(
            "the model has latent attention, whose parts on several devices are not simulated yet; "
            "use simulate.chips, which share the model without a cost"
        )
    from pagedjax.device.models import split  # imports jax, but starts no backend

    model = decoder_of(shape)
    split.check(model, mesh)
    device = split.device_config(model, mesh)
    return shape._replace(
        heads=device.heads,
        kv_heads=device.kv_heads,
        intermediate=device.intermediate,
        vocabulary=device.vocab_size,
        expert=device.experts.intermediate if device.experts else 0,
        dealt=mesh.expert,
        shared=device.experts.shared if device.experts else 0,
        kinds=kinds_of(device),
    )


# Published shapes that the papers' experiments used, from the models' own config.json.
SHAPES = {
    "opt-13b": Shape(40, 5120, 40, 40, 128, 20480, 50272, 2048, gated=False, tied=True),
    "opt-66b": Shape(64, 9216, 72, 72, 128, 36864, 50272, 2048, gated=False, tied=True),
    "opt-175b": Shape(96, 12288, 96, 96, 128, 49152, 50272, 2048, gated=False, tied=True),
    # the positions of BLOOM (ALiBi) have no limit of their own
    "bloom-176b": Shape(70, 14336, 112, 112, 128, 57344, 250880, 16384, gated=False, tied=True),
    "llama-7b": Shape(32, 4096, 32, 32, 128, 11008, 32000, 2048),
    "llama-13b": Shape(40, 5120, 40, 40, 128, 13824, 32000, 2048),
    "llama-3-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, 8192),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-3-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256, 8192),
    "llama-3.1-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "mistral-7b": Shape(32, 4096, 32, 8, 128, 14336, 32000, 32768),
    "yi-34b": Shape(60, 7168, 56, 8, 128, 20480, 64000, 32768),
    "tinyllama-1.1b": Shape(22, 2048, 32, 4, 64, 5632, 32000, 2048),
    "gpt2-xl": Shape(48, 1600, 25, 25, 64, 6400, 50257, 1024, gated=False, tied=True),
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064, 32768),
    "qwen2.5-14b": Shape(48, 5120, 40, 8, 128, 13824, 152064, 32768),
    "qwen3-0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, 40960, tied=True),
}
# the names of all models; those of model_configs.py have layers or experts that are not all alike
MODELS = (*SHAPES, *model_configs.CONFIGS)


class Chip(NamedTuple):
    """The limits of a chip from its data sheet; rates are of dense 16-bit arithmetic."""

    bandwidth: float  # bytes/s of its memory
    rate: float  # operations/s
    memory: float  # bytes
    launch: float = 2e-4  # seconds of a step for launches, sampling and the host
    tile: int = 1  # tokens that a matrix product computes at a time
    link: float = 25e9  # bytes/s between its memory and the host's
    transfer: float = 5e-6  # seconds of each copy over the link, in addition to its bytes
    network: Network | None = None  # to other chips; None: not known


# NVIDIA's data sheets give NVLink's bandwidth of both directions together: 600 GB/s of an A100, 900
# GB/s of an H100 and an H200, in nodes of 8. They give no latency.
NVLINK_3 = Network(300e9, neighbours=False, devices=8)
NVLINK_4 = Network(450e9, neighbours=False, devices=8)
# Google Cloud's pages of each TPU give the bandwidth of all links of a chip, both directions
# together: v5e 400 and v6e 800 GB/s over 4 links, v5p and TPU7x 1,200 GB/s over 6. TPU v4 has 6
# links of 50 GB/s in each direction (Jouppi et al. 2023, arXiv 2304.01433, table 4). "How to Scale
# Your Model" (Austin et al. 2025, parts 2 and 3) uses 90 % of these, and about 1 us a hop. JAX
# shows a TPU7x as two devices; here it is one.
HOP = 1e-6
ICI = {
    "tpu-v4": Network(50e9, neighbours=True, devices=4096, hop=HOP),
    "tpu-v5e": Network(50e9, neighbours=True, devices=256, hop=HOP),
    "tpu-v5p": Network(100e9, neighbours=True, devices=8960, hop=HOP),
    "tpu-v6e": Network(100e9, neighbours=True, devices=256, hop=HOP),
    "tpu7x": Network(100e9, neighbours=True, devices=9216, hop=HOP),
}

# NVIDIA's data sheets of A100, H100 and H200, Google Cloud's of TPU v4, v5e, v5p, v6e and TPU7x;
# 128 rows is the tile of cuBLAS, of Hopper's kernels and of the MXU. NVIDIA's data sheet of the
# A10G for AWS gives 70 TFLOP/s of dense bfloat16 and 140 with sparsity; the 125 that are often
# quoted are those of the A10.
CHIPS = {
    "a10g": Chip(0.6e12, 70e12, 24e9, tile=128),
    "a100-40g": Chip(1.555e12, 312e12, 40e9, tile=128, network=NVLINK_3),
    "a100-80g": Chip(2.039e12, 312e12, 80e9, tile=128, network=NVLINK_3),
    "h100": Chip(3.35e12, 989e12, 80e9, tile=128, link=50e9, network=NVLINK_4),
    "h200": Chip(4.8e12, 989e12, 141e9, tile=128, link=50e9, network=NVLINK_4),
    "tpu-v4": Chip(1.2e12, 275e12, 32e9, tile=128, network=ICI["tpu-v4"]),
    "tpu-v5e": Chip(0.819e12, 197e12, 16e9, tile=128, network=ICI["tpu-v5e"]),
    "tpu-v5p": Chip(2.765e12, 459e12, 95e9, tile=128, network=ICI["tpu-v5p"]),
    "tpu-v6e": Chip(1.64e12, 918e12, 32e9, tile=128, network=ICI["tpu-v6e"]),
    "tpu7x": Chip(7.37e12, 2307e12, 192e9, tile=128, network=ICI["tpu7x"]),
}


@dataclass(frozen=True)
class OwnNetwork:
    """The links of a chip of your own; see `collectives.Network`."""

    bandwidth: float
    neighbours: bool
    devices: int
    hop: float = 0.0

    def __post_init__(self) -> None:
        check_above_zero("bandwidth", self.bandwidth, "bytes/s")
        if self.devices < 2:
            raise ValueError(f"devices is {self.devices}; it must be at least 2")
        if not 0 <= self.hop < math.inf:
            raise ValueError(f"hop is {self.hop}; it must be at least 0 seconds, and finite")


@dataclass(frozen=True)
class OwnChip:
    """A chip of your own, in the config: `chip: {name: mine, like: h100, bandwidth: 4.0e12}`.

    name: the name of the device in results.
    like: a name of cost.CHIPS, whose values replace those that are not given; null: bandwidth, rate
        and memory must be given.
    bandwidth: bytes/s of its memory. rate: operations/s of dense 16-bit arithmetic. memory: bytes.
    launch: seconds of a step for launches, sampling and the host.
    tile: tokens that a matrix product computes at a time.
    link: bytes/s between its memory and the host's. transfer: seconds of each copy over it.
    network: the links to other chips.
    """

    name: str
    like: str | None = None
    bandwidth: float | None = None
    rate: float | None = None
    memory: float | None = None
    launch: float | None = None
    tile: int | None = None
    link: float | None = None
    transfer: float | None = None
    network: OwnNetwork | None = None

    def __post_init__(self) -> None:
        if not self.name or self.name in CHIPS:
            raise ValueError(
                f"name is {self.name!r}; it must be text, and none of the known chips "
                f"({', '.join(CHIPS)})"
            )
        if self.like is not None:
            one_of("like", self.like, tuple(CHIPS))
        units = {"bandwidth": "bytes/s", "rate": "operations/s", "memory": "bytes"}
        for name, unit in (units | {"link": "bytes/s"}).items():
            value = getattr(self, name)
            if value is not None:
                check_above_zero(name, value, unit)
            elif name in units and self.like is None:
                raise ValueError(f"{name} is missing; give it in {unit}, or a chip that it is like")
        for name in ("launch", "transfer"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be at least 0 seconds, and finite")
        if self.tile is not None and self.tile < 1:
            raise ValueError(f"tile is {self.tile}; it must be at least 1 token")

    @property
    def limits(self) -> Chip:
        """The limits of this chip."""
        names = [field.name for field in dataclasses.fields(self)[2:]]  # without name and like
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.network is not None:
            values["network"] = Network(**dataclasses.asdict(self.network))
        return Chip(**values) if self.like is None else CHIPS[self.like]._replace(**values)


def own_step_time(spec: str) -> StepTime:
    """The seconds of a step by a user's own function of a `Work`, file.py:NAME.

    The function is called for each step alone, with integers. What a function makes of arrays
    cannot be checked: `np.max(work.context)` is one number for all steps.

    Raises:
        ValueError: there is no such function, or it does not take the parameters. A call raises it if
            the function returns no time, and `OwnError` if the function raises.
    """
    function = own_function("simulate.cost", spec, 1)

    def seconds(work: Work) -> float:
        with placed(f"simulate.cost is {spec!r}, which"):
            time: Any = function(work)
        if not isinstance(time, Real) or not 0 < float(time) < math.inf:
            raise ValueError(
                f"simulate.cost is {spec!r}, which returned {time!r:.80} for {work}; it must "
                "return the seconds of the step: a number above 0, and finite"
            )
        return float(time)

    def seconds_of_each(work: Work) -> Any:
        if not isinstance(work.context, np.ndarray):
            return seconds(work)
        counts: tuple[Any, ...] = (work.context, work.pairs, work.single_context)
        columns = [count.tolist() for count in counts]
        return np.array(
            [
                seconds(
                    work._replace(
                        context=context,
                        pairs=pairs,
                        single_context=single_context,
                        seen=(Seen(context, pairs),) * len(work.seen),
                    )
                )
                for context, pairs, single_context in zip(*columns, strict=True)
            ]
        )

    return seconds_of_each


class Roofline(NamedTuple):
    """Seconds of a step on `chips` chips that share weights and heads without a cost (ideal tensor
    parallelism).

    With `devices` above 1, `shape` is one device's part of the model, and what devices exchange
    takes its time; see `of_mesh`.
    """

    shape: Shape
    chip: Chip
    chips: int = 1
    bandwidth_share: float = 1.0  # share of the bandwidth that kernels reach
    rate_share: float = 1.0  # share of the arithmetic
    block_size: int = 16
    # one copy for all moved blocks, not one for each block, layer, keys and values
    batched_moves: bool = True
    devices: int = 1  # devices of a mesh, each with a part of the model
    activation_bytes: float = 2
    pool: CachePlan | None = None  # what a block is; None: it has the keys and values of all layers

    def __call__(self, work: Work) -> float:
        shape = self.shape
        chip = self.chip
        bandwidth = self.chips * self.bandwidth_share * chip.bandwidth
        rate = self.chips * self.rate_share * chip.rate
        tokens = -(-work.tokens // chip.tile) * chip.tile
        weights = max(
            shape.read_bytes(work.tokens) / bandwidth, shape.products(tokens, work.sampled) / rate
        )
        if shape.kinds:
            mixing = self._mixing(work, bandwidth, rate)
        else:
            attention = 4 * shape.layers * shape.heads * shape.head_dim * work.pairs
            mixing = _larger(shape.token_bytes * work.context / bandwidth, attention / rate)
        return chip.launch + weights + mixing + self.move(work.moved_blocks) + self.exchange(work)

    def _mixing(self, work: Work, bandwidth: float, rate: float) -> Any:
        """Seconds of attention and of mixers, without products with weights, where layers are not
        all alike.
        """
        shape = self.shape
        windows = shape.windows
        if len(work.seen) != len(windows):
            raise ValueError(
                f"the work counts {len(work.seen)} windows, and the model has {len(windows)}; give "
                "its shape to work_of"
            )
        through = dict(zip(windows, work.seen, strict=True))
        total: Any = 0.0
        for cost in layer_costs(shape, self.block_size, self.activation_bytes):
            of_window = through[cost.window] if cost.window else None
            total = total + _larger(
                cost.traffic(work, of_window) / bandwidth, cost.operations(work, of_window) / rate
            )
        return total

    def exchange(self, work: Work) -> float:
        """Seconds of the step's exchanges between devices."""
        if self.devices == 1:
            return 0.0
        shape = self.shape
        network = self.chip.network
        assert network is not None, "`of_mesh` refuses a chip without one"
        whole_mixers = sum([len(kind.layers) for kind in shape.kinds if kind.mixer is not None])
        sizes = Exchanged(
            shape.layers, shape.hidden, shape.vocabulary, self.activation_bytes, whole_mixers
        )
        exchanges = collectives.exchanges(sizes, self.devices, work.tokens, work.sampled)
        return sum(collectives.seconds(exchange, self.devices, network) for exchange in exchanges)

    def move(self, blocks: int) -> float:
        """Seconds to move blocks between device and host."""
        if not blocks:
            return 0.0
        layers = self.shape.layers
        num_bytes = blocks * self.block_size * self.shape.token_bytes / self.chips
        if self.pool is not None:
            layers = self.pool.layers
            num_bytes = blocks * self.pool.block_bytes / self.pool.groups / self.chips
        copies = 1 if self.batched_moves else 2 * layers * blocks
        return copies * self.chip.transfer + num_bytes / self.chip.link


def _larger(a: Any, b: Any) -> Any:
    return np.maximum(a, b) if isinstance(a, np.ndarray) else max(a, b)


def of_mesh(roofline: Roofline, mesh: MeshConfig, hop: float | None = None) -> Roofline:
    """The roofline of a mesh, from the roofline of the whole model on one chip.

    Args:
        hop: seconds of a hop; None: the chip's own.

    Raises:
        ValueError: the model cannot be split over the mesh, or the chip's links are not known or
            connect fewer devices.
    """
    network = roofline.chip.network
    if mesh.size > 1:
        check_network(network, mesh.size, "the chip")
    if network is not None and hop is not None:
        network = network._replace(hop=hop)
    chip = roofline.chip._replace(network=network)
    return roofline._replace(shape=part(roofline.shape, mesh), chip=chip, devices=mesh.size)


def check_network(network: Network | None, n: int, chip: str) -> None:
    """Raises ValueError unless the network connects n devices. chip: its name, for the message."""
    if network is None:
        connected = ", ".join(name for name, spec in CHIPS.items() if spec.network)
        raise ValueError(
            f"mesh has {n} devices, and the bandwidth between chips of {chip} is not known; use "
            f"one of {connected}, or chips={n}, which share the model without a cost"
        )
    if n > network.devices:
        raise ValueError(
            f"mesh has {n} devices, and the links of {chip} connect at most {network.devices} "
            f"chips; use at most {network.devices} devices"
        )


class Fitted(NamedTuple):
    """Seconds of a step: a base for its tokens, plus terms for context tokens, pairs and samples."""

    sizes: tuple[int, ...]  # tokens of a step, ascending; the base is linear between them
    seconds: tuple[float, ...]  # of each size, without attention and samples
    per_context: float
    per_pair: float
    error: float  # median of |predicted - measured| / measured, over the steps it was fitted to
    per_sample: float = 0.0

    def __call__(self, work: Work) -> float:
        base = float(np.interp(work.tokens, self.sizes, self.seconds))
        if work.tokens > self.sizes[-1]:  # there, time is proportional to tokens
            base *= work.tokens / self.sizes[-1]
        attention = self.per_context * work.context + self.per_pair * work.pairs
        return base + attention + self.per_sample * work.sampled


def fit(
    steps: Sequence[Mapping[str, Any]], sizes: Sequence[int] = (), *, samples: bool = False
) -> Fitted:
    """Non-negative least squares through measured steps (rows of steps.jsonl), each weighted by its
    own time.

    Args:
        sizes: of `Fitted`, in place of all numbers of tokens that the steps have.
        samples: whether the rows have `sampled`, and samples take time of their own.

    Raises:
        ValueError: fewer than 8 steps, or steps without context_tokens and pairs (a run of an
            earlier version).
    """
    from scipy.optimize import nnls

    if len(steps) < 8:
        raise ValueError(f"the run to fit has {len(steps)} steps; it takes at least 8")
    if "pairs" not in steps[0]:
        raise ValueError(
            "the run's steps have no context_tokens and pairs (what attention reads); measure it "
            "again"
        )
    seconds = np.array([step["seconds"] for step in steps])
    tokens = np.array([step["padded_tokens"] for step in steps])
    sizes = list(sizes) or np.unique(tokens).tolist()
    # the share of each size in the base of a step, as in `Fitted`
    columns = [np.interp(tokens, sizes, share) for share in np.eye(len(sizes))]
    columns[-1] = columns[-1] * np.maximum(tokens / max(sizes[-1], 1), 1)
    names = ["context_tokens", "pairs", *["sampled"] * samples]
    columns += [np.array([step[name] for step in steps]) for name in names]
    matrix = np.array(columns, np.float64).T
    # counts of pairs are millions: without a scale, their coefficient would be lost in rounding
    scale = np.maximum(matrix.max(0), 1)
    solution = nnls(matrix / scale / seconds[:, None], np.ones(len(steps)))[0] / scale
    error = float(np.median(np.abs(matrix @ solution - seconds) / seconds))
    bases = solution[: len(sizes)]
    per_context, per_pair, *per_sample = solution[len(sizes) :].tolist()
    ascending_bases = np.maximum.accumulate(bases).tolist()  # more tokens take no less time
    return Fitted(tuple(sizes), tuple(ascending_bases), per_context, per_pair, error, *per_sample)


def read_steps(text: str) -> list[dict[str, Any]]:
    """The lines of a steps.jsonl."""
    return [json.loads(line) for line in text.splitlines() if line]


def _text(value: object) -> str:
    """A value of a config as text; a mesh by its axes."""
    if not isinstance(value, MeshConfig):
        return str(value)
    text = f"tensor {value.tensor}"
    return f"{text}, expert {value.expert}" if value.expert > 1 else text


@dataclass(frozen=True)
class Simulate:
    """The model of the device.

    chip: a name of cost.CHIPS, or a chip of your own with its values (`OwnChip`).
    chips: the number of chips that share the model, without a cost.
    mesh: the devices that share the model, in place of chips: each computes its part, and they
        exchange sums. A `MeshConfig` or a mapping such as {"tensor": 8}.
    hop_s: with a mesh, seconds of each hop of an exchange, in addition to its bytes; None is the
        chip's.
    fit: the folder of a measured run, in place of a chip; the times come from its steps.jsonl. Or
        a folder and swept values that choose the run: "runs/x block_size=16 repeat=0".
    step_s: seconds of every step, in place of a chip: its time does not depend on what it computes.
    cost: a function of your own, mine.py:NAME, in place of a chip: NAME(work) gives the seconds of
        a step with the counts of `Work`. It may have parameters: {name: mine.py:NAME, a: 0.001}.
    profile: one of profiles.NAMES, in place of a chip: published coefficients or times. They count
        real tokens, so `padded` must be False.
    model: a name of cost.MODELS; None is the shape of the experiment's own model, from its
        config.json.
    bandwidth_share, rate_share: what kernels reach of the chip's bandwidth and arithmetic; 1 is the
        bound.
    padded: the time of a step is that of its bucket; False: that of its real tokens.
    kv_cache: False is an engine that computes every token of a sequence in every step.
    whole_batches: rows are computed until the last of their batch has ended, and all are answered
        then; needs the policy `static`.
    batched_moves: swapped blocks move in one copy; False: one copy for each block, layer, keys and
        values.
    host_s: seconds that the host adds to a step.
    acceptance: with engine.speculative, the probability that a draft token is accepted, if the
        draft tokens before it are.
    draft_s: seconds that each draft token of a step adds, all sequences together; 0 is a drafter on
        the host.
    """

    chip: str | OwnChip | None = None
    chips: int = 1
    fit: str | None = None
    step_s: float | None = None
    model: str | None = None
    bandwidth_share: float = 1.0
    rate_share: float = 1.0
    padded: bool = True
    kv_cache: bool = True
    whole_batches: bool = False
    batched_moves: bool = True
    host_s: float = 0.0
    acceptance: float | None = None
    draft_s: float = 0.0
    mesh: MeshConfig | None = None
    hop_s: float | None = None
    profile: str | None = None
    cost: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mesh, Mapping):
            sizes: dict[str, Any] = {str(name): size for name, size in self.mesh.items()}
            object.__setattr__(self, "mesh", from_dict(MeshConfig, sizes, where="simulate.mesh."))
        sources = [self.chip, self.fit, self.step_s, self.profile, self.cost]
        if len(sources) - sources.count(None) != 1:
            raise ValueError(
                "needs one of chip (a name), fit (a folder of a measured run), profile (a name), "
                "cost (mine.py:NAME) and step_s (seconds of every step)"
            )
        if self.profile is not None:
            one_of("profile", self.profile, profiles.NAMES)
            if self.padded:
                raise ValueError(
                    f"profile is {self.profile!r}, whose coefficients count real tokens, and "
                    "padded is true; set it to false"
                )
        if self.chip is not None and not isinstance(self.chip, OwnChip):
            one_of("chip", self.chip, tuple(CHIPS))
        if self.model is not None:
            one_of("model", self.model, MODELS)
        if self.chips < 1:
            raise ValueError(f"chips is {self.chips}; it must be at least 1")
        if self.step_s is not None and self.step_s <= 0:
            raise ValueError(f"step_s is {self.step_s}; it must be above 0 seconds")
        if self.chip is None:
            if self.step_s is not None:
                source = "a constant step (step_s) does"
            elif self.fit is not None:
                source = "measured steps (fit) do"
            elif self.cost is not None:
                source = "a function of your own (cost) does"
            else:
                source = "a profile does"
            for name in (
                "chips",
                "bandwidth_share",
                "rate_share",
                "batched_moves",
                "mesh",
                "hop_s",
            ):
                value = getattr(self, name)
                if value != getattr(Simulate, name):
                    raise ValueError(
                        f"{name} is {_text(value)}, and {source} not depend on it; leave it out, "
                        "or give a chip in its place"
                    )
        self._check_mesh()
        if self.acceptance is not None and not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(
                f"acceptance is {self.acceptance}; it must be a probability, from 0 to 1"
            )
        if self.draft_s < 0:
            raise ValueError(f"draft_s is {self.draft_s}; it must be at least 0 seconds")
        for name in ("bandwidth_share", "rate_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be above 0 and at most 1"
                )
        if self.host_s < 0:
            raise ValueError(f"host_s is {self.host_s}; it must be at least 0 seconds")

    def _check_mesh(self) -> None:
        if self.mesh is None:
            if self.hop_s is not None:
                raise ValueError(
                    f"hop_s is {self.hop_s}, and without a mesh nothing is exchanged; set mesh, "
                    "or leave it out"
                )
            return
        if self.hop_s is not None and self.hop_s < 0:
            raise ValueError(f"hop_s is {self.hop_s}; it must be at least 0 seconds")
        if self.chips != 1:
            raise ValueError(
                f"chips is {self.chips} and mesh is {_text(self.mesh)}; leave chips out"
            )
        if self.mesh.size > 1:
            check_network(self.chip_limits.network, self.mesh.size, self.chip_name)

    @property
    def chip_limits(self) -> Chip:
        """The limits of its chip; it must have one."""
        assert self.chip is not None, "`__post_init__` checks it"
        return self.chip.limits if isinstance(self.chip, OwnChip) else CHIPS[self.chip]

    @property
    def chip_name(self) -> str:
        """The name of its chip; "" without one."""
        return self.chip.name if isinstance(self.chip, OwnChip) else self.chip or ""

    @property
    def name(self) -> str:
        """The name of the device in a summary."""
        if self.chip is None:
            if self.fit is not None:
                source = "fitted"
            elif self.cost is not None:
                source = self.cost.rpartition("/")[2]
            else:
                source = self.profile or "constant step"
            return f"{SIMULATED}, {source}"
        if self.mesh is not None:
            return f"{SIMULATED} {self.chip_name}, {_text(self.mesh)}"
        return f"{SIMULATED} {self.chip_name}" + (f" x {self.chips}" if self.chips > 1 else "")

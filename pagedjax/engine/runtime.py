"""`Runtime`: what an engine's steps use and never change: model, configuration, policy and compiled
programs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from tqdm import tqdm

from pagedjax.device import attention, cache, extras, linear, memory
from pagedjax.device.batch import (
    Batch,
    DraftBatch,
    DraftShape,
    SamplingBatch,
    Shapes,
    StepShape,
    blank_sampling,
    joined,
)
from pagedjax.device.checks import shapes_of
from pagedjax.device.draft_model import DraftModel
from pagedjax.device.extras import Drafted
from pagedjax.device.host_swap import SwapPrograms
from pagedjax.device.layer_groups import LayerGroups
from pagedjax.device.models import Model, for_context
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.row_features import RowChain, RowFeature, find
from pagedjax.device.row_features import chain as chain_of
from pagedjax.device.sampling import device_tile, prompt_logprobs_bytes
from pagedjax.device.side_outputs import NOTHING, SideOutputs
from pagedjax.device.step import BoundDraftModel, copy_blocks, make_draft, make_step
from pagedjax.engine import adapters, compilations, drafters, kept_programs, programs
from pagedjax.engine.adapters import AdapterTable
from pagedjax.engine.background import BackgroundPrograms
from pagedjax.engine.drafters import Drafter
from pagedjax.engine.geometry import Geometry, devices_of, geometry
from pagedjax.engine.pack import Sources, pack
from pagedjax.engine.requests import RequestRules
from pagedjax.engine.resolve import free_memory, resolve, shapes
from pagedjax.host import policies
from pagedjax.host.policies import Policy
from pagedjax.host.state import SchedulerConfig, limits
from pagedjax.host.types import EMPTY_PLAN
from pagedjax.host.views import sequences_that_fit
from pagedjax.options.config import EngineConfig, Resolved
from pagedjax.weights.trained import on_mesh, replacement_state, with_linear

# Programs that move blocks move a fixed number, with the trash block as padding. A branch copies
# one block now and then; a swapped sequence moves all of its blocks.
COPIES = 8  # the blocks of one copy on the device
SWAPPED_BYTES = 16 * memory.MIB  # the bytes of one transfer to or from the host


@dataclass(frozen=True)
class Runtime:
    """Everything that `step` needs beside the state. Another model's parameters make another
    runtime (`with_params`).

    config: nothing in it is left open.
    leaves: the model's parameters as a step takes them, and behind them the draft model's.
    chain: the sampling options, in their order.
    blanks: by the number of samples, their arrays if no sample uses an option, on the device.
    programs: by the shape of a step, its compiled program; by a `DraftShape`, the draft model's.
    prompt_programs: by the shape of a step that gives log-probabilities of prompt tokens. It is
        compiled when a step first needs it, because few requests want them.
    side_programs: by what steps return beside samples, and by the shape of a step, its program. It
        is compiled when a step first needs it.
    geometry: the shapes of the cache's blocks, and who sees them.
    drafter: None without speculation.
    draft_model: None unless the drafter is a model.
    undrafted: by the number of samples, the `Drafted` of a step without drafts; none unless the
        rule is "rejection".
    adapters: None without `enable_lora`. Another table makes another runtime.
    sends_ahead: whether programs take tokens of the program before, which the host does not know
        yet.
    spare: places behind the known tokens of a sequence, for tokens that are sent ahead unknown, and
        for drafts.
    copy: the compiled copy of COPIES blocks on the device.
    swap: the compiled transfers to and from the host; None without swapping.
    startup: seconds by stage, the number of programs, and how many of them came from the cache on
        disk.
    """

    model: Model
    config: Resolved
    eos_token_ids: tuple[int, ...]
    policy: Policy
    leaves: tuple[Any, ...]
    shapes: Shapes
    chain: RowChain
    blanks: Mapping[int, SamplingBatch]
    programs: Mapping[StepShape | DraftShape, Any]
    prompt_programs: programs.LazyPrograms
    side_programs: programs.SidePrograms
    copy: Any
    swap: SwapPrograms | None
    memory: memory.MemoryReport
    geometry: Geometry
    drafter: Drafter | None
    draft_model: DraftModel | None
    undrafted: Mapping[int, Drafted]
    adapters: AdapterTable | None
    sends_ahead: bool
    spare: int
    startup: Mapping[str, Any]

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return _limits(self.config, self.geometry)

    @property
    def cache_shapes(self) -> cache.KVCache:
        return self.geometry.cache_shapes(self.config.num_blocks, self.model)

    @cached_property
    def request_rules(self) -> RequestRules:
        """What `prepare` must know of this engine."""
        return RequestRules(
            vocab_size=self.model.config.vocab_size,
            caching=self.config.enable_prefix_caching,
            eos_token_ids=self.eos_token_ids,
            spare=self.spare,
            chain=self.chain,
        )

    def new_cache(self) -> cache.KVCache:
        config = self.config
        return self.geometry.new_cache(config.num_blocks, self.model, config.attention_impl)

    def with_params(self, tree: Any) -> Runtime:
        """The runtime of the same model with other parameters, which are copied.

        Raises:
            ValueError: a parameter differs in name, shape or dtype; all of them are named.
        """
        model = self.model._replace(params=replacement_state(self.model, tree))
        return replace(self, model=model, leaves=_leaves(model, self.draft_model))


def with_leaves(runtime: Runtime, model: Sequence[Any], draft: Sequence[Any]) -> Runtime:
    """The runtime with these leaves as parameters of its model and its draft model; nothing is
    copied or checked.
    """
    structure = jax.tree.structure(runtime.model.params)
    new_model = runtime.model._replace(params=structure.unflatten(model))
    draft_model = runtime.draft_model
    if draft_model:
        structure = jax.tree.structure(draft_model.params)
        draft_model = draft_model._replace(params=structure.unflatten(draft))
    leaves = _leaves(new_model, draft_model)
    return replace(runtime, model=new_model, draft_model=draft_model, leaves=leaves)


def build(
    model: Model,
    config: EngineConfig,
    eos_token_ids: Sequence[int] = (),
    *,
    row_features: Sequence[RowFeature] = (),
    draft_model: DraftModel | None = None,
    progress: bool = False,
) -> Runtime:
    """Resolve the configuration, compile the programs, and settle the number of blocks.

    Compiling needs the shapes of a cache and not its memory, which `new_cache` allocates when the
    number of blocks is known to fit.

    Args:
        row_features: sampling options beside the built-in ones and those that the configuration
            names.
        draft_model: what drafts on the device; None if nothing does.

    Raises:
        ValueError: see `resolve`, and two sampling options of one name.
    """
    policy = policies.find(config.policy)
    chain = chain_of((*map(find, config.row_features), *row_features), model.config.vocab_size)
    linear_impl = cast("str | None", config.linear_impl)  # a mapping is a name by now
    model = with_linear(on_mesh(model, config), linear_impl)
    model = for_context(model, config.max_model_len or model.config.max_len)
    if draft_model:
        draft_model = draft_model._replace(params=_on_devices(draft_model.params, model))
    device_memory = free_memory(model)  # before the cache takes its share
    resolved = resolve(config, model, device_memory, draft=draft_model)
    sizes = shapes(resolved, model, draft_model)
    leaves = _leaves(model, draft_model)
    table = adapters.init(model, resolved)
    inputs = _blank_inputs(
        sizes, resolved, model, chain, sizes.draft_shapes if draft_model else (), table
    )
    device_memory = device_memory._replace(free=max(device_memory.free - inputs.nbytes, 0))
    # what compiles later keeps no parameters: `update_params` replaces them, and `sleep` frees
    # their memory
    draft_shapes = None
    if draft_model is not None:
        draft_shapes = draft_model._replace(params=shapes_of(draft_model.params))
    spec = ProgramSpec(
        model=model._replace(params=shapes_of(model.params)),
        draft_model=draft_shapes,
        config=resolved,
        sizes=sizes,
        geometry=geometry(
            resolved, model, resolved.kv_cache_dtype, resolved.attention_impl, draft_model
        ),
        chain=chain,
        inputs=inputs,
        leaves=shapes_of(leaves),
    )

    def settle(program: Any) -> Resolved:
        """The configuration with the blocks that fit beside the largest program."""
        return resolve(config, model, device_memory, _activations(program, sizes), draft_model)

    compiled = _compile(spec, settle, progress=progress)
    report = _memory_report(device_memory, compiled, spec, weights=memory.nbytes(leaves))
    resolved = compiled.config
    if progress:
        _print_choices(model, resolved, report)
    return Runtime(
        model=model,
        eos_token_ids=tuple(eos_token_ids),
        policy=policy,
        leaves=leaves,
        shapes=sizes,
        chain=chain,
        blanks=inputs.sampling,
        memory=report,
        geometry=spec.geometry,
        drafter=drafters.find(resolved.speculative) if resolved.speculative else None,
        draft_model=draft_model,
        undrafted=inputs.drafted,
        adapters=table,
        sends_ahead=_sends_ahead(resolved),
        spare=max(_steps_ahead(resolved), sizes.drafts),
        **compiled._asdict(),
    )


def _sends_ahead(config: Resolved) -> bool:
    """`Runtime.sends_ahead`."""
    return config.lookahead > 0 or config.late_stops


def _steps_ahead(config: Resolved) -> int:
    """The most tokens of a sequence that are computed and not known on the host."""
    programs = config.lookahead + config.late_stops + 1
    return programs * config.decode_span - 1


class ProgramSpec(NamedTuple):
    """What the programs of an engine are compiled from.

    model, draft_model, leaves: with shapes in the place of parameters.
    """

    model: Model
    draft_model: DraftModel | None
    config: Resolved
    sizes: Shapes
    geometry: Geometry
    chain: RowChain
    inputs: BlankInputs
    leaves: Sequence[Any]


class CompiledPrograms(NamedTuple):
    """The programs of an engine. Fields as in `Runtime`."""

    config: Resolved
    programs: Mapping[StepShape | DraftShape, Any]
    prompt_programs: programs.LazyPrograms
    side_programs: programs.SidePrograms
    copy: Any
    swap: SwapPrograms | None
    startup: Mapping[str, Any]


def _compile(
    spec: ProgramSpec, settle: Callable[[Any], Resolved], *, progress: bool
) -> CompiledPrograms:
    """Compile what an engine's `compilation` compiles at its start.

    Args:
        settle: as in `programs.compile_all`.
    """
    counts_before = compilations.counts()
    started = time.perf_counter()
    config = spec.config
    sizes = spec.sizes
    compiler = partial(_compiler, spec)
    compile_one = compiler()
    if config.compilation == "lazy":
        steps = programs.LazyPrograms(compile_one, config)
    else:
        background = config.compilation == "background"
        # the largest step is the last one
        shapes_now = sizes.steps[-1:] if background else (*spec.inputs.drafts, *sizes.steps)
        steps, config = programs.compile_all(
            compile_one, shapes_now, config, settle, progress=progress
        )
        if background:
            on_disk = (compilations.counts() - counts_before).cached > 0
            steps = BackgroundPrograms(compile_one, config, steps, sizes, on_disk)
    copy, swap = _block_programs(config, spec.model, sizes, spec.geometry)
    counts = compilations.counts() - counts_before
    seconds = time.perf_counter() - started
    return CompiledPrograms(
        config=config,
        programs=steps,
        prompt_programs=programs.LazyPrograms(compile_one, config),
        side_programs=programs.SidePrograms(compiler, config),
        copy=copy,
        swap=swap,
        startup={"compile": seconds, "warmup": 0.0, **counts._asdict()},
    )


def _memory_report(
    device_memory: memory.DeviceMemory,
    compiled: CompiledPrograms,
    spec: ProgramSpec,
    *,
    weights: int,
) -> memory.MemoryReport:
    """Where the memory of the device goes, in bytes. `weights` is the size of all parameters."""
    config = compiled.config
    activations = None
    if config.compilation != "lazy":
        activations = _activations(compiled.programs[spec.sizes.steps[-1]], spec.sizes)
    return memory.report(
        device_memory,
        weights=weights,
        activations=activations,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        block_bytes=spec.geometry.block_bytes,
        max_model_len=config.max_model_len,
        swap_space_gib=config.swap_space_gib if config.preemption == "swap" else 0,
        host_block_bytes=spec.geometry.host_block_bytes,
        sequences=sequences_that_fit(_limits(config, spec.geometry)),
    )


def _activations(program: Any, sizes: Shapes) -> int:
    """Bytes that a step needs besides its arguments: those of the program of the largest step, and
    what log-probabilities of prompt tokens add to it, whose program is compiled later.
    """
    prompt_bytes = prompt_logprobs_bytes(sizes.tokens[-1], sizes.vocab_size)
    return memory.activations_peak(program) + prompt_bytes


def _block_programs(
    config: Resolved, model: Model, sizes: Shapes, cache_geometry: Geometry
) -> tuple[Any, SwapPrograms | None]:
    """The program that copies blocks, and those that swap blocks if the engine swaps."""
    pages = cache_geometry.cache_shapes(config.num_blocks, model)
    copy: Any = copy_blocks
    if config.compilation != "lazy":
        copy = copy_blocks.lower(pages, *padded_pairs((), COPIES)).compile()
    if config.preemption != "swap":
        return copy, None
    blocks = SWAPPED_BYTES * cache_geometry.groups // cache_geometry.host_block_bytes
    return copy, SwapPrograms(pages, max(1, min(blocks, sizes.table_width)))


def _print_choices(model: Model, config: Resolved, report: memory.MemoryReport) -> None:
    """Tell the user where the model is, which kernels serve it, and where the memory goes."""
    placement = f"{model.placement}\n" if model.placement else ""
    attention_name = getattr(config.attention_impl, "name", config.attention_impl)
    impls = f"attention {attention_name!r}, products {config.linear_impl!r}"
    if any(kind.mixer for kind in model.config.kinds):
        impls += f", states {config.state_impl!r}"
    tqdm.write(f"{placement}{impls}\n{report}", file=sys.stderr)


class BlankInputs(NamedTuple):
    """What programs get where a step has nothing to give.

    sampling, drafted: by the number of samples, as `blanks` and `undrafted` of a runtime.
    steps, drafts: whole batches that compute nothing, by the shape of their program.
    nbytes: bytes of device memory that inputs take: all blanks, a largest batch, and the
        probabilities of drafts.
    """

    sampling: Mapping[int, SamplingBatch]
    drafted: Mapping[int, Drafted]
    steps: Mapping[StepShape, Batch]
    drafts: Mapping[DraftShape, DraftBatch]
    nbytes: int


def _blank_inputs(
    sizes: Shapes,
    config: Resolved,
    model: Model,
    chain: RowChain,
    draft_shapes: Sequence[DraftShape],
    table: AdapterTable | None,
) -> BlankInputs:
    samples = {shape.samples for shape in sizes.steps}
    rows = samples | {shape.rows for shape in draft_shapes}
    sampling = {r: _on_devices(blank_sampling(r, chain), model) for r in rows}
    rejection = config.speculative is not None and config.speculative.rule == "rejection"
    drafted = {r: _undrafted(sizes, r, model) for r in samples} if rejection else {}
    sources = Sources(drafted, table, _sends_ahead(config))
    steps = {shape: blank_batch(sizes, shape, sampling, chain, sources) for shape in sizes.steps}
    drafts = {shape: _blank_drafts(sizes, shape, sampling) for shape in draft_shapes}
    on_device = [blank for r, blank in drafted.items() if r <= sizes.max_seqs]
    # a step may have its own arrays beside the blanks
    nbytes = memory.nbytes((sampling, on_device)) + memory.nbytes(steps[sizes.steps[-1]])
    nbytes += _draft_probs_bytes(sizes, draft_shapes)
    return BlankInputs(sampling, drafted, steps, drafts, nbytes)


def _draft_probs_bytes(sizes: Shapes, draft_shapes: Sequence[DraftShape]) -> int:
    """Bytes of the probabilities of every draft, if the draft model's program keeps them."""
    if not sizes.keeps_probs:
        return 0
    draft_rows = max(shape.rows for shape in draft_shapes)
    float32_bytes = 4
    return float32_bytes * sizes.drafts * draft_rows * sizes.vocab_size


def _compiler(
    spec: ProgramSpec, side_outputs: SideOutputs = NOTHING
) -> Callable[[StepShape | DraftShape, Resolved], Any]:
    """(shape of a program, configuration with the number of blocks) -> the compiled program."""
    model = spec.model
    config = spec.config
    sizes = spec.sizes
    kinds = {
        "invariant": config.batch_invariant,
        "drafts": config.speculative is not None,
        "states": config.state_impl,
    }
    attend = attention.attend(config.attention_impl, model.config.attn_scale, **kinds)
    bound = _bound_draft_model(spec.draft_model, config.attention_impl, sizes.draft_layout)
    tile = device_tile()
    step = make_step(model, attend, config.seed, tile, spec.chain, bound, side_outputs=side_outputs)
    draft: Any = None
    if bound:
        draft = make_draft(
            model, bound, sizes.drafts, config.seed, tile, spec.chain, probs=sizes.keeps_probs
        )
    xla_options = programs.compiler_options(jax.default_backend())
    facts = _facts(spec, bound, attend, side_outputs)
    if facts is not None:
        facts = (*facts, config.seed, tile, kinds, side_outputs, sorted(xla_options.items()))
    device = devices_of(model)[0]

    def compile_one(shape: StepShape | DraftShape, settled: Resolved) -> Any:
        pages = spec.geometry.cache_shapes(settled.num_blocks, model)
        jitted: Any
        if isinstance(shape, DraftShape):
            jitted = draft
            kind = ("draft", sizes.drafts, sizes.keeps_probs)
            batch = _blank_draft(spec, shape)
        else:
            jitted = step
            kind = ("step",)
            batch = joined(_blank_step(spec, shape))
        arguments = spec.leaves, pages, batch
        return kept_programs.program(
            None if facts is None else (*facts, *kind),
            arguments,
            device,
            lambda: jitted.lower(*arguments).compile(xla_options),
        )

    return compile_one


def _blank_step(spec: ProgramSpec, shape: StepShape) -> Batch:
    """A batch that computes nothing, of the shape of a program."""
    batch = spec.inputs.steps[shape._replace(prompt_logprobs=False, plain=False, logprobs=True)]
    sampling = batch.sampling.plain() if shape.plain else batch.sampling
    if not shape.logprobs:
        sampling = sampling.without_logprobs()
    batch = batch._replace(sampling=sampling)
    if shape.prompt_logprobs:
        batch = batch._replace(targets=np.full(shape.tokens, -1, np.int32))
    return batch


def _blank_draft(spec: ProgramSpec, shape: DraftShape) -> DraftBatch:
    """A drafter's batch without drafts, of the shape of a program."""
    batch = spec.inputs.drafts[replace(shape, plain=False)]
    return batch._replace(sampling=batch.sampling.plain()) if shape.plain else batch


def _bound_draft_model(
    draft_model: DraftModel | None, attention_impl: str, layout: LayerGroups | None
) -> BoundDraftModel | None:
    if draft_model is None:
        return None
    attend = attention.attend(attention_impl, draft_model.layers.attn_scale)
    return BoundDraftModel(draft_model, attend, layout)


def _facts(
    spec: ProgramSpec,
    bound: BoundDraftModel | None,
    attend: attention.Attend,
    side_outputs: SideOutputs,
) -> tuple[Any, ...] | None:
    """What a program is made from beside the options of `_compiler`, for `kept_programs`; None if
    not all of it can be told.
    """
    model = spec.model
    chain = spec.chain
    # the code of an output of samples may be a user's, and so may the code of a batch's array
    arrays = [extra for batch in spec.inputs.steps.values() for extra in batch.extras]
    if side_outputs.samples or any(type(extra).__module__ != extras.__name__ for extra in arrays):
        return None
    if not isinstance(attend, attention.Bound) or model.placement or jax.process_count() > 1:
        return None
    configs = [model.config]
    if bound:
        configs.append(bound.model.layers)
    if not _is_built_in(attend, chain, configs):
        return None
    drafter = None
    if bound:
        # functions are told by their names, because their `str` differs between processes
        without_functions = bound.model._replace(params=None, observe=None, next_logits=None)
        drafter = (
            *without_functions,
            bound.model.observe.__qualname__,
            bound.model.next_logits.__qualname__,
            bound.attend.scale,
            bound.layout,
        )
    features = [feature.name for feature in chain.features]
    names = attend.impl.name, model.config.linear, *features
    return model.config, model.graphdef, model.dtype, drafter, attend.scale, names


def _is_built_in(
    attend: attention.Bound, chain: RowChain, configs: Sequence[DecoderConfig]
) -> bool:
    """Whether attention, products, layers and sampling options are the package's own, and none of a
    user's file.
    """
    built_in = all(config.block is None and linear.is_built_in(config.linear) for config in configs)
    return built_in and attention.is_built_in(attend) and chain.is_built_in


def warmed_up(runtime: Runtime, pages: cache.KVCache) -> tuple[Runtime, cache.KVCache]:
    """Run the smallest step and the draft model's programs once, so that the first request runs
    warm code. Unless all programs are compiled, nothing runs, because the first answer would come
    later.
    """
    started = time.perf_counter()
    if runtime.config.compilation == "eager":
        shape = runtime.shapes.steps[0]
        sources = Sources(runtime.undrafted, runtime.adapters, runtime.sends_ahead)
        blank = blank_batch(runtime.shapes, shape, runtime.blanks, runtime.chain, sources)
        pages, output = runtime.programs[shape](runtime.leaves, pages, joined(blank))
        jax.block_until_ready(output)
        # otherwise the first times of drafts would be too long
        draft_shapes = runtime.shapes.draft_shapes if runtime.draft_model else ()
        for draft in draft_shapes:
            batch = _blank_drafts(runtime.shapes, draft, runtime.blanks)
            batch = batch._replace(counts=np.ones(draft.rows, np.int32))  # into the trash block
            pages, output = runtime.programs[draft](runtime.leaves, pages, batch)
            jax.block_until_ready(output)
    startup = {**runtime.startup, "warmup": time.perf_counter() - started}
    return replace(runtime, startup=startup), pages


def padded_pairs(pairs: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """[2, size] int32: the blocks to copy from and to. The padding copies the trash block onto
    itself.
    """
    padded = np.zeros((2, size), np.int32)
    if pairs:
        padded[:, : len(pairs)] = np.array(pairs, np.int32).T
    return padded


def _leaves(model: Model, draft: DraftModel | None) -> tuple[Any, ...]:
    return (*model.leaves, *draft.leaves) if draft else model.leaves


def _limits(config: Resolved, cache_geometry: Geometry) -> SchedulerConfig:
    sizes = limits(config, cache_geometry.host_blocks(config), cache_geometry.views)
    return sizes._replace(shares_filling=not cache_geometry.keeps_states)


def _on_devices(tree: Any, model: Model) -> Any:
    """The arrays on the model's devices, whole on each."""
    return model.placement.copies(tree) if model.placement else jax.device_put(tree)


def _undrafted(sizes: Shapes, samples: int, model: Model) -> Drafted:
    """A `Drafted` without drafts, on the device. A step with more samples than rows always has
    drafts, so its `Drafted` is needed for its shapes alone and stays on the host.
    """
    probs = None
    if sizes.keeps_probs:
        probs = np.broadcast_to(np.float32(0), (samples, sizes.vocab_size))
    blank = Drafted(np.full(samples, -1, np.int32), probs)
    return blank if samples > sizes.max_seqs else _on_devices(blank, model)


def _blank_drafts(
    sizes: Shapes, shape: DraftShape, blanks: Mapping[int, SamplingBatch]
) -> DraftBatch:
    """A drafter's batch without drafts."""
    zeros = np.zeros(shape.rows, np.int32)
    table = np.zeros((shape.rows, sizes.table_width), np.int32)
    groups = len(sizes.draft_layout.windows) if sizes.draft_layout else 1
    return DraftBatch(
        tokens=zeros,
        positions=zeros,
        counts=zeros,
        block_tables=table,
        sampling=blanks[shape.rows].without_logprobs(),
        samples=np.zeros(shape.samples, np.int32),
        group_tables=(table,) * (groups - 1),
    )


def blank_batch(
    sizes: Shapes,
    shape: StepShape,
    blanks: Mapping[int, SamplingBatch],
    chain: RowChain,
    sources: Sources,
) -> Batch:
    """A step of a shape, which is not plain, that computes nothing."""
    buckets = (shape.tokens,)
    one_bucket = sizes._replace(
        tokens=buckets, decode_buckets=buckets if shape.decodes_alone else (), plain=False
    )
    if shape.span > 1:
        sources = sources._replace(span=())
    return pack(EMPTY_PLAN, {}, one_bucket, blanks, chain, sources, samples=shape.samples)

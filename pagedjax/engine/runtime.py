"""`Runtime`: what an engine's steps use and never change: model, configuration, policy and compiled
programs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from immutables import Map
from tqdm import tqdm

from pagedjax.config import EngineConfig, Resolved
from pagedjax.device import attention, cache, linear, memory
from pagedjax.device.batch import (
    Batch,
    DraftBatch,
    Drafted,
    DraftShape,
    SamplingBatch,
    Shapes,
    StepShape,
    blank_feed,
    blank_sampling,
    joined,
)
from pagedjax.device.checks import shapes_of
from pagedjax.device.draft_model import DraftModel
from pagedjax.device.host_swap import SwapPrograms
from pagedjax.device.models import Model
from pagedjax.device.models.decoder import DecoderConfig
from pagedjax.device.row_features import RowChain, RowFeature, find
from pagedjax.device.row_features import chain as chain_of
from pagedjax.device.sampling import device_tile
from pagedjax.device.step import BoundDraftModel, copy_blocks, make_draft, make_step, zeros
from pagedjax.device.taps import NOTHING, Wanted
from pagedjax.engine import adapters, compilations, drafters, kept_programs, programs
from pagedjax.engine.adapters import AdapterTable
from pagedjax.engine.background import BackgroundPrograms
from pagedjax.engine.drafters import Drafter
from pagedjax.engine.pack import pack
from pagedjax.engine.resolve import (
    block_shape,
    devices_of,
    free_memory,
    groups,
    host_block_bytes,
    host_blocks,
    layers_in_groups,
    resolve,
    selection,
    shapes,
    views,
)
from pagedjax.host import policies
from pagedjax.host.policies import Policy
from pagedjax.host.state import SchedulerConfig, limits
from pagedjax.host.types import EMPTY_PLAN
from pagedjax.host.views import sequences_that_fit
from pagedjax.weights.trained import on_mesh, replaced, with_linear

# Programs that move blocks move a fixed number, with the trash block as padding. A branch copies
# one block now and then; a swapped sequence moves all of its blocks.
COPIES = 8  # blocks of one copy on the device
SWAPPED_BYTES = 16 * memory.MIB  # of one transfer to or from the host


@dataclass(frozen=True)
class Runtime:
    """Everything that `step` needs beside the state. Another model's parameters make another
    runtime (`with_params`).

    config: nothing in it is left open.
    leaves: the model's parameters as a step takes them, and behind them the draft model's.
    chain: the sampling options, in their order.
    blanks: by their number, the arrays of samples that use no option, on the device.
    programs: by the shape of a step, its compiled program; by a `DraftShape`, the draft model's.
    tapped: by what steps return beside samples, and by the shape of a step, its program. It is
        compiled when a step first needs it.
    drafter: None without speculation.
    draft_model: None unless the drafter is a model.
    undrafted: by the number of samples, the `Drafted` of a step without drafts; none unless the
        rule is "rejection".
    adapters: None without `enable_lora`. Another table makes another runtime.
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
    tapped: programs.TappedPrograms
    copy: Any
    swap: SwapPrograms | None
    memory: memory.MemoryReport
    drafter: Drafter | None
    draft_model: DraftModel | None
    undrafted: Mapping[int, Drafted]
    adapters: AdapterTable | None
    spare: int
    startup: Mapping[str, Any]

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return _limits(self.config, self.model, self.draft_model)

    @property
    def cache_shapes(self) -> cache.KVCache:
        return _cache_shapes(self.config, self.model, self.draft_model)

    def new_cache(self) -> cache.KVCache:
        sizes = _block(self.config, self.model, self.draft_model)
        sharding = _cache_sharding(self.model)
        return cache.init(
            blocks=self.scheduler_config.num_blocks,
            sharding=sharding,
            zeros=zeros if sharding else jnp.zeros,
            pages=None if sharding else attention.pages_of(self.config.attention_impl),
            **sizes,
        )

    def with_params(self, tree: Any) -> Runtime:
        """The runtime of the same model with other parameters, which are copied.

        Raises:
            ValueError: a parameter differs in name, shape or dtype; all of them are named.
        """
        model = self.model._replace(params=replaced(self.model, tree))
        return replace(self, model=model, leaves=_leaves(model, self.draft_model))


def with_leaves(runtime: Runtime, model: Sequence[Any], draft: Sequence[Any]) -> Runtime:
    """The runtime with these leaves as parameters of its model and its draft model; nothing is
    copied or checked.
    """
    own = runtime.model._replace(params=jax.tree.structure(runtime.model.params).unflatten(model))
    draft_model = runtime.draft_model
    if draft_model:
        draft_model = draft_model._replace(
            params=jax.tree.structure(draft_model.params).unflatten(draft)
        )
    return replace(runtime, model=own, draft_model=draft_model, leaves=_leaves(own, draft_model))


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
    chain = chain_of((*map(find, config.row_features), *row_features), model.config.vocab_size)
    model = with_linear(on_mesh(model, config), config.linear_impl)
    if draft_model:
        draft_model = draft_model._replace(params=_on_devices(draft_model.params, model))
    found = free_memory(model)  # before the cache takes its share
    resolved = resolve(config, model, found, draft=draft_model)
    sizes, leaves = shapes(resolved, model), _leaves(model, draft_model)
    table = adapters.init(model, resolved)
    inputs = _blank_inputs(
        sizes, resolved, model, chain, sizes.draft_shapes if draft_model else (), table
    )
    found = found._replace(free=max(found.free - inputs.nbytes, 0))
    before, started = compilations.counts(), time.perf_counter()
    # what compiles later keeps no parameters: `update_params` replaces them, and `sleep` frees
    # their memory
    shapeless = model._replace(params=shapes_of(model.params))
    shapeless_draft = draft_model and draft_model._replace(params=shapes_of(draft_model.params))
    compiler = partial(
        _compiler, shapeless, shapeless_draft, resolved, sizes, chain, inputs, shapes_of(leaves)
    )
    compile_one = compiler()

    def settle(program: Any) -> Resolved:
        return resolve(config, model, found, memory.activations_peak(program), draft_model)

    lazy = resolved.compilation == "lazy"
    if lazy:
        steps = programs.LazyPrograms(compile_one, resolved)
    else:
        behind = resolved.compilation == "background"
        first = sizes.steps[-1:] if behind else (*inputs.drafts, *sizes.steps)
        steps, resolved = programs.compile_all(
            compile_one, first, resolved, settle, progress=progress
        )
        if behind:
            on_disk = (compilations.counts() - before).cached > 0
            steps = BackgroundPrograms(compile_one, resolved, steps, sizes, on_disk)
    pages = _cache_shapes(resolved, model, draft_model)
    block_bytes = cache.block_bytes(**_block(resolved, model, draft_model)) * groups(sizes.layout)
    copy, swap = (
        copy_blocks if lazy else copy_blocks.lower(pages, *padded_pairs((), COPIES)).compile(),
        None,
    )
    if resolved.preemption == "swap":
        several = (
            SWAPPED_BYTES * groups(sizes.layout) // host_block_bytes(resolved, model, draft_model)
        )
        swap = SwapPrograms(pages, max(1, min(several, sizes.table_width)))
    report = memory.report(
        found,
        weights=memory.nbytes(leaves),
        activations=None if lazy else memory.activations_peak(steps[sizes.steps[-1]]),
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        block_bytes=block_bytes,
        max_model_len=resolved.max_model_len,
        swap_space_gib=resolved.swap_space_gib if resolved.preemption == "swap" else 0,
        host_block_bytes=host_block_bytes(resolved, model, draft_model),
        sequences=sequences_that_fit(_limits(resolved, model, draft_model)),
    )
    if progress:
        placed = f"{model.placement}\n" if model.placement else ""
        impls = f"attention {resolved.attention_impl!r}, products {resolved.linear_impl!r}"
        tqdm.write(f"{placed}{impls}\n{report}", file=sys.stderr)
    made, seconds = compilations.counts() - before, time.perf_counter() - started
    return Runtime(
        model=model,
        config=resolved,
        eos_token_ids=tuple(eos_token_ids),
        policy=policies.find(resolved.policy),
        leaves=leaves,
        shapes=sizes,
        chain=chain,
        blanks=inputs.sampling,
        programs=steps,
        tapped=programs.TappedPrograms(compiler, resolved),
        copy=copy,
        swap=swap,
        memory=report,
        drafter=drafters.find(resolved.speculative) if resolved.speculative else None,
        draft_model=draft_model,
        undrafted=inputs.drafted,
        adapters=table,
        spare=max(resolved.lookahead, sizes.drafts),
        startup={"compile": seconds, "warmup": 0.0, **made._asdict()},
    )


class BlankInputs(NamedTuple):
    """What programs get where a step has nothing to give.

    sampling, drafted: by the number of samples, as `blanks` and `undrafted` of a runtime.
    steps, drafts: whole batches that compute nothing, by the shape of their program.
    nbytes: of the device's memory that inputs take: all blanks, a largest batch, and the
        probabilities of drafts.
    """

    sampling: Mapping[int, SamplingBatch]
    drafted: Mapping[int, Drafted]
    steps: Mapping[StepShape, Batch]
    drafts: Mapping[DraftShape, DraftBatch]
    nbytes: int


def _blank_inputs(
    sizes: Shapes,
    c: Resolved,
    model: Model,
    chain: RowChain,
    draft_shapes: Sequence[DraftShape],
    table: AdapterTable | None,
) -> BlankInputs:
    samples = {shape.samples for shape in sizes.steps}
    several = samples | {shape.rows for shape in draft_shapes}
    sampling = {r: _on_devices(blank_sampling(r, chain), model) for r in several}
    rejection = c.speculative is not None and c.speculative.rule == "rejection"
    drafted = {r: _undrafted(sizes, r, model) for r in samples} if rejection else {}
    fixed = sampling, c.lookahead > 0, chain, drafted, table
    steps = {shape: _blank_batch(sizes, shape, *fixed) for shape in sizes.steps}
    drafts = {shape: _blank_drafts(sizes, shape, sampling) for shape in draft_shapes}
    kept = [one for r, one in drafted.items() if r <= sizes.max_seqs]
    # a step may replace the blanks
    nbytes = memory.nbytes((sampling, kept)) + memory.nbytes(steps[sizes.steps[-1]])
    if sizes.keeps_probs:  # the draft model's program keeps those of every draft
        nbytes += 4 * sizes.drafts * max(shape.rows for shape in draft_shapes) * sizes.vocab_size
    return BlankInputs(sampling, drafted, steps, drafts, nbytes)


def _compiler(
    model: Model,
    draft_model: DraftModel | None,
    c: Resolved,
    sizes: Shapes,
    chain: RowChain,
    inputs: BlankInputs,
    leaves: Sequence[Any],
    wanted: Wanted = NOTHING,
) -> Callable[[StepShape | DraftShape, Resolved], Any]:
    """(shape of a program, configuration with the number of blocks) -> the compiled program."""
    kinds = {"invariant": c.batch_invariant, "drafts": c.speculative is not None}
    attend = attention.attend(c.attention_impl, model.config.attn_scale, **kinds)
    bound = None
    if draft_model:
        bound = BoundDraftModel(
            draft_model, attention.attend(c.attention_impl, draft_model.layers.attn_scale)
        )
    common = c.seed, device_tile(), chain
    step = make_step(model, attend, *common, bound, wanted=wanted)
    draft = (
        make_draft(model, bound, sizes.drafts, *common, probs=sizes.keeps_probs) if bound else None
    )
    xla = programs.compiler_options(jax.default_backend())
    facts = _facts(model, bound, attend, (*common, kinds, wanted, sorted(xla.items())))
    (device, *_) = devices_of(model)

    def compile_one(shape: StepShape | DraftShape, settled: Resolved) -> Any:
        pages = _cache_shapes(settled, model, draft_model)
        jitted: Any
        if isinstance(shape, DraftShape):
            jitted, kind, batch = (
                draft,
                ("draft", sizes.drafts, sizes.keeps_probs),
                inputs.drafts[shape],
            )
        else:
            jitted, kind, batch = step, ("step",), joined(inputs.steps[shape])
        arguments = leaves, pages, batch
        return kept_programs.program(
            facts and (*facts, *kind),
            arguments,
            device,
            lambda: jitted.lower(*arguments).compile(xla),
        )

    return compile_one


def _facts(
    model: Model, bound: BoundDraftModel | None, attend: attention.Attend, options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """What programs are made from, for `kept_programs`; None if not all of it can be told.

    options: as `_compiler` has them: seed, tile, chain and so on.
    """
    seed, tile, chain, *rest = options
    if not isinstance(attend, attention.Bound) or model.placement or jax.process_count() > 1:
        return None
    configs = [model.config, *([bound.model.layers] if bound else [])]
    if not _is_built_in(attend, chain, configs):
        return None
    drafter = None
    if bound:
        names = bound.model.observe.__qualname__, bound.model.next_logits.__qualname__
        drafter = (
            *bound.model._replace(params=None, observe=None, next_logits=None),
            *names,
            bound.attend.scale,
        )
    names = attend.impl.name, model.config.linear, *[feature.name for feature in chain.features]
    return (
        model.config,
        model.graphdef,
        model.dtype,
        drafter,
        attend.scale,
        names,
        seed,
        tile,
        *rest,
    )


def _is_built_in(
    attend: attention.Bound, chain: RowChain, configs: Sequence[DecoderConfig]
) -> bool:
    """Whether attention, products, layers and sampling options are the package's own, and none of a
    user's file.
    """
    built_in = all(config.block is None and linear.is_built_in(config.linear) for config in configs)
    return built_in and attention.is_built_in(attend) and chain.is_built_in


def warmed_up(runtime: Runtime, pages: cache.KVCache) -> tuple[Runtime, cache.KVCache]:
    """Run the smallest step once, so that the first request runs warm code, and the draft model's
    programs. Nothing runs unless all programs are there: the first answer would come later."""
    started = time.perf_counter()
    if runtime.config.compilation == "eager":
        shape = runtime.shapes.steps[0]
        fixed = (
            runtime.blanks,
            runtime.config.lookahead > 0,
            runtime.chain,
            runtime.undrafted,
            runtime.adapters,
        )
        blank = _blank_batch(runtime.shapes, shape, *fixed)
        pages, output = runtime.programs[shape](runtime.leaves, pages, joined(blank))
        jax.block_until_ready(output)
        # else their first times are too long
        for draft in runtime.shapes.draft_shapes if runtime.draft_model else ():
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
    found = np.zeros((2, size), np.int32)
    if pairs:
        found[:, : len(pairs)] = np.array(pairs, np.int32).T
    return found


def _leaves(model: Model, draft: DraftModel | None) -> tuple[Any, ...]:
    return (*model.leaves, *draft.leaves) if draft else model.leaves


def _block(c: Resolved, model: Model, draft: DraftModel | None) -> dict[str, Any]:
    options = draft, layers_in_groups(c, model), selection(c, model)
    return block_shape(c.block_size, model, c.kv_cache_dtype, c.attention_impl, *options)


def _limits(c: Resolved, model: Model, draft: DraftModel | None) -> SchedulerConfig:
    return limits(c, host_blocks(c, model, draft), views(c, model))


def _cache_shapes(c: Resolved, model: Model, draft: DraftModel | None) -> cache.KVCache:
    blocks = (c.num_blocks + 1) * groups(layers_in_groups(c, model)) - 1  # as `limits` has it
    return cache.shapes(blocks=blocks, sharding=_cache_sharding(model), **_block(c, model, draft))


def _cache_sharding(model: Model) -> cache.CacheSharding | None:
    return model.placement.cache_sharding if model.placement else None


def _on_devices(tree: Any, model: Model) -> Any:
    """The arrays on the model's devices, whole on each."""
    return model.placement.copies(tree) if model.placement else jax.device_put(tree)


def _undrafted(sizes: Shapes, samples: int, model: Model) -> Drafted:
    """No drafts. On the device, except for a step with more samples than rows: it has drafts, so
    only shapes matter.
    """
    tokens, shape = np.full(samples, -1, np.int32), (samples, sizes.vocab_size)
    probs = np.broadcast_to(np.float32(0), shape) if sizes.keeps_probs else None
    return (
        Drafted(tokens, probs)
        if samples > sizes.max_seqs
        else _on_devices(Drafted(tokens, probs), model)
    )


def _blank_drafts(
    sizes: Shapes, shape: DraftShape, blanks: Mapping[int, SamplingBatch]
) -> DraftBatch:
    """A drafter's batch without drafts."""
    zeros = np.zeros(shape.rows, np.int32)
    tables, samples = (
        np.zeros((shape.rows, sizes.table_width), np.int32),
        np.zeros(shape.samples, np.int32),
    )
    return DraftBatch(zeros, zeros, zeros, tables, blanks[shape.rows], samples)


def _blank_batch(
    sizes: Shapes,
    shape: StepShape,
    blanks: Mapping[int, SamplingBatch],
    ahead: bool,
    chain: RowChain,
    undrafted: Mapping[int, Drafted],
    table: AdapterTable | None,
) -> Batch:
    """A step of a shape that computes nothing."""
    alone = (shape.tokens,) if shape.decodes_alone else ()
    only = sizes._replace(tokens=(shape.tokens,), decode_buckets=alone)
    batch = pack(EMPTY_PLAN, {}, only, blanks, chain)
    if shape.samples > len(batch.last):
        last = np.zeros(shape.samples, np.int32)
        seen = batch.seen and batch.seen._replace(of_samples=last)
        batch = batch._replace(
            last=last, sampled_row=last, sampling=blanks[shape.samples], seen=seen
        )
    batch = batch._replace(drafted=undrafted.get(shape.samples))
    if table:
        batch = batch._replace(adapters=adapters.of_tokens(table, EMPTY_PLAN, Map(), shape.tokens))
    return batch._replace(feed=blank_feed(sizes, shape.tokens)) if ahead else batch

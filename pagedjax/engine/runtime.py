"""`Runtime`: what an engine's steps use and never change: model, configuration, policy and compiled programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from pagedjax.config import EngineConfig, Resolved
from pagedjax.device import attention, cache, memory
from pagedjax.device.batch import Batch, SamplingBatch, Shapes, StepShape, blank_feed, blank_sampling
from pagedjax.device.host_swap import SwapPrograms
from pagedjax.device.models import Model
from pagedjax.device.row_features import RowChain, RowFeature, chain
from pagedjax.device.sampling import device_tile
from pagedjax.device.step import copy_blocks, make_step
from pagedjax.engine import compilations, drafters, programs
from pagedjax.engine.drafters import Drafter
from pagedjax.engine.pack import pack
from pagedjax.engine.resolve import block_shape, host_blocks, resolve, shapes
from pagedjax.host import policies
from pagedjax.host.policies import Policy
from pagedjax.host.state import SchedulerConfig, limits
from pagedjax.host.types import EMPTY_PLAN
from pagedjax.weights.trained import replaced

# Programs that move blocks move a fixed number, with the trash block as padding. A branch copies one block now and
# then; a swapped sequence moves all of its blocks.
COPIES = 8  # blocks of one copy on the device
SWAPPED_BYTES = 16 * memory.MIB  # of one transfer to or from the host


@dataclass(frozen=True)
class Runtime:
    """Everything that `step` needs beside the state. Another model's parameters make another runtime (`with_params`).

    config: nothing in it is left open.
    leaves: the model's parameters as a step takes them.
    options: the sampling options, in their order.
    blanks: by their number, the arrays of samples that use no option, on the device.
    programs: by the shape of a step, its compiled program.
    drafter: None without speculation.
    spare: places behind the known tokens of a sequence, for tokens that are sent ahead unknown, and for drafts.
    copy: the compiled copy of COPIES blocks on the device.
    swap: the compiled transfers to and from the host; None without swapping.
    startup: seconds by stage, the number of programs, and how many of them came from the cache on disk.
    """

    model: Model
    config: Resolved
    eos_token_ids: tuple[int, ...]
    policy: Policy
    leaves: tuple[Any, ...]
    shapes: Shapes
    options: RowChain
    blanks: Mapping[int, SamplingBatch]
    programs: Mapping[StepShape, Any]
    copy: Any
    swap: SwapPrograms | None
    memory: memory.MemoryReport
    drafter: Drafter | None
    spare: int
    startup: Mapping[str, Any]

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return limits(self.config, host_blocks(self.config, self.model))

    def new_cache(self) -> cache.KVCache:
        return cache.init(blocks=self.config.num_blocks, **_block(self.config, self.model))

    def with_params(self, tree: Any) -> Runtime:
        """The runtime of the same model with other parameters, which are copied.

        Raises:
            ValueError: a parameter differs in name, shape or dtype; all of them are named.
        """
        model = self.model._replace(params=replaced(self.model.params, tree))
        return replace(self, model=model, leaves=model.leaves)


def build(
    model: Model,
    config: EngineConfig,
    eos_token_ids: Sequence[int] = (),
    *,
    row_features: Sequence[RowFeature] = (),
    progress: bool = False,
) -> Runtime:
    """Resolve the configuration, compile the programs, and settle the number of blocks.

    Compiling needs the shapes of a cache and not its memory, which `new_cache` allocates when the number of blocks is
    known to fit.

    Args:
        row_features: sampling options beside the built-in ones.

    Raises:
        ValueError: see `resolve`, and two sampling options of one name.
    """
    options = chain(row_features)
    found = memory.read(jax.devices()[0])  # before the cache takes its share
    resolved = resolve(config, model, found)
    sizes, policy, leaves = shapes(resolved, model), policies.find(resolved.policy), model.leaves
    blanks = {r: jax.device_put(blank_sampling(r, options)) for r in {shape.samples for shape in sizes.steps}}
    ahead = resolved.lookahead > 0
    blank = {shape: _blank_batch(sizes, shape, blanks, ahead, options) for shape in sizes.steps}
    inputs = memory.nbytes(blanks) + memory.nbytes(blank[sizes.steps[-1]])  # a step may replace the blanks by arrays
    found = found._replace(free=max(found.free - inputs, 0))
    before, started = compilations.counts(), time.perf_counter()
    attend = attention.attend(resolved.attention_impl, model.config.attn_scale)
    step = make_step(model, attend, resolved.seed, device_tile(), options)

    def compile_step(shape: StepShape, c: Resolved) -> Any:
        return step.lower(leaves, _cache_shapes(c, model), blank[shape]).compile()

    def settle(program: Any) -> Resolved:
        return resolve(config, model, found, memory.activations_peak(program))

    lazy = resolved.compilation == "lazy"
    if lazy:
        steps = programs.LazyPrograms(compile_step, resolved)
    else:
        steps, resolved = programs.compile_all(compile_step, sizes.steps, resolved, settle, progress=progress)
    pages, block = _cache_shapes(resolved, model), _block(resolved, model)
    copy = copy_blocks if lazy else copy_blocks.lower(pages, *padded_pairs((), COPIES)).compile()
    swap, block_bytes = None, cache.block_bytes(**block)
    if resolved.preemption == "swap":
        several = max(1, min(SWAPPED_BYTES // block_bytes, sizes.table_width))
        swap = SwapPrograms(pages, several)
    report = memory.report(
        found,
        weights=memory.nbytes(leaves),
        activations=None if lazy else memory.activations_peak(steps[sizes.steps[-1]]),
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        block_bytes=block_bytes,
        max_model_len=resolved.max_model_len,
        swap_space_gib=resolved.swap_space_gib if resolved.preemption == "swap" else 0,
    )
    if progress:
        tqdm.write(f"attention {resolved.attention_impl!r}\n{report}", file=sys.stderr)
    startup = {"compile": time.perf_counter() - started, "warmup": 0.0}
    made = compilations.counts() - before
    parts = (
        model,
        resolved,
        tuple(eos_token_ids),
        policy,
        leaves,
        sizes,
        options,
        blanks,
        steps,
        copy,
        swap,
        report,
        drafters.find(resolved.speculative) if resolved.speculative else None,
        max(resolved.lookahead, sizes.drafts),
    )
    return Runtime(*parts, startup={**startup, **made._asdict()})


def warmed_up(runtime: Runtime, pages: cache.KVCache) -> tuple[Runtime, cache.KVCache]:
    """Run the smallest step once, so that the first request runs warm code. Nothing runs if programs are lazy."""
    started = time.perf_counter()
    if runtime.config.compilation != "lazy":
        shape = runtime.shapes.steps[0]
        blank = _blank_batch(runtime.shapes, shape, runtime.blanks, runtime.config.lookahead > 0, runtime.options)
        pages, output = runtime.programs[shape](runtime.leaves, pages, blank)
        jax.block_until_ready(output)
    startup = {**runtime.startup, "warmup": time.perf_counter() - started}
    return replace(runtime, startup=startup), pages


def padded_pairs(pairs: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """[2, size] int32: the blocks to copy from and to. The padding copies the trash block onto itself."""
    found = np.zeros((2, size), np.int32)
    if pairs:
        found[:, : len(pairs)] = np.array(pairs, np.int32).T
    return found


def _block(c: Resolved, model: Model) -> dict[str, Any]:
    return block_shape(c.block_size, model, c.kv_cache_dtype, c.attention_impl)


def _cache_shapes(c: Resolved, model: Model) -> cache.KVCache:
    return jax.eval_shape(lambda: cache.init(blocks=c.num_blocks, **_block(c, model)))


def _blank_batch(
    sizes: Shapes, shape: StepShape, blanks: Mapping[int, SamplingBatch], ahead: bool, options: RowChain
) -> Batch:
    """A step of a shape that computes nothing."""
    batch = pack(EMPTY_PLAN, {}, sizes._replace(tokens=(shape.tokens,)), blanks, options)
    if shape.samples > len(batch.last):
        last = np.zeros(shape.samples, np.int32)
        batch = batch._replace(last=last, sampled_row=last, sampling=blanks[shape.samples])
    return batch._replace(feed=blank_feed(sizes, shape.tokens)) if ahead else batch

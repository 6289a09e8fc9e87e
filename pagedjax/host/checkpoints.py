"""Which boundaries between blocks a prefix can be found at (prefix checkpoints).

A query behind a boundary reads all blocks before it in groups of layers that see everything. In a
group with a window it reads only the last ones: of a layer that keeps a state, one block, which has
the state before its tokens and what they bring. So a prefix cache needs blocks of these groups only before the
boundaries at which prefixes will end, and `SchedulerConfig.prefix_checkpoints` says which they are:

    interval    every boundary at a multiple of so many tokens
    prompts     the last one at which the prompt leaves a token to compute, so that it can come again
    texts       the last one of all that was computed, when a sequence ends or is preempted
    junctions   where the beginning ends that a sequence shares with earlier ones: it found keys and
                values up to there, and no state

None is every boundary. Other blocks of a group with a window are never published. So they are empty
as soon as they are given back, and the first to be used again. Nothing that a query reads depends
on this, so no token does.

vLLM's `prefix_cache_retention_interval` of N is an interval of N with prompts and junctions, and 0
is these without an interval (pull requests 45845 and 52216). SGLang keeps states where chunks of
prompts end, and of texts that end (`--mamba-track-interval`: also while they are generated). Marconi
(Pan et al. 2024, arXiv 2411.19379) keeps junctions and texts.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedjax.host.kv_policies import View
from pagedjax.host.types import SchedulerConfig, Seq
from pagedjax.options.config import PrefixCheckpoints


def check_config(config: SchedulerConfig) -> None:
    """Raises ValueError for a policy that is no `PrefixCheckpoints`, or whose interval is not whole
    blocks.
    """
    policy = config.prefix_checkpoints
    if policy is None:
        return
    if not isinstance(policy, PrefixCheckpoints):
        raise ValueError(
            f"prefix_checkpoints is {policy!r}; it must be None or a PrefixCheckpoints"
        )
    policy.check_block_size(config.block_size)


def kept_entries(config: SchedulerConfig, seq: Seq, first: int, last: int) -> list[bool]:
    """For each entry of the full blocks `first` to `last` - 1 of a sequence's table, whether it is
    published.
    """
    if config.prefix_checkpoints is None:
        return [True] * ((last - first) * config.groups)
    boundaries = _boundaries_of(config.prefix_checkpoints, seq, config.block_size)
    are_kept: list[bool] = []
    for block in range(first, last):
        kept_in = {
            view: _is_kept(config, view, block, boundaries) for view in dict.fromkeys(config.views)
        }
        are_kept += [kept_in[view] for view in config.views] if config.views else [True]
    return are_kept


def _boundaries_of(policy: PrefixCheckpoints, seq: Seq, block_size: int) -> list[int]:
    """The boundaries of one sequence at which its prefix is kept, beside those of the interval. A
    boundary b is before block b.
    """
    boundaries: list[int] = []
    if policy.prompts:
        boundaries.append((seq.request.prompt_len - 1) // block_size)
    if policy.junctions:
        boundaries.append(seq.junction)
    return boundaries


def _is_kept(config: SchedulerConfig, view: View, block: int, boundaries: Iterable[int]) -> bool:
    """Whether a query behind a kept boundary reads this block, which is before it."""
    if view.window is None or block in view.kept:
        return True
    last = block + view.window - 1  # the last boundary whose query reads the block
    policy = config.prefix_checkpoints
    if policy is not None and policy.interval:
        distance = policy.interval // config.block_size
        if last // distance > block // distance:
            return True
    return any([block < boundary <= last for boundary in boundaries])

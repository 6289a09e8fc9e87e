"""What a sequence keeps where queries do not see all of it, in words."""

from __future__ import annotations

from pagedjax.host import blocks
from pagedjax.host.types import SchedulerConfig
from pagedjax.host.views import sequences_that_fit


def sentence(config: SchedulerConfig) -> str:
    """How many blocks the longest sequence keeps, and how many such sequences fit; "" if queries
    see all blocks.
    """
    if not config.views:
        return ""
    groups = len(config.views)
    per_group = blocks.needed(config.max_model_len, config.block_size)
    num_kept = sum([view.width(per_group) for view in config.views])
    total = groups * per_group
    share = 100 * num_kept / total
    return (
        f"{groups} group{'s' if groups > 1 else ''} of layers: a sequence of "
        f"{config.max_model_len:,} tokens keeps {num_kept:,} of {total:,} blocks ({share:.0f} %), "
        f"and {sequences_that_fit(config):,} such sequences fit at once"
    )

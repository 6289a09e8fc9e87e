"""Views for tests of the scheduler: of no group, one group or several groups of layers."""

from hypothesis import strategies as st

from pagedjax.host.kv_policies import ALL, View
from pagedjax.host.types import SchedulerConfig
from pagedjax.options.config import PrefixCheckpoints

windows = st.builds(
    lambda window, blocks: View(window, tuple(sorted(blocks))),
    st.integers(1, 4),
    st.sets(st.integers(0, 5), max_size=2),
)
at_most_one_group = st.just(()) | st.tuples(windows)
any_groups = at_most_one_group | st.lists(windows | st.just(ALL), min_size=2, max_size=3).map(tuple)


def _with_checkpoints(config: SchedulerConfig, policy: tuple | None) -> SchedulerConfig:
    if policy is None or not any(policy):
        return config
    blocks, *places = policy
    checkpoints = PrefixCheckpoints(blocks * config.block_size, *places)
    return config._replace(prefix_checkpoints=checkpoints)


def with_checkpoints(configs: st.SearchStrategy[SchedulerConfig]) -> st.SearchStrategy:
    """These configurations, without checkpoints, with some policy of them."""
    policies = st.tuples(st.integers(0, 4), *[st.booleans()] * 3)
    return st.builds(_with_checkpoints, configs, st.none() | policies)

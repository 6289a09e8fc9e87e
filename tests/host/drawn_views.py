"""Views for tests of the scheduler: of no group, one group or several groups of layers."""

from hypothesis import strategies as st

from pagedjax.host.kv_policies import ALL, View

windows = st.builds(
    lambda window, blocks: View(window, tuple(sorted(blocks))),
    st.integers(1, 4),
    st.sets(st.integers(0, 5), max_size=2),
)
at_most_one_group = st.just(()) | st.tuples(windows)
any_groups = at_most_one_group | st.lists(windows | st.just(ALL), min_size=2, max_size=3).map(tuple)

"""KV policies as values: which tokens of a sequence a query still sees, and so which blocks are
given back.

A `KVPolicy` speaks of tokens; `view` turns it, once, into a `View`, which speaks of blocks and is
plain data. So a recording's header has all that a replay needs, and the scheduler never calls a
user's function.

A query in block b of its sequence sees the last `window` blocks up to b, and the earlier blocks
that are kept for ever. This depends on the position of the query alone, never on chunks, on other
sequences or on the budget. So the tokens of a request are the same in any batch. A block that one
query does not see any more is seen by no later query, so it can be given back.

`quest` and other policies that select blocks by their content (docs/design/quest.md) read fewer of
the blocks that a view lists, and give none back. So a selection is a field of `KVPolicy`, and
`View` knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

from pagedjax.host import blocks
from pagedjax.options.config import EngineConfig, KVPolicyName, KVPolicyOptions
from pagedjax.options.own_errors import placed
from pagedjax.options.own_values import named_value, true_or_false


class View(NamedTuple):
    """What queries of a group of layers see, in blocks.

    window: the last blocks up to the query's own, at least 1; None: all.
    kept: indices of blocks in their sequence, ascending, that every later query sees too.
    """

    window: int | None = None
    kept: tuple[int, ...] = ()

    def first(self, block: int) -> int:
        """The index of the first block in the window of a query in this block."""
        return 0 if self.window is None else max(block - self.window + 1, 0)

    def outside(self, block: int) -> tuple[int, ...]:
        """The indices of the kept blocks before the window of a query in this block."""
        first = self.first(block)
        return tuple([i for i in self.kept if i < first]) if first else ()

    def width(self, max_blocks: int) -> int:
        """The most blocks that a query sees, in sequences of at most `max_blocks` blocks."""
        if self.window is None:
            return max_blocks
        return min(max_blocks, len(self.outside(max_blocks - 1)) + self.window)


ALL = View()


def never(start: int) -> bool:
    """No block is kept: the default of `KVPolicy.keeps`."""
    return False


class TopBlocks(NamedTuple):
    """A query reads the blocks with the best scores among those that it sees (Quest;
    device/selection.py).

    tokens: the most tokens that it reads, those of its own block included.
    dense_layers: the number of first layers in which it reads all.
    dense_prompts: whether queries of prompts read all, so that a prompt costs what it costs without
        a selection.
    """

    tokens: int
    dense_layers: int = 2
    dense_prompts: bool = True


class KVPolicy(NamedTuple):
    """Which earlier tokens a query sees. Sizes are rounded up to blocks.

    name: for errors and documents.
    window: a query sees at least the last `window` tokens, its own included; None: all.
    keeps: (position of a block's first token) -> whether every later query sees that block as well.
    selects: what a query reads of what it sees; None: all.
    """

    name: str
    window: int | None = None
    keeps: Callable[[int], bool] = never
    selects: TopBlocks | None = None


FULL = KVPolicy("full")


def streaming(sinks: int, window: int) -> KVPolicy:
    """Attention sinks and a window (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453).

    Args:
        sinks: the first tokens, which every query sees.
        window: the last tokens.
    """
    return KVPolicy("streaming", window, lambda start: start < sinks)


def quest(tokens: int, dense_layers: int = 2, dense_prompts: bool = True) -> KVPolicy:
    """The blocks with the best scores for a query (Quest, Tang et al. 2024, arXiv 2406.10774); see
    `TopBlocks`.
    """
    return KVPolicy("quest", selects=TopBlocks(tokens, dense_layers, dense_prompts))


def find(options: KVPolicyOptions) -> KVPolicy:
    """The policy that a configuration names. "module:NAME" or "folder/file.py:NAME" is a `KVPolicy`
    of the user.

    Raises:
        ValueError: no such module, file or value; a value that is no KVPolicy; a window below 1; a
            selection of less than a token.
    """
    if options.name == "full":
        return FULL
    if options.name == "streaming":
        assert options.sinks is not None, "the options have defaults"
        assert options.window is not None, "the options have defaults"
        return streaming(options.sinks, options.window)
    if options.name == "quest":
        assert options.tokens is not None, "the options have defaults"
        assert options.dense_layers is not None, "the options have defaults"
        assert options.dense_prompts is not None, "the options have defaults"
        return quest(options.tokens, options.dense_layers, options.dense_prompts)
    policy = named_value("kv_policy", options.name, KVPolicy, dict.fromkeys(get_args(KVPolicyName)))
    if policy.window is not None and (type(policy.window) is not int or policy.window < 1):
        raise ValueError(
            f"kv_policy {options.name!r} has window {policy.window!r}; "
            "it must be None, or at least 1 token"
        )
    if policy.selects is not None and not _is_selection(policy.selects):
        raise ValueError(
            f"kv_policy {options.name!r} has selects {policy.selects!r}; "
            "it must be None, or a TopBlocks of at least 1 token, at least 0 dense layers, "
            "and a bool"
        )
    return policy


def _is_selection(top: object) -> bool:
    """Whether a value of the user is a valid selection."""
    if not isinstance(top, TopBlocks):
        return False
    integers = type(top.tokens) is int and type(top.dense_layers) is int
    return (
        integers
        and top.tokens >= 1
        and top.dense_layers >= 0
        and isinstance(top.dense_prompts, bool)
    )


def window_blocks(tokens: int, block_size: int) -> int:
    """The most blocks that the last `tokens` tokens up to a query lie in."""
    return 1 + blocks.needed(tokens - 1, block_size)


def view(policy: KVPolicy, block_size: int, max_blocks: int) -> View:
    """The policy in blocks, for sequences of at most `max_blocks` blocks. It is `ALL` if every
    query sees all earlier blocks.
    """
    if policy.window is None:
        return ALL
    window = window_blocks(policy.window, block_size)
    num_outside = max_blocks - window  # blocks before the window of the last query
    kept_blocks = tuple([i for i in range(num_outside) if _keeps(policy, i * block_size)])
    return ALL if len(kept_blocks) >= num_outside else View(window, kept_blocks)


def _keeps(policy: KVPolicy, start: int) -> bool:
    """Whether the block whose first token is at `start` is kept.

    Raises:
        ValueError: the policy's `keeps` raises, or returns neither True nor False.
    """
    with placed(f"keeps of the kv_policy {policy.name!r}"):
        result = policy.keeps(start)
    return true_or_false(f"keeps({start}) of the kv_policy {policy.name!r}", result)


def views(config: EngineConfig, max_blocks: int) -> tuple[View, ...]:
    """The views of a configuration's policy, for sequences of at most `max_blocks` blocks; () if
    queries see everything.
    """
    if not isinstance(config.kv_policy, KVPolicyOptions):
        return ()
    policy_view = view(find(config.kv_policy), config.block_size, max_blocks)
    return () if policy_view == ALL else (policy_view,)

"""Hashes of cached blocks in a run with other blocks: `contents(past, config, ...)`.

With the recorded block size they are recorded. With a multiple of it, they are some of the
recorded ones, because a hash stands for all tokens before it too. With any other size they are made
from the recorded prompts and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.laboratory.past import Output, Past
from pagedjax.engine import block_hashes
from pagedjax.host.scheduler import SchedulerConfig


class Refused(ValueError):
    """A past that a changed run cannot have. The message says what is in the way."""


class Contents(NamedTuple):
    """The contents of blocks, as hashes.

    of: (arrival of a sequence in the past, index of its block) -> the hash; None: not recorded.
    shares: arrival -> whether the sequence shares blocks.
    size: tokens of a block.
    """

    of: Callable[[int, int], str | None]
    shares: Callable[[int], bool]
    size: int

    def of_prompt(self, arrival: int, prompt_len: int) -> tuple[str, ...]:
        """The hashes of a prompt's full blocks; () if the request shares none."""
        if not self.shares(arrival):
            return ()
        hashes = [self.of(arrival, index) for index in range(prompt_len // self.size)]
        return tuple([key for key in hashes if key is not None])


def contents(past: Past, config: SchedulerConfig, *, caching: bool | None = None) -> Contents:
    """The contents of blocks in a run with this configuration.

    Args:
        caching: whether prefixes are shared; None: as in the recorded run.

    Raises:
        Refused: they cannot be known.
    """
    recorded_size = past.config.block_size
    size = config.block_size
    shared = past.shares
    if caching is False or (caching is None and not shared):
        return Contents(lambda arrival, index: None, lambda arrival: False, size)
    if shared and size % recorded_size == 0:
        multiple = size // recorded_size

        def recorded_hash(arrival: int, index: int) -> str | None:
            return past.outputs[arrival].hashes.get((index + 1) * multiple - 1)

        return Contents(recorded_hash, lambda arrival: _shares(past, arrival), size)
    return _from_tokens(past, size, shared)


def _shares(past: Past, arrival: int) -> bool:
    """Whether a sequence shared blocks. A sequence that filled no block counts as sharing.

    past: of a run that shares blocks.
    """
    output = past.outputs[arrival]
    if output.hashes:
        return True
    request = past.requests[output.first]
    num_output = output.num_output
    if num_output is None:
        num_output = output.before + len(output.tokens) + len(past.choices.get(output.first, ()))
    # the last token of a sequence is not computed, unless a search of beams ended
    uncomputed = 0 if request.beams and output.ended else 1
    num_computed = request.prompt_len + num_output - uncomputed
    return num_computed < past.config.block_size


def _from_tokens(past: Past, size: int, shared: bool) -> Contents:
    """The contents of blocks of any size, from tokens.

    Raises:
        Refused: tokens are not known, or a request has a salt or an adapter, which the recording
            does not name.
    """
    recorded_size = past.config.block_size
    remedy = f"choose a multiple of the recorded block size {recorded_size}"
    if not shared:
        remedy = "leave enable_prefix_caching as it was"
    if past.config.views:
        raise Refused(
            f"blocks of {size} tokens under a KV policy have hashes that a recording does not "
            f"tell; {remedy}"
        )
    if past.choices:
        raise Refused(f"the tokens of beams have no hashes of blocks of {size} tokens; {remedy}")
    missing = next((first for first in past.requests if first not in past.prompts), None)
    if missing is not None:
        raise Refused(
            f"hashes of blocks of {size} tokens need the prompt of request "
            f"{past.requests[missing].request_id!r}, which was not recorded; {remedy}, or record "
            "an engine with prompts=True (a server records no prompts)"
        )
    chains: dict[int, Sequence[str]] = {}
    for arrival, output in past.outputs.items():
        request = past.requests[output.first]
        tokens = np.array([*past.prompts[output.first], *output.tokens], np.int32)
        if shared:
            _check_root(output, tokens, request.tags, request.request_id, recorded_size, remedy)
        root = block_hashes.root(None, size, request.tags)
        chains[arrival] = block_hashes.chain(root, tokens, size)

    def hash_of_tokens(arrival: int, index: int) -> str | None:
        chain = chains[arrival]
        return chain[index] if index < len(chain) else None

    return Contents(hash_of_tokens, lambda arrival: not shared or _shares(past, arrival), size)


def _check_root(
    output: Output,
    tokens: np.ndarray,
    tags: Sequence[str],
    name: str,
    size: int,
    remedy: str,
) -> None:
    """Raises Refused if the first block of a sequence has not the hash of its tokens and tags."""
    if 0 not in output.hashes:
        return
    root = block_hashes.root(None, size, tags)
    if block_hashes.chain(root, tokens[:size], size) != (output.hashes[0],):
        raise Refused(
            f"request {name!r} has a cache salt or an adapter, which is not recorded, so its "
            f"blocks of another size have unknown hashes; {remedy}"
        )

"""The hash of a full block: it stands for the block's tokens and for every token before them.

    h[0] = H(salt, tokens[0:S])    h[i] = H(h[i - 1], tokens[i S : (i + 1) S])

Two blocks with the same hash hold the same keys and values, because these depend only on the tokens
up to their own position, and under a KV policy that selects blocks on the length of the prompt
(`selected`). A hash has 128 bits of BLAKE2b, so two contents of a run do not get the same hash, by
accident or on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from pagedjax.params import SamplingParams


def root(salt: str | None, block_size: int, tags: Sequence[str] = (), adapter: str = "") -> str:
    """The hash before the first block's. Requests with different salts, tags or adapters share no
    block.

    Args:
        adapter: the hash of its content, and not its name: another adapter may have the name later.
    """
    found = blake2b(f"{block_size}:{salt or ''}".encode(), digest_size=16).hexdigest()
    for tag in tags:
        found = blake2b(
            tag.encode(), key=bytes.fromhex(found), person=b"tag", digest_size=16
        ).hexdigest()
    if adapter:
        found = blake2b(
            adapter.encode(), key=bytes.fromhex(found), person=b"adapter", digest_size=16
        ).hexdigest()
    return found


def selected(parent: str, prompt_len: int) -> str:
    """What the hashes of blocks with generated tokens grow from where queries of prompts read other
    blocks than those of generated tokens (`TopBlocks.dense_prompts`): the same tokens have other
    keys in a longer prompt."""
    return blake2b(
        b"%d" % prompt_len, key=bytes.fromhex(parent), person=b"selected", digest_size=16
    ).hexdigest()


def chain(parent: str, tokens: np.ndarray, block_size: int) -> tuple[str, ...]:
    """Hashes of the full blocks of `tokens`, which follow the block of the hash `parent`."""
    data, size = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * block_size
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        parent = blake2b(
            data[start : start + size], key=bytes.fromhex(parent), digest_size=16
        ).hexdigest()
        hashes.append(parent)
    return tuple(hashes)


def of_prompt(
    prompt: Sequence[int] | np.ndarray,
    params: SamplingParams,
    block_size: int,
    tags: Sequence[str] = (),
    adapter: str = "",
) -> tuple[str | None, tuple[str, ...]]:
    """What the hashes of a request grow from, and those of its prompt's full blocks. A router needs
    the same ones.

    Log-probabilities and hidden states of a prompt need every one of its tokens computed, so such a
    request shares nothing: (None, ()).

    Args:
        adapter: see `root`.
    """
    every = params.prompt_logprobs is not None or (
        params.taps is not None and params.taps.of_every_token
    )
    if not params.enable_prefix_caching or every:
        return None, ()
    start = root(params.cache_salt, block_size, tags, adapter)
    return start, chain(start, np.asarray(prompt), block_size)

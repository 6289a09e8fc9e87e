"""The hash of a full block, which stands for the block's tokens and for every token before them.

    h[0] = H(salt, tokens[0:S])    h[i] = H(h[i - 1], tokens[i S : (i + 1) S])

Two blocks with the same hash hold the same keys and values. These depend only on the tokens up to
their own position; under a KV policy that selects blocks, they also depend on the length of the
prompt (`selected`). A hash has 128 bits of BLAKE2b, so two contents of a run do not get the same
hash, by accident or on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from pagedjax.options.params import SamplingParams


def root(salt: str | None, block_size: int, tags: Sequence[str] = (), adapter: str = "") -> str:
    """Returns the hash that the first block has as its parent. Requests with different salts, tags
    or adapters share no block.

    Args:
        adapter: the hash of the adapter's content, not its name: another adapter may get the name
            later.
    """
    digest = blake2b(f"{block_size}:{salt or ''}".encode(), digest_size=16).hexdigest()
    for tag in tags:
        digest = blake2b(
            tag.encode(), key=bytes.fromhex(digest), person=b"tag", digest_size=16
        ).hexdigest()
    if adapter:
        digest = blake2b(
            adapter.encode(), key=bytes.fromhex(digest), person=b"adapter", digest_size=16
        ).hexdigest()
    return digest


def selected(parent: str, prompt_len: int) -> str:
    """Returns the hash that the first block with generated tokens has as its parent, under a KV
    policy whose queries of prompts read other blocks than queries of generated tokens
    (`TopBlocks.dense_prompts`). There the keys of a token also depend on the prompt's length.
    """
    return blake2b(
        b"%d" % prompt_len, key=bytes.fromhex(parent), person=b"selected", digest_size=16
    ).hexdigest()


def chain(parent: str, tokens: np.ndarray, block_size: int) -> tuple[str, ...]:
    """Returns the hashes of the full blocks of `tokens`, which follow a block of hash `parent`."""
    data = np.ascontiguousarray(tokens, "<i4").tobytes()
    size = 4 * block_size  # bytes of a block's tokens
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
    """Returns the `root` of a request, and the hashes of its prompt's full blocks. A router
    computes the same hashes.

    Log-probabilities and hidden states of a prompt need every one of its tokens computed. So a
    request for them shares nothing: (None, ()).

    Args:
        adapter: see `root`.
    """
    computes_every_token = params.prompt_logprobs is not None or (
        params.taps is not None and params.taps.of_every_token
    )
    if not params.enable_prefix_caching or computes_every_token:
        return None, ()
    parent = root(params.cache_salt, block_size, tags, adapter)
    return parent, chain(parent, np.asarray(prompt), block_size)

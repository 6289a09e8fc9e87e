"""What stands for the content of a full block: a hash of its tokens and of everything before them.

    h[0] = H(salt, tokens[0:S])    h[i] = H(h[i - 1], tokens[i S : (i + 1) S])

Two blocks with the same hash hold the same keys and values, because those depend on the tokens up to their own
position alone. The hash is 128 bits of BLAKE2b, so that no two contents of a run meet by accident or by design.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def root(salt: str | None, block_size: int) -> str:
    """What the first block's hash grows from. Requests with different salts share nothing."""
    return blake2b(f"{block_size}:{salt or ''}".encode(), digest_size=16).hexdigest()


def chain(parent: str, tokens: np.ndarray, block_size: int) -> tuple[str, ...]:
    """Hashes of the full blocks of `tokens`, which go on where `parent`'s block ended."""
    data, size = np.ascontiguousarray(tokens, "<i4").tobytes(), 4 * block_size
    hashes = []
    for start in range(0, len(data) - size + 1, size):
        parent = blake2b(data[start : start + size], key=bytes.fromhex(parent), digest_size=16).hexdigest()
        hashes.append(parent)
    return tuple(hashes)

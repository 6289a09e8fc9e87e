"""Which adapter of low rank each token of a step uses (adapters.py), as products need it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.device.linear import LowRank

Factors = tuple[dict[str, tuple[Any, Any]], ...]  # by layer and matrix: a and b of a `LowRank`


class TokenAdapters(NamedTuple):
    """The adapters of a step's tokens.

    adapter_slots: [T] i32; 0 is none.
    factors: of all layers, or of one of them.
    order: [T] i32, the tokens in the order of these; None from the host: `routed` finds it.
    sizes: by adapter slot, i32: its tokens.
    """

    adapter_slots: Any
    factors: Any
    order: Any = None
    sizes: Any = None

    def routed(self) -> TokenAdapters:
        """With the order of the tokens."""
        slots = self.adapter_slots.astype(jnp.int32)
        count = jax.tree.leaves(self.factors)[0].shape[0]
        sizes = (slots[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
        return TokenAdapters(
            slots, self.factors, jnp.argsort(slots, stable=True).astype(jnp.int32), sizes
        )

    def of_layer(self, layer: int) -> TokenAdapters:
        return self._replace(factors=self.factors[layer])

    def of_tokens(self, tokens: Any) -> TokenAdapters:
        """Those of some of the tokens."""
        return self._replace(adapter_slots=self.adapter_slots[tokens]).routed()

    def low(self, name: str, parts: tuple[int, ...]) -> LowRank:
        """What a layer's matrix adds. parts: as `DecoderConfig.parts` has them."""
        a, b = self.factors[name]
        return LowRank(a, b, self.adapter_slots, self.order, self.sizes, parts)

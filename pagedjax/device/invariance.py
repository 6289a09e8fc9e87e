"""Which models can be batch-invariant. Engines, simulated engines and `score` ask here; attention and
products are asked by their implementations.
"""

from __future__ import annotations

from pagedjax.device.models.decoder import DecoderConfig

VECTOR = 16  # float32 numbers of the widest vector of a CPU


def check_batch_invariant(c: DecoderConfig) -> None:
    """Raises ValueError for a model in which the bits of a token may depend on other tokens,
    whatever computes attention and products.
    """
    mixers = [type(kind.mixer).__name__ for kind in c.kinds if kind.mixer]
    head_sizes = {c.of_kind(kind).head_dim for kind in c.kinds if not kind.mixer}
    odd_heads = sorted(size for size in head_sizes if size % VECTOR)
    has_normed_heads = c.qk_norm == "head" or c.v_norm
    reasons = (
        (
            c.latent is not None,
            f"the model keeps latents (rows of {c.head_dim} numbers), whose results may depend on a "
            "chunk's length",
        ),
        (
            bool(mixers),
            f"the model has layers without attention ({', '.join(dict.fromkeys(mixers))}), whose "
            "bits may depend on the shapes of a step",
        ),
        (
            c.hidden % VECTOR > 0,
            f"the hidden size of the model is {c.hidden}: beyond a multiple of {VECTOR} the "
            "compiler may round x * y + z in two ways",
        ),
        (
            has_normed_heads and bool(odd_heads),
            f"the model has norms of heads of {', '.join(map(str, odd_heads))} numbers, "
            f"whose bits are fixed for multiples of {VECTOR} alone",
        ),
        (
            c.logit_cap is not None and c.vocab_size % VECTOR > 0,
            f"the model has a cap of logits and a vocabulary of {c.vocab_size}: beyond a multiple of "
            f"{VECTOR} the compiler may compute tanh in two ways",
        ),
    )
    for holds, reason in reasons:
        if holds:
            raise ValueError(
                f"batch_invariant is True, and {reason}; use another model, or set "
                "batch_invariant=False"
            )

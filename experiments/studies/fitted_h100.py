"""Seconds of a step of vLLM with Llama-3.1-8B on an H100, as SpecDecode-Bench fitted them (arXiv
2601.11580).

The constants are from the benchmark's simulator. A step takes a fixed time, and a time for each
token and for each token of context. An EAGLE drafter takes such a sum too, once in a step, for any
number of drafts. An n-gram drafter takes a share of the time of the step.
"""

from __future__ import annotations

from experiments.simulation.cost import Work

EAGLE = "eagle"
NGRAM = "ngram"
FIXED_S = 5.88590713e-3
TOKEN_S = 2.10103129e-5
CONTEXT_S = 3.92645679e-8
EAGLE_S = 2.13526175e-3
EAGLE_TOKEN_S = 8.41429603e-7
EAGLE_CONTEXT_S = 2.37768493e-9
NGRAM_SHARE = 0.005875
OVERHEAD_S = 1.20683946e-3  # of the host, in every step


def seconds(work: Work, method: str | None) -> float:
    """The time of a step without OVERHEAD_S.

    A step with more sampled rows than sequences has drafts; `method` is their drafter.
    """
    step = FIXED_S + TOKEN_S * work.tokens + CONTEXT_S * work.context
    if work.sampled <= work.sequences:
        return step
    if method == NGRAM:
        return step * (1 + NGRAM_SHARE)
    return (
        step
        + EAGLE_S
        + EAGLE_TOKEN_S * work.tokens / work.sequences
        + EAGLE_CONTEXT_S * work.context
    )

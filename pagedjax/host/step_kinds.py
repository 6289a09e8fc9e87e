"""Baselines: steps that do not mix decodes and prompt chunks, as in earlier engines.

Two switches choose the kinds of steps, mixed_steps and chunked_prefill:

    both             chunks of prompts fill what decodes leave of the budget (Sarathi-Serve); the
                     default
    mixed_steps      whole prompts join the decodes (Orca)
    chunked_prefill  chunks and decodes in turn
    neither          whole prompts first, and decodes wait for them (vLLM before chunked prefill)

Where prompts are whole, each is computed by the step that admits it, so the budget must hold the
longest sequence.
"""

from __future__ import annotations

from typing import Literal

from pagedjax.host.types import Running, SchedulerConfig

Kind = Literal["prompts", "decodes"]


def kinds(config: SchedulerConfig, step: int) -> tuple[Kind, Kind]:
    """The kinds to try for an unmixed step, in this order; the first one with tokens to compute is
    used.
    """
    if config.chunked_prefill and step % 2:
        return "decodes", "prompts"
    return "prompts", "decodes"


def split(active: Running, num_decodes: int, kind: Kind) -> tuple[Running, int, Running]:
    """Splits the running sequences by the kind of the step.

    Args:
        active: decodes first.

    Returns:
        (sequences that this kind of step computes, the number of decodes among them, sequences that
        wait for another step)
    """
    decodes = active.pick(range(num_decodes))
    prompts = active.pick(range(num_decodes, len(active.seqs)))
    if kind == "decodes":
        return decodes, num_decodes, prompts
    return prompts, 0, decodes

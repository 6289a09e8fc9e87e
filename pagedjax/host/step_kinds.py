"""What a step is made of: decodes and prompt chunks together, or only one of them.

Two switches, which hold the composition of earlier engines beside this one's so that it can be measured:

    mixed_steps  chunked_prefill
    yes          yes              chunks of prompts fill what decodes leave of the budget (Sarathi-Serve); the default
    yes          no               whole prompts join the decodes (Orca)
    no           no               whole prompts first, and decodes wait for them (vLLM before chunked prefill)
    no           yes              chunks and decodes by turns

Where prompts are whole, each is computed by the step that admits it, so the budget must hold the longest sequence.
"""

from __future__ import annotations

from typing import Literal

from pagedjax.host.state import SchedulerConfig
from pagedjax.host.types import Running

Kind = Literal["both", "prompts", "decodes"]


def turns(config: SchedulerConfig, step: int) -> tuple[Kind, *tuple[Kind, ...]]:
    """What a step is tried as, in this order; the first that has something to compute is the step."""
    if config.mixed_steps:
        return ("both",)
    if config.chunked_prefill and step % 2:
        return "decodes", "prompts"
    return "prompts", "decodes"


def split(active: Running, decodes: int, kind: Kind) -> tuple[Running, int, Running]:
    """Sequences with decodes first -> (those that this kind of step computes, decodes among them, those that wait)."""
    if kind == "both":
        return active, decodes, Running()
    first, rest = active.pick(range(decodes)), active.pick(range(decodes, len(active.seqs)))
    return (first, decodes, rest) if kind == "decodes" else (rest, 0, first)

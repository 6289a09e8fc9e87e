"""Drafters: each guesses the next tokens of a sequence from its tokens so far.

A drafter is a value, as a policy is.
"""

from __future__ import annotations

from typing import get_args

from pagedjax.engine.drafters import ngram, suffix
from pagedjax.engine.drafters.drafter import Drafter
from pagedjax.options.config import DraftMethod, Speculative
from pagedjax.options.own_values import named_value

__all__ = ["Drafter", "find"]


def find(options: Speculative) -> Drafter:
    """Returns the drafter that `options.method` names.

    Raises:
        ValueError: no such drafter, module, file or value, or a value that is no drafter.
    """
    if options.method == "ngram":
        return ngram.drafter(options.ngram_max, options.ngram_min)
    if options.method == "suffix":
        return suffix.drafter()
    if options.on_device:
        return Drafter(str(options.method), None)
    methods = dict.fromkeys(get_args(DraftMethod))
    drafter = named_value("speculative.method", options.method, Drafter, methods)
    if drafter.propose is None:
        raise ValueError(
            f"speculative.method is {options.method!r}, and its propose is None; give it a function"
        )
    return drafter

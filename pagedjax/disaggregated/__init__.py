"""Prefill and decode by two engines: one computes prompts, the other one goes on with their
blocks.
"""

from __future__ import annotations

from pagedjax.disaggregated.pair import PrefillDecode
from pagedjax.disaggregated.transfer import Offer, Transfers

__all__ = ["Offer", "PrefillDecode", "Transfers"]

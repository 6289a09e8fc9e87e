"""Prefill and decode by two engines: the first computes prompts, the second goes on with their
blocks.
"""

from __future__ import annotations

from pagedjax.disaggregated.pair import PrefillDecode
from pagedjax.disaggregated.transfer import Offer, Transfers

__all__ = ["Offer", "PrefillDecode", "Transfers"]

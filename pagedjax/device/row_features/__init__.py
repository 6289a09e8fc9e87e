"""Sampling options that change logits or weights: one file an option (or a few alike), and the
chain of all of them.

An option is one `RowFeature`. What it needs of a request is read once and stored as a record of
bytes; a step joins the records of its rows, and the compiled step applies only the features that
some row uses.
"""

from pagedjax.device.row_features.chain import FeatureRows, RowChain, RowOptions, chain, find
from pagedjax.device.row_features.feature import RowContext, RowFeature

__all__ = ["FeatureRows", "RowChain", "RowContext", "RowFeature", "RowOptions", "chain", "find"]

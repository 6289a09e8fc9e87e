"""Sampling options that change logits or weights: a file for each option, or for a few similar
options, and the chain of all of them.

An option is one `RowFeature`. What it needs of a request is read once and stored as a record of
bytes. A step joins the records of its rows. The compiled step applies only the features that some
row uses.
"""

from pagedjax.device.row_features.chain import FeatureRows, RowChain, RowOptions, chain, find
from pagedjax.device.row_features.feature import RowContext, RowFeature

__all__ = ["FeatureRows", "RowChain", "RowContext", "RowFeature", "RowOptions", "chain", "find"]

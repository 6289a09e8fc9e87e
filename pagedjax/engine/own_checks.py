"""Checks of a user's own values, before weights are loaded, which can take minutes."""

from __future__ import annotations

from pagedjax.device import attention, linear
from pagedjax.device.row_features import find as find_row_feature
from pagedjax.engine import drafters
from pagedjax.host import kv_policies, purity
from pagedjax.options.config import EngineConfig, KVPolicyOptions
from pagedjax.weights.families import own_family


def check_own_values(config: EngineConfig) -> None:
    """Find the user's own values that a configuration names, and check that the policy is pure.

    Raises:
        ValueError: a file, a value or a parameter is not there or wrong, or the policy is impure.
    """
    purity.find_pure(config.policy)
    if isinstance(config.kv_policy, KVPolicyOptions):
        kv_policies.find(config.kv_policy)
    if config.speculative is not None:
        drafters.find(config.speculative)
    if config.attention_impl is not None:
        attention.find(config.attention_impl)
    if isinstance(config.linear_impl, str):
        linear.find(config.linear_impl)
    if isinstance(config.model_family, str):
        own_family(config.model_family)
    for name in config.row_features:
        find_row_feature(name)

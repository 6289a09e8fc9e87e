"""An engine without a device: the real scheduler on a clock that a cost model advances.

This folder imports nothing else of `experiments`: `core` builds on it.
"""

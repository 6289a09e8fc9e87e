"""An engine without a device: the real scheduler on a clock that a cost model advances."""

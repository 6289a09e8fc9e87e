"""Paged attention on a CPU: numba code behind an XLA FFI call. Not Pallas."""

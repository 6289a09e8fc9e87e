"""What all kernels for Hopper GPUs (sm_90a) need of JAX and of the device."""

from __future__ import annotations

from typing import Any

import jax

JAX_NEEDED = (0, 11)  # older versions cannot transpose a swizzled tile


def old_jax() -> str:
    """Returns why this JAX cannot compile the kernels, as the rest of a sentence; empty if it can."""
    if jax.__version_info__ >= JAX_NEEDED:
        return ""
    needed = ".".join(map(str, JAX_NEEDED))
    return (
        f"needs JAX {needed} or newer, which needs Python 3.12, and this is JAX {jax.__version__}"
    )


def wrong_device(device: Any) -> str:
    """Returns why a device cannot run the kernels, as the rest of a sentence; empty if it can."""
    if device.platform != "gpu":
        return f"runs on platform 'gpu' and not on {device.platform!r}"
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.startswith("9."):
        return (
            "is compiled for Hopper GPUs (compute capability 9.0), "
            f"and {device.device_kind} has {capability}"
        )
    return ""


def store(ref: Any, x: jax.Array) -> None:
    """Writes x to shared or global memory, however threads have its numbers: with conflicts of banks,
    or fewer bytes of a thread than it could write at a time.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    newer: Any = plgpu  # JAX 0.11 has no `store`, and its assignments may be slow, too
    if hasattr(plgpu, "store"):
        newer.store(ref, x, optimized=False)
    else:
        ref[...] = x

"""The device that a kernel is compiled for."""

from __future__ import annotations

import jax


def device_kind() -> str:
    """Returns JAX's name of the device that is compiled for.

    It is the mesh's device if a mesh is set, else the first device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind

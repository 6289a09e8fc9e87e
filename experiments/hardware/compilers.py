"""The compilers of chips that need not be present: requirements, topologies, lowering of a step.

A topology is a set of chips and the links between them, by the compiler's own name for it: v5e:2x4
are eight chips in two rows, 1x1x8 are eight GPUs of one process. The compiler makes devices of it
that programs can be compiled for.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from experiments.simulation.collectives import Network
from experiments.simulation.cost import CHIPS, check_network
from pallas_kernels import aot, aot_tpu
from pallas_kernels.tiles import TPUS, TpuTiles

FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")
# shapes of topologies, ascending
SHAPES = {"v4": CUBES, "v5e": FLAT, "v5p": CUBES, "v6e": FLAT, "tpu7x": CUBES}
CORES = {"v4": 2, "tpu7x": 2}  # devices of a chip; others have one


class Target(NamedTuple):
    """A kind of chip to compile for.

    platform: the name of its platform for `lower`.
    memory: bytes that a program may use.
    impl: the implementation of attention.
    chip: its name among the simulator's chips.
    """

    name: str
    platform: str
    memory: int
    impl: str
    chip: str

    def network(self, n: int) -> Network | None:
        """The links between n devices; None for one device.

        Raises:
            ValueError: the links connect fewer devices, or are not known.
        """
        network = CHIPS[self.chip].network
        if n == 1:
            return None
        check_network(network, n, self.chip)
        return network


def target(name: str) -> Target:
    if name in TPUS:
        chip = name if name in CHIPS else f"tpu-{name}"
        return Target(name, "tpu", TpuTiles.read(name).hbm, "pallas_tpu", chip)
    return Target(name, "cuda", aot.TARGETS[name].memory, "pallas_gpu", name)


TARGETS = (*TPUS, *sorted(aot.TARGETS))


def topology_of(target: Target, n: int, topology: str | None = None) -> str:
    """The topology to compile for: the given topology, or the smallest one with n devices.

    Raises:
        ValueError: the given topology is of another chip or has fewer devices, or no topology with
            n devices is known.
    """
    if topology is None:
        return _smallest(target, n)
    gpu = target.platform == "cuda"
    pattern = r"\d+x\d+x\d+" if gpu else rf"{target.name}:\d+(x\d+)+"
    if not re.fullmatch(pattern, topology):
        example = "1x1x8" if gpu else _smallest(target, 4)
        raise ValueError(f"--topology is {topology!r}; for {target.name} write {example}")
    devices = size(target, topology)
    if devices < n:
        raise ValueError(
            f"the mesh has {n} devices, and the topology {topology} {devices}; "
            f"use a smaller --mesh, or --topology {_smallest(target, n)}"
        )
    return topology


def _smallest(target: Target, n: int) -> str:
    """The smallest topology with n devices or more. Raises ValueError if none is known."""
    if target.platform == "cuda":
        return f"1x1x{n}"
    for shape in SHAPES[target.name]:
        topology = f"{target.name}:{shape}"
        if size(target, topology) >= n:
            return topology
    raise ValueError(
        f"the mesh has {n} devices, and no default topology of {target.name} has so many; give "
        "--topology"
    )


def size(target: Target, topology: str) -> int:
    """The number of devices of a topology."""
    sides = topology.split(":")[-1].split("x")
    return CORES.get(target.name, 1) * prod(map(int, sides))


def what_is_missing(target: Target) -> str:
    """What must be installed to compile for the target, as a sentence; "" if nothing."""
    return aot.what_is_missing() if target.platform == "cuda" else aot_tpu.what_is_missing()


def prepare(target: Target) -> None:
    """Set the options that the compiler reads when it is loaded, before JAX starts a device."""
    if target.platform == "tpu":
        aot_tpu.prepare()
    else:
        aot_tpu.keep_to_the_cpu()


def devices(target: Target, topology: str) -> list[Any]:
    """The devices of a topology. Programs can be compiled for them, and nothing else.

    Raises:
        ValueError: the compiler does not know the topology.
    """
    try:
        if target.platform == "cuda":
            text = aot.HOPPER.format(**aot.TARGETS[target.name]._asdict())
            return topologies.get_topology_desc(
                platform="cuda", target_config=text, topology=topology
            ).devices
        return topologies.get_topology_desc(topology, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the compiler has no topology {topology}: {error}") from None


def of_device(device: Any) -> AbstractContextManager[Any]:
    """A context to trace a program for one device in.

    Kernels read the kind of the chip from the mesh, and a program for one device has no other mesh.
    """
    return jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("x",)).abstract_mesh)

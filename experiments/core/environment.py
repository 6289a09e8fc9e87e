"""The environment of a run: code, versions, device, processor, and the load of the machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "pagedjax")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_SOURCES = (
    "pagedjax/**/*.py",
    "pallas_kernels/**/*.py",
    "pallas_kernels/tiles/*.json",
    "experiments/*.py",
    "experiments/core/**/*.py",
    "experiments/simulation/**/*.py",
    "experiments/analysis/**/*.py",
)
_NO_DEVICE = {"platform": None, "kind": None, "count": 0, "processes": 1}
_FLAG_FAMILIES = ("JAX_", "XLA_PYTHON_CLIENT_")


def environment(*, device: bool = True) -> dict[str, Any]:
    """Commit, code, versions, device, processor and flags of this process; no name of a machine or
    user.

    device: False leaves the device out and does not start JAX's backend.
    """
    return {
        **git_state(Path(__file__).parent),
        "source": source(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": _device() if device else _NO_DEVICE,
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "usable_cores": usable_cores()},
        "flags": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _FLAGS or name.startswith(_FLAG_FAMILIES)
        },
    }


def code() -> dict[str, str | None]:
    """The code that makes a run: numbers can be compared if these values are equal."""
    return {"source": source(), "jax": _version("jax")}


@functools.cache
def source() -> str:
    """A hash of the code that measures, committed or not: 16 digits, as the files were at the first
    call.
    """
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def source_files(root: Path) -> list[Path]:
    """The files below `root` that determine the results of a run, sorted.

    Not among them: folders whose modules only start runs or read them (studies, bench, hardware,
    training, results), and other libraries. JAX is compared by its version (`code`).
    """
    return sorted(path for place in _SOURCES for path in root.glob(place))


def _device() -> dict[str, Any]:
    import jax

    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }


def git_state(folder: Path) -> dict[str, Any]:
    """The commit of `folder`, and whether tracked files differ from it; both None outside a
    repository.
    """

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(folder), *arguments]
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # a checkout that is not installed; the commit identifies it


def cpu_model() -> str:
    """The processor's marketing name if the system has it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int | None:
    # Linux only; respects the limits of a container
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def load_average() -> float | None:
    """The mean number of processes that wanted a core in the last minute.

    If it is above the number of cores, other processes slow a run down.
    """
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def processor_time() -> tuple[int, int] | None:
    """(used, stolen) processor time of this machine, all cores together, in jiffies; None if not on
    Linux.
    """
    try:
        first_line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        numbers = [int(number) for number in first_line.split()[1:]]
        user, nice, system, _, _, irq, softirq, stolen = numbers[:8]
    except (OSError, ValueError, IndexError):
        return None
    return user + nice + system + irq + softirq, stolen


def stolen_share(since: tuple[int, int] | None) -> float | None:
    """The share of the processor time requested since `since` that the host gave to other machines.

    In a virtual machine, the load average does not show a busy neighbour; this share does.
    """
    end = processor_time()
    if since is None or end is None:
        return None
    used, stolen = (after - before for after, before in zip(end, since, strict=True))
    return round(stolen / max(used + stolen, 1), 3)

"""Finished programs of steps, in memory and on disk: an engine that finds its program here traces
nothing.

The key of JAX's own cache is the lowered program, so a program must be traced before it is found.
Here the key is a hash of everything that a program is made from, and names its file:

- the source code of `pagedjax.device`, `pagedjax.engine`, `pagedjax.options.config` and `pallas_kernels`,
  with its tuned tiles, and the versions of JAX and what it needs;
- the model's structure, the attention, the sampling options, the seed, and the shapes and dtypes of
  all arguments;
- XLA's options, JAX's settings, and the device.

A program is kept only if all its code is in these packages, unchanged since the import. Programs
with a user's own code or with replaced functions are compiled as always; so are all programs on a
mesh or in several processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import lapack

from pagedjax.device import attention
from pagedjax.engine import compilations

PACKAGES = ("pagedjax", "pallas_kernels")
TRACED = ("pagedjax.device", "pallas_kernels")  # modules whose functions are in programs
HASHED = ("device", "engine", "options")  # of pagedjax: what is traced, and what decides it
LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
PREFIX = "step-"  # the first letters of a file's name
PARTIAL_PREFIX = "part-step-"  # the same of a file that is being written
MAX_BYTES = 2**29  # of all files; the file that was not used for the longest time is removed first
HOUR = 3600.0  # seconds
COMPRESSION = 1  # zlib's level: a fourteenth of a CPU's program in 15 ms
# A setting of JAX with one of these words in its name changes no program, such as a cache's folder.
IGNORED_SETTINGS = (
    "cache",
    "dump",
    "_log",
    "profiler",
    "traceback",
    "distributed",
    "persistent",
    "check_tracer",
    "explain",
)

log = logging.getLogger("pagedjax.engine")
# the programs of all engines of this process, by their key
_programs: WeakValueDictionary[str, Any] = WeakValueDictionary()
_lock = threading.Lock()  # of _programs
_imported_lock = threading.Lock()  # of _imported


def program(
    facts: Iterable[Any] | None, arguments: Any, device: Any, compile_: Callable[[], Any]
) -> Any:
    """Returns the compiled program of these arguments: the program of another engine, or one from
    disk, or a new one.

    Args:
        facts: what the program is made from, except its arguments and what is equal in the whole
            process. A fact has the same `str` in each process. None: the program is not kept.
        arguments: arrays or their shapes.
        device: the device that runs the program.
        compile_: compiles a new program.
    """
    if facts is None or not _as_imported():
        return compile_()
    key = _key(facts, arguments, device)
    with _lock:
        present = _programs.get(key)
    if present is not None:
        compilations.count_kept()
        return present
    folder = compilations.folder()
    file = folder / f"{PREFIX}{key}" if folder and _is_known(device) else None
    loaded = _load(file, device) if file else None
    if loaded is not None:
        compilations.count_kept()
    cached = compilations.cached_by_thread()
    compiled = compile_() if loaded is None else loaded
    # not a program from JAX's cache: XLA would write it incompletely
    if file and loaded is None and compilations.cached_by_thread() == cached:
        _keep(file, compiled)
    with _lock:
        _programs[key] = compiled
    return compiled


# the key ------------------------------------------------------------------------------------------


def _key(facts: Iterable[Any], arguments: Any, device: Any) -> str:
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    parts = (
        _code(),
        _settings(),
        _device(device),
        str(tree),
        shapes,
        [str(fact) for fact in facts],
    )
    return blake2b(repr(parts).encode(), digest_size=20).hexdigest()


@cache
def _code() -> str:
    """Returns a hash of the source code, the tuned sizes of kernels, and the versions of the
    libraries.
    """
    digest = blake2b(digest_size=16)
    for package in PACKAGES:
        root = Path(str(sys.modules[package].__file__)).parent
        for file in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
            part = file.relative_to(root)
            if package != "pagedjax" or part.parts[0] in HASHED:
                digest.update(f"{package}/{part}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest() + repr([version(library) for library in LIBRARIES])


def _settings() -> list[tuple[str, str]]:
    """Returns JAX's settings and XLA's flags that may change a program."""
    settings = {
        name: str(getattr(jax.config, name, value)) for name, value in jax.config.values.items()
    }
    relevant = [
        (name, value)
        for name, value in sorted(settings.items())
        if not any(word in name for word in IGNORED_SETTINGS)
    ]
    flags = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    return [*relevant, *[(name, os.environ.get(name, "")) for name in flags]]


def _device(device: Any) -> tuple[Any, ...]:
    """Returns what identifies a kind of device: machine code for one CPU may not run on another."""
    features = _cpu_features() if device.platform == "cpu" else ""
    return device.platform, device.device_kind, device.id, device.client.platform_version, features


def _is_known(device: Any) -> bool:
    """Returns whether the key excludes all devices that cannot run the device's machine code."""
    return device.platform != "cpu" or bool(_cpu_features())


@cache
def _cpu_features() -> str:
    """Returns the model and the instructions of this machine's processor; empty if the system does
    not tell them.
    """
    words = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        text = Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return ""
    first_processor = text.partition("\n\n")[0]
    features = [line for line in first_processor.splitlines() if line.startswith(words)]
    return repr((platform.machine(), features)) if features else ""


# code as it was imported --------------------------------------------------------------------------


# by module or class, what it contained when `_as_imported` first saw it
_imported: dict[str, dict[str, Any]] = {}


def _as_imported() -> bool:
    """Returns whether no function or constant of a module in `TRACED` was replaced since this
    function first saw the module.
    """
    with _imported_lock:
        # other threads import meanwhile, so each dictionary is copied before it is read
        modules = {
            name: module
            for name, module in list(sys.modules.items())
            if _is_traced(name)
            and isinstance(module, ModuleType)
            and not getattr(module.__spec__, "_initializing", False)  # its import has ended
        }
        # a list, because `_unchanged` has to see every module
        return all([_unchanged(name, dict(vars(module))) for name, module in modules.items()])


def _is_traced(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in TRACED)


def _unchanged(name: str, content: Mapping[str, Any]) -> bool:
    """Returns whether a module or class has the code that it had when this function first saw it.

    Args:
        content: what the module or class contains now.
    """
    if name not in _imported:
        _imported[name] = {key: value for key, value in content.items() if _is_code(key, value)}
    imported = _imported[name]
    if any(content.get(key) is not value for key, value in imported.items()):
        return False
    classes = [
        value
        for value in imported.values()
        if isinstance(value, type) and _is_traced(value.__module__)
    ]
    return all([_unchanged(f"{name}:{value.__name__}", dict(vars(value))) for value in classes])


def _is_code(name: str, value: Any) -> bool:
    """Returns whether a value is a function, a class or a constant, and not a module's state."""
    return callable(value) or isinstance(value, property) or name.lstrip("_").isupper()


_as_imported()  # most modules are imported before this one


# files --------------------------------------------------------------------------------------------


def _keep(file: Path, compiled: Any) -> None:
    """Write a program for other processes, atomically. If it cannot be written, nothing is kept."""
    try:
        content = zlib.compress(pickle.dumps(serialize_executable.serialize(compiled)), COMPRESSION)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=PARTIAL_PREFIX, dir=file.parent)
        try:
            with open(handle, "wb") as out:
                out.write(_digest(content) + content)
            os.replace(partial, file)
        finally:
            Path(partial).unlink(missing_ok=True)
        _remove_old(file.parent)
    except Exception as error:  # of the file system, or a program that JAX cannot serialize
        log.debug("a program is not kept: %s", error)


def _load(file: Path, device: Any) -> Any:
    """Returns the program of a file; None if there is none, or it cannot be used here."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    size = len(_digest(b""))
    try:
        if content[:size] != _digest(content[size:]):
            raise ValueError("its content has changed")
        serialized, arguments, results = pickle.loads(zlib.decompress(content[size:]))
        attention.register_kernels(serialized)
        _find_lapack(serialized)
        compiled = serialize_executable.deserialize_and_load(
            serialized, arguments, results, backend=device.client, execution_devices=[device]
        )
    except Exception as error:
        log.info("%s is no program for this process, and is made again: %s", file, error)
        file.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    return compiled


def _find_lapack(serialized: bytes) -> None:
    """Finds LAPACK's functions for a program that calls them, such as a triangular solve on a CPU.
    JAX finds them when it lowers such a program; before that, calls of them end the process.
    """
    if b"lapack_" in serialized:
        lapack.prepare_lapack_call("trsm_ffi", np.dtype(np.float32))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def _remove_old(folder: Path) -> None:
    """Remove the files that were unused for the longest time, until the rest fits in MAX_BYTES."""
    files = [
        (file.stat().st_mtime, file.stat().st_size, file) for file in folder.glob(f"{PREFIX}*")
    ]
    room = MAX_BYTES
    for _, size, file in sorted(files, reverse=True):
        room -= size
        if room < 0:
            file.unlink(missing_ok=True)
    for partial in folder.glob(f"{PARTIAL_PREFIX}*"):  # left by processes that were killed
        if time.time() - partial.stat().st_mtime > HOUR:
            partial.unlink(missing_ok=True)

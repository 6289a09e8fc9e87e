"""Object code of CPU kernels on disk, so that a process that finds it does not compile.

A file has one variant of a kernel. Its name is a hash of everything the code depends on: the
kernel's source, the compiler, the CPU. The versions of Python and JAX are not in it: the code
refers to no symbol of theirs, only to `SYMBOLS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import llvmlite
from llvmlite import binding

from pallas_kernels.shared.cpu import compiler

# C functions that object code calls. LLVM calls `memset` for a loop that writes zeros.
SYMBOLS = ("malloc", "free", "sched_yield", "expf", "memset", "madvise", "usleep")
MAX_FILES = 8  # most files of a variant in a folder, which machines and versions may share


def symbol(name: str) -> str:
    """Returns the name of a variant's handler in its object code."""
    return f"pallas_kernels_{name}"


def place(name: str, folder: Path) -> Path | None:
    """Returns the file of a variant on this machine; None if the kernel's source is not there.

    Args:
        name: of the variant; names of its files begin with it.
        folder: of the kernel's own source. The source in the folder of this file is hashed too.
    """
    if not folder.is_dir():
        return None
    folders = folder, Path(__file__).parent
    sources = [source for directory in folders for source in sorted(directory.glob("*.py"))]
    machine = [binding.get_process_triple(), *compiler.cpu(), compiler.passes()]
    facts = [llvmlite.__version__, machine, [source.read_text("utf-8") for source in sources]]
    key = blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    return _folder() / f"{name}-{key}"


def _folder() -> Path:
    """Returns JAX's folder of compiled programs, or pagedjax's default for it if it is unset."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder or "://" in folder:  # unset, or not a folder
        folder = os.path.expanduser("~/.cache/pagedjax/xla")
    return Path(folder)


def read(file: Path) -> bytes | None:
    """Returns the object code that `keep` wrote; None if there is no file or it has changed."""
    try:
        digest, _, code = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    return code if digest == _digest(file, code) else None


def keep(file: Path, code: bytes) -> None:
    """Writes object code for other processes, atomically. Errors of the file system are ignored."""
    variant = file.name.rpartition("-")[0]
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{variant}-", dir=file.parent)
        try:
            with open(handle, "wb") as written:
                written.write(_digest(file, code) + b"\n" + code)
            os.replace(name, file)
        finally:
            Path(name).unlink(missing_ok=True)
        by_age = sorted(file.parent.glob(f"{variant}-*"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-MAX_FILES]:
            old.unlink(missing_ok=True)


def _digest(file: Path, code: bytes) -> bytes:
    return blake2b(file.name.encode() + code).hexdigest().encode()


def load(code: bytes, *names: str) -> list[int]:
    """Loads object code. Returns the addresses of functions in it.

    Raises:
        RuntimeError: the process lacks one of `SYMBOLS`. Without this check LLVM would end the
            process.
    """
    compiler.initialize()
    target = binding.Target.from_triple(binding.get_process_triple())
    machine = target.create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    # symbols are resolved after an engine exists
    missing = [name for name in SYMBOLS if not binding.address_of_symbol(name)]
    if missing:
        raise RuntimeError(f"this process has no C function {', '.join(missing)}")
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    return [engine.get_function_address(name) for name in names]


_loaded: list[Any] = []  # keeps the code in memory: XLA has only its addresses

"""Object code of CPU kernels on disk, so that a process that finds it does not import numba.

The file's name is a hash of everything the code depends on: the kernel's source, the compiler, the CPU. The versions of
Python and JAX are not in it: the code refers to no symbol of theirs, only to `SYMBOLS`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from llvmlite import binding

SYMBOLS = ("malloc", "free", "sched_yield", "expf")  # the symbols that object code needs in its process
MOST = 8  # files of a kernel in a folder at most: machines that share it and versions have one each


def symbol(part: str) -> str:
    """Returns the name of a kernel's function in its object code. Names of parts begin with that of the kernel."""
    return f"pallas_kernels_{part}"


def place(name: str, folder: Path) -> Path | None:
    """Returns the file of a kernel on this machine; None if it is unknown.

    Args:
        name: files begin with it.
        folder: of the kernel's own source; this folder's is also a part of it.
    """
    sources = [source for each in (folder, Path(__file__).parent) for source in sorted(each.glob("*.py"))]
    try:
        versions = [version("numba"), version("llvmlite")]
    except PackageNotFoundError:
        return None
    machine = [binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()]
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))  # such as NUMBA_OPT
    facts = [versions, machine, settings, [source.read_text("utf-8") for source in sources]]
    key = blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    return _folder() / f"{name}-{key}" if folder.is_dir() else None


def _folder() -> Path:
    """Returns JAX's folder of compiled programs, which need the object code; if unset, pagedjax's default for it."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder or "://" in folder:  # unset, or not a folder
        folder = os.path.expanduser("~/.cache/pagedjax/xla")
    return Path(folder)


def read(file: Path) -> list[bytes] | None:
    """Returns the object code that `keep` wrote; None if there is no such file or it has changed."""
    try:
        digest, _, content = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(file, content):
        return None
    return [base64.b64decode(code) for code in json.loads(content)]


def keep(file: Path, objects: Sequence[bytes]) -> None:
    """Writes object code for other processes, atomically. An error of the file system is ignored."""
    content = json.dumps([base64.b64encode(code).decode() for code in objects]).encode()
    kind = file.name.rpartition("-")[0]
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{kind}-", dir=file.parent)
        try:
            with open(handle, "wb") as written:
                written.write(_digest(file, content) + b"\n" + content)
            os.replace(name, file)
        finally:
            Path(name).unlink(missing_ok=True)
        by_age = sorted(file.parent.glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-MOST]:
            old.unlink(missing_ok=True)


def _digest(file: Path, content: bytes) -> bytes:
    return blake2b(file.name.encode() + content).hexdigest().encode()


def load(objects: Sequence[bytes], handler: str) -> int | None:
    """Returns the address of the function `handler`; None if the process lacks one of `SYMBOLS`: LLVM would abort."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    if not all(binding.address_of_symbol(name) for name in SYMBOLS):  # resolved after an engine exists
        return None
    for code in objects:
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    return engine.get_function_address(handler)


_loaded: list[Any] = []  # keeps the code in memory: XLA has only its addresses

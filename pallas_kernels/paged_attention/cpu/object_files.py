"""Object code of the CPU kernel, kept on disk, so that a process that finds it there imports no numba.

It is kept under a hash of all that it depends on: the kernel's source, the compiler, the CPU. Neither Python's version
nor JAX's is part of that: the code refers to nothing of theirs, only to `SYMBOLS`.
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

SYMBOLS = ("malloc", "free", "sched_yield", "expf")  # what object code needs of the process that loads it
NAME = "paged_attention_cpu"  # files begin with it
MOST = 8  # files that stay in a folder: those of other machines that share it, or of other versions


def symbol(part: str) -> str:
    """The name of a function of the kernel in its object code."""
    return f"pallas_kernels_paged_attention_{part}"


HANDLER = symbol("handler")


def place(kernel: Path = Path(__file__).parent) -> Path | None:
    """The file for the kernel with its source in a folder, on this machine; None where the two cannot be told."""
    sources = sorted(kernel.glob("*.py"))
    try:
        versions = [version("numba"), version("llvmlite")]
    except PackageNotFoundError:
        return None
    machine = [binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()]
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))  # of optimisation, say
    facts = [versions, machine, settings, [source.read_text("utf-8") for source in sources]]
    key = blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    return _folder() / f"{NAME}-{key}" if sources else None


def _folder() -> Path:
    """Beside XLA's programs, which are no use without it: where JAX keeps them, or else where pagedjax would."""
    told = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not told or "://" in told:  # none, or one that is no folder
        told = os.path.expanduser("~/.cache/pagedjax/xla")
    return Path(told)


def read(file: Path) -> list[bytes] | None:
    """What `keep` wrote; None where it did not, or where anything about it has changed."""
    try:
        digest, _, content = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != _digest(file, content):
        return None
    return [base64.b64decode(code) for code in json.loads(content)]


def keep(file: Path, objects: Sequence[bytes]) -> None:
    """Write object code for other processes, in one go; where that is impossible there is none."""
    content = json.dumps([base64.b64encode(code).decode() for code in objects]).encode()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{NAME}-", dir=file.parent)
        try:
            with open(handle, "wb") as written:
                written.write(_digest(file, content) + b"\n" + content)
            os.replace(name, file)
        finally:
            Path(name).unlink(missing_ok=True)
        by_age = sorted(file.parent.glob(f"{NAME}-*"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-MOST]:
            old.unlink(missing_ok=True)


def _digest(file: Path, content: bytes) -> bytes:
    return blake2b(file.name.encode() + content).hexdigest().encode()


def load(objects: Sequence[bytes]) -> int | None:
    """The address of XLA's handler; None where this process lacks one of `SYMBOLS`, without which LLVM would end it."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    if not all(binding.address_of_symbol(name) for name in SYMBOLS):  # of this process, once there is an engine
        return None
    for code in objects:
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    return engine.get_function_address(HANDLER)


_loaded: list[Any] = []  # XLA holds bare addresses

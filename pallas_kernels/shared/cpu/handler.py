"""A handler of XLA's FFI that numba compiles, or that is read from disk: found once a process, by whoever needs it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
from pathlib import Path

import jax


HANDLERS: list[Handler] = []  # of all kernels that are imported


def register_called(program: bytes) -> None:
    """Registers the handlers that a compiled program calls. Its code has the names of their targets."""
    for handler in HANDLERS:
        if handler.target.encode() in program:
            handler.register()


class Handler:
    """A compiled handler of a kernel.

    numba (the `cpu` extra) compiles the kernel when it is first used on a machine. The object code is stored on disk,
    and a process that finds it does not import numba.
    """

    def __init__(self, name: str, target: str, package: str, folder: Path) -> None:
        """
        Args:
            name: of the files on disk, and of the functions in the object code.
            target: in XLA's programs. Programs on disk contain it: a handler of other arguments needs another one.
            package: its module `kernel` has `compile_handler()`, which returns (address, object code).
            folder: of the package.
        """
        self.name, self.target, self.package, self.folder = name, target, package, folder
        self.registered = False
        self._lock = threading.Lock()
        HANDLERS.append(self)

    def register(self) -> None:
        """Loads or compiles the handler, once a process.

        Tracing calls this. Programs from the compilation cache on disk are also traced before they are looked up, so
        the handler is registered for them as well.
        """
        with self._lock:
            if not self.registered:
                capsule = jax.ffi.pycapsule(ctypes.c_void_p(self._address()))
                jax.ffi.register_ffi_target(self.target, capsule, platform="cpu")
                self.registered = True

    def start(self) -> None:
        """Begins to load or compile in a thread. Tracing waits for it, and fails with the same error if it fails.

        Compiling takes seconds and runs Python code most of the time, so other Python code beside it slows down;
        reading weights does not.
        """

        def quietly() -> None:
            with contextlib.suppress(Exception):
                self.register()

        threading.Thread(target=quietly, name=self.name).start()

    def _address(self) -> int:
        from pallas_kernels.shared.cpu import object_files  # imports llvmlite

        file = object_files.place(self.name, self.folder)
        objects = object_files.read(file) if file else None
        address = object_files.load(objects, object_files.symbol(f"{self.name}_handler")) if objects else None
        if address is None:
            kernel = importlib.import_module(f"{self.package}.kernel")  # imports numba
            address, objects = kernel.compile_handler()
            if file and objects:
                object_files.keep(file, objects)
        return address

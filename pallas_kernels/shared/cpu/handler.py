"""Handlers of XLA's FFI, loaded from disk or compiled once in a process, beside other work."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

HANDLERS: list[Handler] = []  # of all kernels that are imported


def register_called(program: bytes) -> None:
    """Registers the handlers that a compiled program calls.

    The program's code has the names of their targets. A name ends with a dot, so that no name is
    the beginning of another one.
    """
    for handler in HANDLERS:
        if handler.target.encode() in program:
            handler.register()


class Handler:
    """A variant of a kernel as XLA calls it.

    llvmlite (the `cpu` extra) compiles it when it is first used on a machine. The object code is
    stored on disk.
    """

    def __init__(
        self,
        name: str,
        target: str,
        package: str,
        folder: Path,
        options: Mapping[str, int],
    ) -> None:
        """
        Args:
            name: of the file on disk, and of the function in the object code.
            target: the handler's name in XLA's programs. Programs on disk contain it, so a handler
                that takes other arguments needs another target.
            package: that of the kernel. Its module `kernel` has the function `handle(frame)`.
            folder: of the package.
            options: the values of the kernel's `Option`s.
        """
        self.name = name
        self.target = target
        self.package = package
        self.folder = folder
        self.options = dict(options)
        self.registered = False
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._trampoline: Any = None
        HANDLERS.append(self)

    def start(self) -> None:
        """Begins to load or compile in a thread, once in a process.

        Compiling takes about a second of CPU time, almost all of it in LLVM and without Python's
        lock.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self.name)
                self._thread.start()

    def register(self) -> None:
        """Makes the handler known to XLA, and starts it. A call of it waits until it is compiled.

        Tracing calls this. Programs from the compilation cache on disk are also traced before they
        are looked up, so the handler is registered for them as well.

        Raises:
            RuntimeError: the handler could not be compiled. A program that was traced before that
                fails when it runs.
        """
        self.start()
        if self._error is not None:
            raise RuntimeError(self._reason(self._error)) from self._error
        try:
            trampoline = self._entry()
        except Exception as error:
            raise RuntimeError(self._reason(error)) from error
        with self._lock:
            if not self.registered:
                capsule = jax.ffi.pycapsule(ctypes.c_void_p(trampoline.address))
                jax.ffi.register_ffi_target(self.target, capsule, platform="cpu")
                self.registered = True

    def wait(self) -> None:
        """Waits until the handler is loaded or compiled, and its object code stored.

        Raises:
            RuntimeError: it could not be compiled.
        """
        self.register()
        assert self._thread is not None
        self._thread.join()
        self.register()  # raises if it could not be compiled

    def _entry(self) -> Any:
        """Returns the trampoline that XLA calls."""
        with self._lock:
            if self._trampoline is None:
                from pallas_kernels.shared.cpu import trampolines  # imports llvmlite

                self._trampoline = trampolines.take()
            return self._trampoline

    def _reason(self, error: Exception) -> str:
        cause = f"{type(error).__name__}: {error}"
        remedy = "pip install -U 'pagedjax[cpu]', or set attention_impl='xla' and linear_impl='xla'"
        return f"the CPU kernel {self.name!r} could not be compiled: {cause}; {remedy}"

    def _serve(self) -> None:
        """Loads or compiles the handler, and lets calls through."""
        try:
            trampoline = self._entry()
        except Exception as error:
            self._error = error
            return
        try:
            self._load(trampoline)
        except Exception as error:
            self._error = error
            trampoline.fail(self._reason(error))

    def _load(self, trampoline: Any) -> None:
        from pallas_kernels.shared.cpu import object_files

        symbol = object_files.symbol(self.name)
        file = object_files.place(self.name, self.folder)
        code = object_files.read(file) if file else None
        is_new = code is None
        if code is None:
            code = self._compile(symbol)
        (address,) = object_files.load(code, symbol)
        trampoline.lead_to(address)
        if file and is_new:
            object_files.keep(file, code)

    def _compile(self, symbol: str) -> bytes:
        from pallas_kernels.shared.cpu import compiler
        from pallas_kernels.shared.cpu.translate import Translation

        kernel = importlib.import_module(f"{self.package}.kernel")
        translation = Translation()
        translation.export(kernel.handle, symbol, self.options)
        return compiler.object_code(translation)

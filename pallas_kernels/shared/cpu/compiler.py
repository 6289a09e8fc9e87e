"""LLVM, as llvmlite has it: the CPU that code is compiled for, and object code of translations.

llvmlite's functions release the GIL, and hold a lock of their own: two threads do not compile at
the same time.
"""

from __future__ import annotations

import os
from typing import Any

from llvmlite import binding

from pallas_kernels.shared.cpu.translate import Translation

# LLVM's level of optimisation. With 2, compiling takes 3/4 of the time, and float32 decodes take a
# fifth longer.
LEVEL = 3

# Variables of the environment, for tests: LLVM's names of a CPU with fewer instructions than this
# machine's, and of its features
CPU_NAME = "PALLAS_KERNELS_CPU_NAME"
CPU_FEATURES = "PALLAS_KERNELS_CPU_FEATURES"
# "few": few of LLVM's passes. Compiling takes a quarter of the time.
PASSES = "PALLAS_KERNELS_CPU_PASSES"


def cpu() -> tuple[str, str]:
    """Returns LLVM's names of the CPU that code is compiled for and of its features."""
    name = os.environ.get(CPU_NAME) or binding.get_host_cpu_name()
    features = os.environ.get(CPU_FEATURES) or binding.get_host_cpu_features().flatten()
    return name, features


def passes() -> str:
    """Returns which passes of LLVM code is compiled with: "few" or "all"."""
    return os.environ.get(PASSES) or "all"


def has(feature: str) -> bool:
    """Returns whether code is compiled for CPUs with a feature of LLVM."""
    return f"+{feature}" in cpu()[1].split(",")


def initialize() -> None:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()


def _machine() -> Any:
    name, features = cpu()
    target = binding.Target.from_triple(binding.get_process_triple())
    x86 = target.name.startswith("x86")
    options = {"reloc": "static" if x86 else "default", "codemodel": "jitdefault", "jit": True}
    return target.create_target_machine(cpu=name, features=features, opt=LEVEL, **options)


def object_code(translation: Translation, level: int = LEVEL) -> bytes:
    """Compiles a module."""
    initialize()
    machine = _machine()
    translation.module.triple = binding.get_process_triple()
    translation.module.data_layout = str(machine.target_data)
    # The module has a context of its own. The memory of LLVM's global context is never given back.
    module = binding.parse_assembly(str(translation.module), binding.create_context())
    module.verify()
    tuning = binding.create_pipeline_tuning_options(speed_level=level)
    tuning.loop_vectorization = level > 1
    tuning.slp_vectorization = level > 1
    builder = binding.create_pass_builder(machine, tuning)
    manager = _few_passes() if passes() == "few" else builder.getModulePassManager()
    manager.run(module, builder)
    return machine.emit_object(module)


def _few_passes() -> Any:
    """Variables become registers, and code generation does the rest."""
    manager = binding.create_new_module_pass_manager()
    manager.add_sroa_pass()
    return manager

"""Object code of CPU kernels on disk: other processes find it, and ignore a file that has
changed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("llvmlite") is None:
    pytest.skip("the cpu extra is not installed", allow_module_level=True)

from pallas_kernels.linear import BLOCKS
from pallas_kernels.linear.cpu import implementation as linear_cpu
from pallas_kernels.paged_attention.cpu import implementation as cpu
from pallas_kernels.shared.cpu import compiler, object_files
from tests.fresh_python import output_of

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from tests.pallas_kernels.test_paged_attention import assert_contract, make
assert_contract(make([(1, 40), (9, 21), (1, 300)], t=11, b=3), "cpu")
print("pallas_kernels.paged_attention.cpu.kernel" in sys.modules)
"""


# under the passes of users, and not those of tests
ALL_PASSES = """
from tests.pallas_kernels import test_linear
from tests.pallas_kernels.test_paged_attention import assert_contract, make
assert_contract(make([(1, 40), (9, 21), (1, 300)], t=11, b=3), "cpu")
for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "int8": True}):
    arguments = test_linear.case(**test_linear.CASES["a decode"], **options)
    test_linear.assert_contract(arguments, "cpu")
"""


HANDLER = cpu.handler_of("float32", "float32", False)
# of matrices in blocks, a format for each dtype of tokens
FORMATS = ("float32", "q4_1"), ("bfloat16", "q6_k")
SAMPLED_PRODUCTS = [
    handler
    for (dtype, weight_dtype, _, _), handler in linear_cpu.HANDLERS.items()
    if weight_dtype not in BLOCKS or (dtype, weight_dtype) in FORMATS
]


@pytest.fixture(scope="module")
def object_file() -> Path:
    """The file of this machine, from the cache that tests share."""
    HANDLER.wait()
    file = object_files.place(HANDLER.name, HANDLER.folder)
    assert file
    return file


def start_process(folder: Path) -> subprocess.Popen[str]:
    """Starts a process that checks the kernel's results, and prints whether it compiled the
    kernel.
    """
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, stdout=-1, stderr=-1, text=True
    )


def has_compiled(process: subprocess.Popen[str]) -> bool:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return {"True": True, "False": False}[output.split()[-1]]


def undefined(code: bytes) -> Iterator[str]:
    """The undefined symbols of an ELF object of 64 bits."""
    (sections,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    table = [struct.unpack_from("<IIQQQQII", code, sections + size * i) for i in range(count)]
    for _, kind, _, _, offset, length, link, _ in table:
        if kind == 2:  # the table of symbols
            for at in range(offset, offset + length, 24):
                name, _, _, section = struct.unpack_from("<IBBH", code, at)
                begin = table[link][4] + name
                if section == 0 and name:
                    yield code[begin : code.index(b"\0", begin)].decode()


def test_a_process_that_finds_object_code_does_not_compile(object_file, tmp_path):
    shutil.copy(object_file, tmp_path)
    assert not has_compiled(start_process(tmp_path))


@pytest.mark.parametrize(
    "handler",
    [
        HANDLER,
        linear_cpu.HANDLERS["float32", "float32", False, False],
        *(
            pytest.param(handler, marks=pytest.mark.slow)
            for handler in (*cpu._HANDLERS.values(), *SAMPLED_PRODUCTS)
            if handler not in (HANDLER, linear_cpu.HANDLERS["float32", "float32", False, False])
        ),
    ],
    ids=lambda handler: handler.name,
)
def test_object_code_is_kept_and_needs_no_symbol_of_python(handler):
    """LLVM ends the process where a symbol is missing."""
    handler.wait()
    file = object_files.place(handler.name, handler.folder)
    assert file
    code = object_files.read(file)
    assert code
    if not code.startswith(b"\x7fELF"):
        pytest.skip("another format than ELF")
    assert set(undefined(code)) <= set(object_files.SYMBOLS)


def test_stored_object_code_is_read_and_changed_files_are_not(tmp_path):
    file = tmp_path / "made" / "of_this"
    code = b"one\n\0" + bytes(range(256))
    assert object_files.read(file) is None
    object_files.keep(file, code)
    assert object_files.read(file) == code
    content = file.read_bytes()
    changed = bytearray(content)
    changed[-9] ^= 1
    for wrong in (content[:-1], content[: len(content) // 2], b"", bytes(changed), content + b" "):
        file.write_bytes(wrong)
        assert object_files.read(file) is None
    object_files.keep(file, code)
    assert object_files.read(file) == code
    foreign = shutil.copy(file, tmp_path / "of_another")
    assert object_files.read(foreign) is None


def test_a_folder_that_cannot_be_written_gives_no_error(tmp_path):
    (tmp_path / "file").write_text("no folder")
    object_files.keep(tmp_path / "file" / "kernel", b"code")
    (tmp_path / "kernel").mkdir()
    assert object_files.read(tmp_path / "kernel") is None
    object_files.keep(tmp_path / "kernel", b"code")
    assert (tmp_path / "file").read_text() == "no folder"
    assert (tmp_path / "kernel").is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "kernel"}


def test_old_files_are_deleted(tmp_path):
    unrelated = tmp_path / "jit_step-0123-cache"
    unrelated.write_text("XLA's")
    for i in range(object_files.MAX_FILES + 3):
        file = tmp_path / f"{HANDLER.name}-{i}"
        object_files.keep(file, b"code")
        os.utime(file, (i, i))
    object_files.keep(tmp_path / f"{HANDLER.name}-last", b"code")
    names = {path.name.removeprefix(f"{HANDLER.name}-") for path in tmp_path.iterdir()}
    newest = range(4, object_files.MAX_FILES + 3)
    assert names == {unrelated.name, "last", *map(str, newest)}


def test_file_name_depends_on_source_and_settings(tmp_path, monkeypatch):
    for source in Path(cpu.__file__).parent.glob("*.py"):
        shutil.copy(source, tmp_path)
    path = object_files.place("kernel", tmp_path)
    assert path == object_files.place("kernel", HANDLER.folder)
    paths = [path, object_files.place("another", tmp_path)]
    for name in ("kernel.py", "vectors.py", "items.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text("utf-8") + "\n", "utf-8")
        paths.append(object_files.place("kernel", tmp_path))
    monkeypatch.setenv(compiler.PASSES, "all" if compiler.passes() == "few" else "few")
    paths.append(object_files.place("kernel", tmp_path))
    monkeypatch.setenv(compiler.CPU_FEATURES, "+avx2")
    paths.append(object_files.place("kernel", tmp_path))
    shared = tmp_path / "shared"
    shutil.copytree(Path(object_files.__file__).parent, shared)
    (shared / "memory.py").write_text("changed")
    monkeypatch.setattr(object_files, "__file__", str(shared / "object_files.py"))
    paths.append(object_files.place("kernel", tmp_path))
    assert len(set(paths)) == len(paths)
    assert object_files.place("kernel", tmp_path / "nowhere") is None


def test_kernels_with_all_passes_of_llvm_fulfil_their_contracts(tmp_path):
    environment = {compiler.PASSES: "all", "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    output_of(ALL_PASSES, **environment)
    assert len(list(tmp_path.glob(f"{HANDLER.name}*"))) == 1


@pytest.mark.slow
def test_concurrent_processes_replace_a_broken_file(object_file, tmp_path):
    file = tmp_path / object_file.name
    nowhere = tmp_path / "nowhere"
    file.write_bytes(object_file.read_bytes()[:-100])
    nowhere.write_text("no folder")
    assert all(
        [
            has_compiled(process)
            for process in [
                start_process(tmp_path),
                start_process(tmp_path),
                start_process(nowhere),
            ]
        ]
    )
    assert not has_compiled(start_process(tmp_path))
    assert [path.name for path in tmp_path.glob(f"{HANDLER.name}*")] == [object_file.name]

"""Object code of the CPU kernel on disk: found by other processes, and right whatever lies there."""

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

if importlib.util.find_spec("numba") is None:
    pytest.skip("the cpu extra is not installed", allow_module_level=True)

from pallas_kernels.paged_attention import cpu, cpu_objects
from tests.test_paged_attention import make, run

ROOT = Path(__file__).parents[1]
PROGRAM = """
import sys
from tests.test_paged_attention import assert_contract, make
assert_contract(make([(1, 40), (9, 21), (1, 300)], t=11, b=3), "cpu")
print("numba" in sys.modules)
"""


@pytest.fixture(scope="module")
def kept() -> Path:
    """The file of this machine, from the cache that tests share."""
    run(make([(1, 9)], t=1, b=1), "cpu")
    file = cpu_objects.place()
    assert file
    return file


def started(folder: Path) -> subprocess.Popen[str]:
    """A process that checks what the kernel computes, and tells whether it imported numba."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, stdout=-1, stderr=-1, text=True)


def imported_numba(process: subprocess.Popen[str]) -> bool:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return {"True": True, "False": False}[output.split()[-1]]


def undefined(code: bytes) -> Iterator[str]:
    """Symbols that an ELF object of 64 bits leaves to others."""
    (sections,), (size, count) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    table = [struct.unpack_from("<IIQQQQII", code, sections + size * i) for i in range(count)]
    for _, kind, _, _, offset, length, link, _ in table:
        if kind == 2:  # the table of symbols
            for at in range(offset, offset + length, 24):
                name, _, _, section = struct.unpack_from("<IBBH", code, at)
                begin = table[link][4] + name
                if section == 0 and name:
                    yield code[begin : code.index(b"\0", begin)].decode()


def test_a_process_that_finds_object_code_imports_no_numba(kept, tmp_path):
    shutil.copy(kept, tmp_path)
    assert not imported_numba(started(tmp_path))


def test_object_code_needs_nothing_of_numba_or_python(kept):
    objects = cpu_objects.read(kept)
    assert objects
    if not objects[0].startswith(b"\x7fELF"):
        pytest.skip("another format than ELF")
    own = {cpu_objects.symbol(part) for part in ("attend", "attend_tile", "work")}
    assert {name for code in objects for name in undefined(code)} <= own | set(cpu_objects.SYMBOLS)


def test_what_was_kept_is_read_and_anything_else_is_not(tmp_path):
    file, objects = tmp_path / "made" / "of_this", [b"one\n\0", b"", bytes(range(256))]
    assert cpu_objects.read(file) is None
    cpu_objects.keep(file, objects)
    assert cpu_objects.read(file) == objects
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[-9] ^= 1
    for wrong in (whole[:-1], whole[: len(whole) // 2], b"", bytes(changed), whole + b" "):
        file.write_bytes(wrong)
        assert cpu_objects.read(file) is None
    cpu_objects.keep(file, objects)
    assert cpu_objects.read(file) == objects
    foreign = shutil.copy(file, tmp_path / "of_another")
    assert cpu_objects.read(foreign) is None


def test_where_nothing_can_be_written_nothing_is(tmp_path):
    (tmp_path / "file").write_text("no folder")
    cpu_objects.keep(tmp_path / "file" / "kernel", [b"code"])
    (tmp_path / "kernel").mkdir()
    assert cpu_objects.read(tmp_path / "kernel") is None
    cpu_objects.keep(tmp_path / "kernel", [b"code"])
    assert (tmp_path / "file").read_text() == "no folder"
    assert (tmp_path / "kernel").is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "kernel"}


def test_few_files_stay(tmp_path):
    others = tmp_path / "jit_step-0123-cache"
    others.write_text("XLA's")
    for i in range(cpu_objects.MOST + 3):
        file = tmp_path / f"{cpu_objects.NAME}-{i}"
        cpu_objects.keep(file, [b"code"])
        os.utime(file, (i, i))
    cpu_objects.keep(tmp_path / f"{cpu_objects.NAME}-last", [b"code"])
    names = {path.name.removeprefix(f"{cpu_objects.NAME}-") for path in tmp_path.iterdir()}
    newest = range(4, cpu_objects.MOST + 3)
    assert names == {others.name, "last", *map(str, newest)}


def test_other_source_and_other_settings_are_another_kernel(tmp_path, monkeypatch):
    for source in Path(cpu.__file__).parent.glob("cpu_*.py"):
        shutil.copy(source, tmp_path)
    same = cpu_objects.place(tmp_path)
    assert same == cpu_objects.place()
    found = [same]
    for name in ("cpu_kernel.py", "cpu_memory.py", "cpu_vectors.py", "cpu_items.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text("utf-8") + "\n", "utf-8")
        found.append(cpu_objects.place(tmp_path))
    monkeypatch.setenv("NUMBA_OPT", "1")
    found.append(cpu_objects.place(tmp_path))
    assert len(set(found)) == len(found)
    assert cpu_objects.place(tmp_path / "nowhere") is None


@pytest.mark.slow
def test_processes_that_race_to_replace_a_broken_file_and_one_that_can_write_none(kept, tmp_path):
    file, nowhere = tmp_path / kept.name, tmp_path / "nowhere"
    file.write_bytes(kept.read_bytes()[:-100])
    nowhere.write_text("no folder")
    assert all([imported_numba(process) for process in [started(tmp_path), started(tmp_path), started(nowhere)]])
    assert not imported_numba(started(tmp_path))
    assert [path.name for path in tmp_path.glob(f"{cpu_objects.NAME}*")] == [kept.name]

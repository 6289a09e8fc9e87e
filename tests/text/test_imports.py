"""Imports inside calls: Ctrl-C leaves no package half imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pagedjax.text.imports import imported

ROOT = Path(__file__).parents[2]


def test_a_module_is_imported_once_and_its_error_is_raised(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_module.py").write_text("raise RuntimeError('no such device')")
    with pytest.raises(RuntimeError, match="no such device"):
        imported("failing_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        imported("no_such_module")
    assert imported("json.decoder") is sys.modules["json.decoder"]


def test_ctrl_c_while_a_package_is_imported_harms_no_later_call(tmp_path):
    """In a new process: the package's second module is slow, and Ctrl-C comes while it is
    imported.
    """
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package import slow\nanswer = slow.answer\n")
    (package / "slow.py").write_text("import time\ntime.sleep(1)\nanswer = 42\n")
    code = """
        import os, signal, sys, threading
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        sys.path.insert(0, sys.argv[1])
        from pagedjax.text.imports import imported
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            imported("package")
        except KeyboardInterrupt:
            print("interrupted")
        print(imported("package").answer, imported("package.slow").answer)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (child.stdout, child.stderr) == ("interrupted\n42 42\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.05, 0.2, 0.5, 1.0])
def test_ctrl_c_during_the_first_conversation(tiny_folder, after):
    code = """
        import os, signal, sys, threading
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        from pagedjax.weights.tokenizer_files import load_tokenizer
        from pagedjax.weights.locate import open_checkpoint
        tokenizer = load_tokenizer(open_checkpoint(sys.argv[1]))
        timer = threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGINT))
        asked = [{"role": "user", "content": "abc"}]
        timer.start()
        try:
            tokenizer.apply_chat_template(asked)
            timer.join()
        except KeyboardInterrupt:
            pass
        print(len(tokenizer.apply_chat_template(asked)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tiny_folder), str(after)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 3

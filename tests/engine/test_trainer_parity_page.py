"""The code of docs/design/trainer-parity.md runs, and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.optimised  # bits of an engine and of a training step

PAGE = Path(__file__).parents[2] / "docs" / "design" / "trainer-parity.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs(tiny_folder, capsys):
    pytest.importorskip("llvmlite")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    sizes = "max_num_seqs=4, max_num_batched_tokens=16, token_buckets=(16,), num_blocks=64, progress=False"
    code = "\n".join(blocks).replace(
        'LLM(model="smollm2-135m"', f"LLM(model={str(tiny_folder)!r}, {sizes}"
    )
    exec(code.replace('"smollm2-135m"', repr(str(tiny_folder))), {})
    assert capsys.readouterr().out == "largest difference 0.0\n(1, 1, 1, 2, 2, 2, 2, 2)\n"

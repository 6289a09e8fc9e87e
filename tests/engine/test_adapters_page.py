"""The code of docs/design/adapters.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.weights.tiny_adapters import tiny_adapter

PAGE = Path(__file__).parents[2] / "docs" / "design" / "adapters.md"


def test_the_code_of_the_page_runs(tiny_folder, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    sizes = "max_num_seqs=4, max_num_batched_tokens=16, token_buckets=(16,), num_blocks=64, progress=False"
    folders = {
        name: tiny_adapter(tmp_path / name, tiny_folder, 4, seed=i)
        for i, name in enumerate(("POEMS", "MAIL"))
    }
    names: dict[str, Any] = {"MODEL": tiny_folder, **folders}
    exec(code.replace("LLM(", f"LLM({sizes}, "), names)
    assert len({out.outputs[0].token_ids for out in names["outs"]}) == 3
    assert "notes" not in names["llm"].engine.adapters

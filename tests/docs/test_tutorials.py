"""Every code cell of every tutorial runs, in the order of its page, in a process and a folder of
its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.run_cells import Cell, cells

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
# over ten seconds: an engine is compiled, or many runs are simulated
SLOW = {
    "life_of_a_prompt",
    "does_block_size_matter",
    "a_policy_of_your_own",
    "a_policy_with_memory",
    "a_learnt_policy",
    "yesterday",
    "bring_a_model",
    "a_kernel_of_your_own",
    "train_and_look_inside",
    "speculate",
    "serve_and_watch",
    "many_devices",
}
HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""


def run(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a page's cells in `folder` as the current one. Nothing of this process is in the new
    one.
    """
    variables = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, str(ROOT / "tests" / "docs" / "run_cells.py"), str(path)]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in PAGES],
)
def test_every_cell_of_a_tutorial_runs(path: Path, tmp_path):
    child = run(path, tmp_path)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-6000:]
    assert f"{len(cells(path.read_text('utf-8')))} cells ran" in child.stdout
    assert list(tmp_path.iterdir()) == [], (
        "a tutorial writes into a temporary folder of its own, not where it runs"
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_is_a_notebook_that_checks_what_it_says(path: Path):
    text = path.read_text("utf-8")
    assert text.startswith(HEADER)
    code = "\n".join(cell.source for cell in cells(text))
    assert len(re.findall(r"^\s*assert ", code, re.MULTILINE)) >= 3


def test_the_index_has_every_tutorial():
    text = (FOLDER / "index.md").read_text("utf-8")
    (listed,) = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
    assert sorted(line for line in listed.split() if not line.startswith(":")) == [
        path.stem for path in PAGES
    ]


def test_slow_pages_exist():
    assert {path.stem for path in PAGES} >= SLOW


PAGE = """# Title

```{code-cell}
:tags: [hide-input]

a = 1
```

```python
not_run()
```

```{code-cell} ipython3
b = a + 1
b
```
"""


def test_cells_are_found_with_the_lines_of_the_page():
    assert cells(PAGE) == [Cell(5, "\na = 1"), Cell(14, "b = a + 1\nb")]
    with pytest.raises(ValueError, match="the cell of line 3 has no end; close it with"):
        cells("# Title\n\n```{code-cell}\na = 1\n")


def test_a_wrong_cell_fails_with_its_line(tmp_path):
    """The check can fail: by an assertion, by an error of a shown value, and by a name of another
    page.
    """
    page = tmp_path / "page.md"
    for wrong, message in (
        ("assert b == 3", "AssertionError"),
        ("class A:\n    def _repr_svg_(self):\n        return 1 / 0\n\n\nA()", "ZeroDivisionError"),
        ("unknown", "NameError"),
    ):
        page.write_text(f"{PAGE}\n```{{code-cell}}\n{wrong}\n```\n")
        child = run(page, tmp_path)
        assert child.returncode == 1
        assert message in child.stderr
        assert re.search(r'page\.md", line (19|2\d)', child.stderr)
    page.write_text(PAGE)
    assert run(page, tmp_path).stdout.splitlines() == ["2", "2 cells ran"]

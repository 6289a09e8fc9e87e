"""Guides: their form, their commands by the real parsers, their configs by the real reader, and
everything they run.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from _generate import commands as command_lines
from _generate import server

from experiments.core import config, metrics
from pagedjax.commands import experiments
from tests.docs import guide_blocks
from tests.docs.guide_blocks import Block, Mistake, blocks, matches, mistakes
from tests.quickly import OPTIMISED

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "guides"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
IDS = [path.stem for path in PAGES]
SECTIONS = ["How to see that it worked", "Usual mistakes", "Read more"]
# Guides whose engines are compiled as those of users.
COMPARING_BITS = ("same_bits", "train_with_the_engine")
# Words of a shell that this repository does not have.
FOREIGN = {"pip", "curl", "export", "ray", "serve", "kill", "echo", "cat", "cp", "mkdir", "openssl"}


@cache
def parsers() -> dict[str, object]:
    return {name: parser for name, parser, _ in command_lines.commands()}


def refusal_of(command: str) -> str:
    """Why the parser of a command refuses its words; "" if it takes them, or the command is a
    foreign one.
    """
    command = re.sub(r"^(?:\w+=\S+ )+", "", command)  # variables of its environment
    words = shlex.split(re.sub(r" (?:&|>|\|).*", "", command))
    if words[0] in FOREIGN or re.fullmatch(r"python \w+\.py", command):
        return ""
    if words[0] == "pagedjax" and words[1] in experiments.COMMANDS:
        # their parsers are those of the modules that they run
        words = ["python", "-m", f"experiments.{words[1]}", *words[2:]]
    commands = [name for name in parsers() if words[: len(name.split())] == name.split()]
    name = max(commands, key=len, default=None)
    if name is None:
        return f"there is no command {command!r}"
    try:
        parsers()[name].parse_args(words[len(name.split()) :])  # type: ignore[attr-defined]
    except SystemExit:
        return f"{name} refuses {command!r}"
    return ""


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_a_guide_has_the_form_of_a_guide(path: Path):
    text = path.read_text("utf-8")
    title, goal, need, *_ = re.split(r"\n\n", text)
    assert re.fullmatch(r"# .+", title)
    assert not goal.startswith(("#", "**", "|", "`"))
    assert need.startswith("**You need**")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[-3:] == SECTIONS
    assert 25 <= len(text.splitlines()) <= 80
    assert blocks(text)
    assert (
        "../design/" in text.partition("## Read more")[2]
        or "../reference/" in text.partition("## Read more")[2]
    )


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_commands_and_configs_of_a_guide_are_read_by_the_real_readers(path: Path, tmp_path):
    text = path.read_text("utf-8")
    shells = [block for block in blocks(text) if block.language == "sh"]
    commands = [command for block in shells for command in guide_blocks.commands(block.source)]
    assert [refusal for refusal in map(refusal_of, commands) if refusal] == []
    for block in blocks(text):
        if block.file:
            guide_blocks.write(block, tmp_path)
    for block in blocks(text):
        if block.language == "yaml":
            assert block.file, f"line {block.line}: begin a config with # NAME.yaml"
            assert config.load(tmp_path / block.file)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_a_guide_runs(path: Path, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    variables = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    if path.stem in COMPARING_BITS:
        variables[OPTIMISED] = "1"
    command = [sys.executable, str(ROOT / "tests" / "docs" / "guide_blocks.py"), str(path)]
    child = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=900
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-6000:]
    assert child.stdout.endswith("the guide ran\n")


def test_the_index_lists_every_guide():
    text = (FOLDER / "index.md").read_text("utf-8")
    (listed,) = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
    names = [line for line in listed.split() if not line.startswith(":")]
    assert sorted(names) == IDS
    assert re.findall(r"^- \[.*?\]\((\w.*?)\.md\)", text, re.MULTILINE) == names


def test_numbers_of_slow_runs_exist():
    """The second column of the table: metrics of the server, and keys of a summary."""
    text = (FOLDER / "slow_runs.md").read_text("utf-8")
    cells = [
        row.split(" | ")[1]
        for row in re.findall(r"^\|(.*)\|$", text.partition("\n## ")[0], re.MULTILINE)[2:]
    ]
    names = {name for cell in cells for name in re.findall(r"`(\w[\w.:]*)`", cell)}
    named_numbers = {name.split(".")[0].removeprefix("pagedjax:") for name in names}
    served = {
        f"{metric.name.removeprefix('pagedjax:')}{end}"
        for metric in server.metrics()
        for end in ("", "_total")
    }
    summary = set(
        re.findall(r'^        "(\w+)":', inspect.getsource(metrics.summary), re.MULTILINE)
    )
    options = {"llm", "attention_impl", "linear_impl"}
    assert len(cells) >= 10
    assert named_numbers <= served | summary | options


PAGE = """# Title

```python
# mine.py
x = 1
```

<!-- runs -->
```sh
python -c 'print(1)'  # a comment
pagedjax replay \\
  run.jsonl
```

## Usual mistakes

| what you do | what it says | do this instead |
|---|---|---|
| `int("x")` | `invalid literal ... base 10: 'x'` | give digits |
| you forget it | `nothing` | do it |

## Read more
"""


def test_blocks_and_mistakes_are_found():
    assert blocks(PAGE) == [
        Block(4, "python", "# mine.py\nx = 1\n", "mine.py", False),
        Block(
            10,
            "sh",
            "python -c 'print(1)'  # a comment\npagedjax replay \\\n  run.jsonl\n",
            "",
            True,
        ),
    ]
    assert list(mistakes(PAGE)) == [
        Mistake('int("x")', "invalid literal ... base 10: 'x'", "give digits")
    ]
    assert guide_blocks.commands(blocks(PAGE)[1].source) == [
        "python -c 'print(1)'",
        "pagedjax replay run.jsonl",
    ]
    assert matches("a ... c", "a\nb c d")
    assert not matches("a ... e", "a b c d")


def test_wrong_pages_fail(tmp_path, monkeypatch):
    """Each check can fail: an option that does not exist, an error of Python or the shell, another
    error text.
    """
    assert "refuses" in refusal_of("pagedjax serve --no-such-option")
    assert "no command" in refusal_of("pagedjaxx serve")
    assert refusal_of("pagedjax serve smollm2-135m --max-num-seqs 4 &") == ""
    monkeypatch.chdir(tmp_path)
    # `guide_blocks.run` puts another module here; monkeypatch puts this one back
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    page = tmp_path / "page.md"
    row = "\n## Usual mistakes\n\n| a | b | c |\n|---|---|---|\n| `{}` | `{}` | no |\n"
    for text, error in (
        ("```python\n1 / 0\n```\n", ZeroDivisionError),
        ("<!-- runs -->\n```sh\nfalse\n```\n", AssertionError),
        (row.format("1 / 0", "an unknown error"), AssertionError),
        (row.format("1 / 1", "division by zero"), AssertionError),
        (row.format("pagedjax replay no.jsonl", "another error"), AssertionError),
        (row.format("pagedjax --help", "usage"), AssertionError),
        (row.format("python -m json.tool --help", "usage"), AssertionError),
    ):
        page.write_text(text)
        with pytest.raises(error):
            guide_blocks.run(page)
    page.write_text(
        "```python\n# a.py\nx = 1\n```\n\n```python\nimport a\n```\n"
        + row.format("1 / 0", "by zero")
        + "| `pagedjax replay no.jsonl` | `there is no file no.jsonl` | no |\n"
        + "| `python -m json.tool --other` | `unrecognized arguments: --other` | no |\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    guide_blocks.run(page)

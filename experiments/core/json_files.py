"""Files of JSON that a person may read: results of benchmarks and of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(file: Path | None, value: Any, end: str = "\n") -> None:
    """Write a value, if a file is given. end: the text after the value."""
    if file is not None:
        file.write_text(json.dumps(value, indent=1) + end, encoding="utf-8")

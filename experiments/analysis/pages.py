"""Pages from the templates beside the commands: `filled("report.html.jinja", ...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).parents[1]


def filled(template: str, **values: Any) -> str:
    """The HTML of a page. Text in `values` is escaped.

    Args:
        template: a file in experiments/.
        values: what the template names.
    """
    loader = jinja2.FileSystemLoader(FOLDER)
    templates = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template(template).render(**values)

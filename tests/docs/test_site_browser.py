"""Every page of the site in Chromium, in a laptop's and in a telephone's width.

pip install -e '.[browser,docs]', a Chromium from the system's packages, and: pytest -m browser
tests/docs
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.built_pages import pages_of

pytestmark = pytest.mark.browser

WIDTHS = (1280, 390)
# How much wider than its window a page is, in pixels, and the pictures that were not loaded.
LOOK_FOR_FAULTS = """() => ({
  over: document.documentElement.scrollWidth - innerWidth,
  missing: [...document.images].filter((image) => !image.complete || !image.naturalWidth).map((image) => image.src),
})"""


def faults_of(browser: Any, pages: list[Path], width: int) -> dict[str, Any]:
    """What is wrong with each page, by its name; pages without a fault are left out."""
    faults = {}
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(180_000)  # ms; a busy machine loads a page slowly
    for path in pages:
        page.goto(path.as_uri())
        fault = page.evaluate(LOOK_FOR_FAULTS)
        if fault["over"] > 0 or fault["missing"]:
            faults[path.name] = fault
    page.close()
    return faults


def test_a_wide_page_and_a_missing_picture_are_seen(chromium: Any, tmp_path):
    (tmp_path / "wide.html").write_text('<div style="width: 500px">x</div><img src="no.png">')
    (tmp_path / "right.html").write_text("<p>x</p>")
    faults = faults_of(chromium, sorted(tmp_path.glob("*.html")), 390)
    assert list(faults) == ["wide.html"]
    assert faults["wide.html"]["over"] > 0
    assert faults["wide.html"]["missing"] == [(tmp_path / "no.png").as_uri()]


def test_no_page_is_wider_than_its_window_or_misses_a_picture(
    chromium: Any, build_site: Callable[[], Path]
):
    pages = pages_of(build_site())
    assert [faults_of(chromium, pages, width) for width in WIDTHS] == [{}, {}]

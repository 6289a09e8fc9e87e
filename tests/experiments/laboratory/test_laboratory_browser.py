"""The pages of `whatif` and `blame` in a real Chromium: pytest -m browser, as in tests/viewer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import blame, diff, whatif
from experiments.laboratory import whatif_page
from tests.experiments.laboratory import simulated
from tests.experiments.laboratory.test_laboratory_pages import data_of

pytestmark = pytest.mark.browser

COUNT = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both pages of a recording of many requests."""
    folder = tmp_path_factory.mktemp("pages")
    path = folder / "run.jsonl"
    requests = simulated.requests(random.Random(5), COUNT)
    simulated.record(path, simulated.engine(), requests)
    words = ["--set", "max_num_seqs=2", "--draws", "3", "--record", str(folder / "other.jsonl")]
    words += ["--page", str(folder / "whatif.html")]
    assert whatif.main([str(path), *words]) == 0
    assert blame.main([str(path), "--page", str(folder / "blame.html")]) == 0
    files = [str(path), str(folder / "other.jsonl")]
    assert diff.main([*files, "--page", str(folder / "diff.html")]) == 1
    return folder


@pytest.fixture
def open_page(chromium: Any, folder: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page of the folder. At the end it has written nothing to the console and asked for
    nothing but files.
    """
    pages: list[Any] = []
    complaints: list[str] = []
    urls: list[str] = []

    def open_file(name: str, width: int = 1280, scheme: str = "light") -> Any:
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.goto(f"file://{folder / name}")
        pages.append(page)
        return page

    yield open_file
    assert [text for text in complaints if "willReadFrequently" not in text] == []
    assert all(url.startswith("file://") for url in urls)
    for page in pages:
        page.close()


def values(page: Any, query: str) -> list[str]:
    return [text.strip() for text in page.locator(query).all_inner_texts()]


def wait_for_viewer(page: Any) -> None:
    """Waits until the viewer has drawn. (Its page forbids what Playwright's own waiting needs.)"""
    end = time.monotonic() + 20
    while not page.evaluate("Boolean(window.pagedjax && window.pagedjax.view.picture)"):
        assert time.monotonic() < end, "the viewer draws nothing"
        page.wait_for_timeout(30)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1280])
@pytest.mark.parametrize("name", ["whatif.html", "blame.html"])
def test_a_page_is_as_wide_as_its_window(open_page, name: str, width: int, scheme: str):
    page = open_page(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(21, 23, 27)") == (scheme == "dark")


def test_only_lines_in_view_are_elements_and_scrolling_shows_the_others(open_page):
    page = open_page("whatif.html")
    assert values(page, "#number") == [f"{COUNT} of {COUNT}"]
    assert 10 < page.locator("#lines .line").count() < 40
    page.locator("#bars").evaluate("box => { box.scrollTop = box.scrollHeight }")
    page.wait_for_selector(f"#line-{COUNT - 1}")
    assert page.locator("#line-0").count() == 0


def test_requests_are_ordered_by_their_differences(open_page, folder: Path):
    page = open_page("whatif.html")
    requests = data_of((folder / "whatif.html").read_text())["requests"]

    def difference(request: list[Any], field: str) -> float:
        before, after = [getattr(whatif_page.Bar(*bar), field) for bar in request[3:]]
        return after - before

    names = [request[0] for request in sorted(requests, key=lambda r: -difference(r, "end"))]
    titles = page.locator("#lines .line > :first-child").evaluate_all(
        "spans => spans.map(span => span.title)"
    )
    assert titles == names[: len(titles)]
    page.select_option("#order", "first_token earlier")
    first = page.locator("#line-0 > :first-child").get_attribute("title")
    by_name = {request[0]: difference(request, "first_token") for request in requests}
    assert by_name[first] == min(by_name.values())
    page.select_option("#order", "came")
    assert page.locator("#line-0 > :first-child").get_attribute("title") == requests[0][0]


def test_a_bar_lies_where_its_times_are(open_page, folder: Path):
    page = open_page("whatif.html")
    page.select_option("#order", "came")
    data = data_of((folder / "whatif.html").read_text())
    bars = [whatif_page.Bar(*bar) for _, _, _, *pair in data["requests"] for bar in pair]
    low = min(bar.came for bar in bars)
    high = max(bar.ended for bar in bars)  # type: ignore[type-var]
    for place, (_, _, _, *pair) in enumerate(data["requests"][:5]):
        room = page.locator(f"#line-{place} .runs").bounding_box()
        for name, values_of_bar in zip(("recorded", "changed"), pair, strict=True):
            bar = whatif_page.Bar(*values_of_bar)
            box = page.locator(f"#line-{place} i.{name}").last.bounding_box()
            stop = (bar.ended - low) / (high - low) * room["width"]  # type: ignore[operator]
            assert box["x"] + box["width"] - room["x"] == pytest.approx(stop, abs=2)


def test_the_keyboard_chooses_requests_and_a_link_opens_the_viewer(open_page):
    page = open_page("whatif.html")
    page.locator("#bars").focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    assert page.locator("#bars").get_attribute("aria-activedescendant") == "line-2"
    assert page.locator('[aria-selected="true"]').get_attribute("id") == "line-2"
    name = page.locator("#line-2 > :first-child").get_attribute("title")
    assert f"request {name}" in page.inner_text("#about")
    page.keyboard.press("End")
    assert page.locator("#bars").get_attribute("aria-activedescendant") == f"line-{COUNT - 1}"
    page.keyboard.press("Home")
    link = page.locator("#about a").nth(1)
    step = int(link.inner_text().split("step ")[1].split()[0])
    link.click()
    wait_for_viewer(page)
    picture = page.evaluate("window.pagedjax.shown()")
    assert (picture["run"], picture["step"]) == (1, step)


def test_zoom_and_search(open_page):
    page = open_page("whatif.html", 400)
    page.locator("#line-0").click()
    wide = page.evaluate("document.getElementById('lines').offsetWidth")
    page.select_option("#zoom", "8")
    assert page.evaluate("document.getElementById('lines').offsetWidth") > 4 * wide
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.fill("#find", "ANN")
    num_found = int(values(page, "#number")[0].split()[0])
    assert 0 < num_found < COUNT
    page.fill("#find", "nobody of this name")
    assert page.locator("#lines .line").count() == 0
    page.fill("#find", "")
    page.select_option("#origin", "request")
    assert page.locator("#lines .line").count() > 10


def test_a_worst_case_opens_the_viewer_at_its_request(open_page):
    page = open_page("blame.html")
    link = page.locator("table.cases a").first
    name = link.inner_text()
    link.click()
    wait_for_viewer(page)
    assert name in page.inner_text("#story")
    assert page.evaluate("window.pagedjax.shown().step") > 0


def test_the_page_of_a_difference_opens_at_its_step_unless_its_address_names_one(open_page):
    page = open_page("whatif.html")
    step = int(page.locator("p.note a").first.inner_text().split("step ")[-1])
    page = open_page("diff.html")
    wait_for_viewer(page)
    assert page.evaluate("window.pagedjax.shown().step") == step > 0
    page = open_page("diff.html#step=1")
    wait_for_viewer(page)
    assert page.evaluate("window.pagedjax.shown().step") == 1


def test_a_heading_sorts_the_table(open_page):
    page = open_page("whatif.html")
    page.locator("th button", has_text="p90").first.click()
    numbers = page.locator("table td:nth-child(4)").evaluate_all(
        "cells => cells.map(cell => Number(cell.dataset.sort))"
    )
    assert numbers == sorted(numbers, reverse=True)

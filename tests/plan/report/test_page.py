"""The page as a browser shows it."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.chromium import WatchedPage
from tests.plan.asking import HOSTILE, planned
from tierstore.plan.report import page_of
from tierstore.plan.report.sections import sections_of

WAIT_MS = 60_000


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", ["shop", HOSTILE])
def test_the_page_has_its_sections_and_no_error_network_or_sideways_scroll(
    browser: Browser, tmp_path: Path, width: int, name: str
) -> None:
    path, result = tmp_path / "plan.html", planned(name)
    path.write_text(page_of(result), encoding="utf-8")
    assert path.stat().st_size < 50_000
    watched = WatchedPage(browser, wait_ms=WAIT_MS, viewport={"width": width, "height": 800})
    page = watched.page
    page.goto(path.as_uri())
    assert page.title().startswith(name[:8])
    for number, each in enumerate(sections_of(result)):
        shown = page.locator("section").nth(number)
        assert shown.locator("h2").text_content() == each.title
        assert shown.locator("p").all_text_contents() == list(each.lines)
        cells = [cell for row in each.table for cell in row]
        assert shown.locator("th, td").all_text_contents() == cells
    assert page.locator("svg polyline").count() == 2
    assert page.locator("img, script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert [url.partition(":")[0] for url in watched.urls] == ["file"]
    assert not watched.wrong
    watched.context.close()


def test_the_picture_has_the_curve_and_where_the_plan_is() -> None:
    result = planned()
    (shown,), drawn = result.curves, page_of(result)
    strips = re.findall(r"rows [0-9,]+ - ([0-9,]+)\nmissed: (\S+) %", drawn)
    told = [(int(last.replace(",", "")), float(value)) for last, value in strips]
    assert len(told) == 120
    assert told[-1][0] == shown.curve.sizes[-1]
    for (before, _), (end, value) in pairwise(told):
        assert value == pytest.approx(100 * shown.curve.miss_ratio((before + end) / 2), abs=0.01)
    assert f"row {round(shown.chosen_rows):,}\nthis plan: 0 %" in drawn

"""The page as a browser shows it."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.chromium import WatchedPage
from tests.plan.report.results import HOSTILE, made_result, served_result
from tierstore.plan.report import page_of
from tierstore.plan.report.page import Axes, Line, Point, svg

WAIT_MS = 60_000


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", ["shop", HOSTILE])
def test_the_page_has_its_answer_and_no_error_network_or_sideways_scroll(
    browser: Browser, tmp_path: Path, width: int, name: str
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(page_of(made_result(name)), encoding="utf-8")
    watched = WatchedPage(browser, wait_ms=WAIT_MS, viewport={"width": width, "height": 800})
    page = watched.page
    page.goto(path.as_uri())
    assert page.title().startswith(name[:8])
    assert page.locator(".tile b").all_text_contents() == [
        *("64,000", "4.00 ms", "50.00 %", "SSD reads", "$1,300", "$48.50", "190 W", "0.500"),
    ]
    assert page.locator(".warnings li").all_text_contents() == list(made_result().warnings)
    bars = page.locator(".bar").evaluate_all("bars => bars.map(bar => bar.style.width)")
    assert bars == ["100%", "75%", "50%", "25%"]
    assert page.locator("svg polyline").count() == page.locator("svg circle").count() == 2
    verdicts = page.locator(".wide tbody td:last-child").all_text_contents()
    assert [verdicts[0], verdicts[1], verdicts[3]] == ["this plan", "reaches it", "does not fit: memory"]
    assert page.locator("img, script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert [url.partition(":")[0] for url in watched.urls] == ["file"]
    assert not watched.wrong
    watched.context.close()


class Links(HTMLParser):
    """What a page could ask a network for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]


@pytest.mark.parametrize("result", [made_result(), served_result()], ids=["training", "serving"])
def test_the_page_is_one_file_that_asks_for_nothing(result: Any) -> None:
    text = page_of(result)
    links = Links()
    links.feed(text)
    assert not links.found
    assert "default-src 'none'" in text
    assert len(text) < 50_000


def test_what_was_assumed_stands_above_the_answer_and_what_tiers_save_below() -> None:
    text = page_of(made_result())
    places = [
        text.index(each)
        for each in (
            "3 x shop: 51,000 samples/s; bound by dense model",
            'aria-label="The answer"',
            "this plan saves $48.50",
        )
    ]
    assert places == sorted(places)
    assert "; its drives are written 2 times a day." in text
    assert not re.search("Assumed, as|Beside all rows", page_of(served_result()))


def test_lines_go_from_the_lowest_size_to_the_highest_by_their_logarithm() -> None:
    axes = Axes("x", "y", 10.0, str, str, 100.0)
    drawn = svg([Line("a", [Point(1.0, 0.0), Point(10.0, 50.0), Point(100.0, 100.0)], Point(10.0, 50.0))], axes)
    (points,) = re.findall('points="(.*?)"', drawn)
    (left, bottom), middle, (right, top) = (tuple(map(float, point.split(","))) for point in points.split())
    assert middle == ((left + right) / 2, (bottom + top) / 2)
    assert f'cx="{middle[0]}" cy="{middle[1]}"' in drawn
    assert left < right
    assert top < bottom
    assert re.findall('class="x" x="[0-9.]+" y="[0-9.]+">([0-9.]+)<', drawn) == ["1.0", "10.0", "100.0"]

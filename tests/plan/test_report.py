"""The report, compared with the figures of the answer: as text, as a page in a browser; and figures as people read
them."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Browser

from tests.chromium import WatchedPage
from tests.plan.hosts import HOSTILE, planned, served
from tierstore.plan.model import Prediction
from tierstore.plan.report import (
    count,
    describe,
    duration,
    money,
    plan_page,
    sections_of,
    share,
    significant,
    watts,
)


def test_setups_are_compared_in_one_table() -> None:
    result, text = planned(), describe(planned())
    own, memory = result.prediction.price, result.in_memory
    assert isinstance(memory, Prediction)
    assert max(map(len, text.splitlines())) <= 100
    (table,) = [each.table for each in sections_of(result) if each.title == "Setups compared"]
    assert len(table) == 3 + len(result.alternatives)
    assert table[1][5:7] == [money(own.usd_a_month), watts(own.watts)]
    for row, each in zip(table[2:-1], result.alternatives, strict=True):
        assert row[-1].endswith(each.reason)
    assert table[-1][-1].endswith("; all rows in memory")
    saved = f"in memory it costs {money(memory.price.usd_a_month - own.usd_a_month)} more a month"
    assert saved in " ".join(text.split())
    assert "all rows in DDR or HBM: too small" in describe(replace(result, in_memory="too small"))
    assert "Setups compared" not in describe(served())


def test_serving_tells_latency() -> None:
    latency, text = served().prediction.latency, describe(served())
    assert latency is not None
    assert f"50.0 queries/s, half of them within {duration(latency.p50_s)}, 99 % within " in " ".join(text.split())
    assert "! the target is missed: 99 % of queries within" in text


def test_lines_have_100_columns_and_no_colours_unless_asked_for() -> None:
    plain = describe(planned(HOSTILE))
    assert max(map(len, plain.splitlines())) <= 100
    assert "\x1b" not in plain
    assert "\x07" not in plain
    assert describe(planned(HOSTILE), colours=True).replace("\x1b[1m", "").replace("\x1b[0m", "") == plain


@pytest.mark.parametrize(("width", "name"), [(1280, "shop"), (360, HOSTILE)])
def test_the_page_has_its_sections_and_no_error_network_or_sideways_scroll(
    browser: Browser, tmp_path: Path, width: int, name: str
) -> None:
    path, result = tmp_path / "plan.html", planned(name)
    path.write_text(plan_page(result), encoding="utf-8")
    assert path.stat().st_size < 50_000
    watched = WatchedPage(browser, wait_ms=60_000, viewport={"width": width, "height": 800})
    page = watched.page
    page.goto(path.as_uri())
    assert page.title().startswith(name[:8])
    for number, each in enumerate(sections_of(result)):
        shown = page.locator("section").nth(number)
        cells = [cell for row in each.table for cell in row]
        texts = [shown.locator(kind).all_text_contents() for kind in ("h2", "p", "th, td")]
        assert texts == [[each.title], list(each.lines), cells]
    assert page.locator("svg polyline").count() == 2
    assert page.locator("img, script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert [url.partition(":")[0] for url in watched.urls] == ["file"]
    assert not watched.wrong
    watched.context.close()


def test_the_pictures_have_the_curve_and_where_the_plan_is_and_a_bar_for_each_load() -> None:
    result = planned()
    (shown,), drawn, found = result.curves, plan_page(result), result.prediction
    strips = re.findall(r"rows [0-9,]+ - ([0-9,]+)\nmissed: (\S+) %", drawn)
    told = [(int(last.replace(",", "")), float(value)) for last, value in strips]
    assert len(told) == 120
    assert told[-1][0] == shown.curve.sizes[-1]
    for (before, _), (end, value) in pairwise(told):
        assert value == pytest.approx(100 * shown.curve.miss_ratio((before + end) / 2), abs=0.01)
    assert f"row {round(shown.chosen_rows):,}\nthis plan: 0 %" in drawn
    (bars,) = re.findall(r'<svg class="bars".*?</svg>', drawn, re.DOTALL)
    widths = [float(each.get("width", 0)) for each in ElementTree.fromstring(bars).iter("rect")]
    assert len(widths) == sum(load.seconds > 0 for load in found.loads)
    assert sum(widths) == pytest.approx(310 * sum(lane.seconds for lane in found.lanes) / found.step_s, abs=1)


WORDS: list[tuple[Callable[[float], str], dict[float, str]]] = [
    (significant, {0: "0", 1234.5: "1,230", 0.012345: "0.0123", math.inf: "unbounded", math.nan: "unknown"}),
    (count, {7: "7.00", 123.4: "123", 56_143.2: "56,143", 12_345_678: "12.3 M", math.inf: "unbounded"}),
    (duration, {0: "0 s", 1.5: "1.50 s", 0.00123: "1.23 ms", 3e-9: "3.00 ns", math.inf: "unbounded"}),
    (share, {0.1234: "12.3 %"}),
    (money, {1234.5: "$1,234", 3.5: "$3.50"}),
    (watts, {560: "560 W", 56_000: "56.0 kW"}),
]


def test_figures_as_people_read_them() -> None:
    for shown, texts in WORDS:
        assert {value: shown(value) for value in texts} == texts

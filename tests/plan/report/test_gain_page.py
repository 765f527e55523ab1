"""The page of what tiers would save, as a browser shows it."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.chromium import WatchedPage
from tests.plan.hosts import shop_workload
from tests.plan.report.results import HOSTILE
from tierstore.plan.assumptions import Fleet
from tierstore.plan.gain import Case, Gain, Outcome, Scale
from tierstore.plan.plan_file import PlanFile, TargetSection
from tierstore.plan.report import describe_gain, gain_page_of
from tierstore.plan.workload import Assumed

WAIT_MS = 20_000


def fleet(name: str, month: float, watts: float) -> Fleet:
    return Fleet(f"2 x {name} (64.0 GiB DDR, 1 SSD)", 2, 48 * month, month, watts, 6000.0, None, "cold rows")


def made(name: str = "shop") -> Gain:
    own = Outcome(fleet(name, 1000.0, 900.0), fleet(name, 600.0, 500.0))
    off = Outcome(fleet(name, 2000.0, 900.0), fleet(name, 500.0, 400.0))
    scales = (
        Scale(1, 500_000, 10**8, own, (Case("skew", 0.5, off),)),
        Scale(2, 10**6, 10**8, Outcome(None, own.tiers, f"{name} is too small"), (Case("skew", 0.5, off),)),
        Scale(10, 5 * 10**6, 10**8, Outcome(own.tiers, own.tiers), (Case("skew", 0.5, own),)),
    )
    workload = shop_workload(name=name, assumed=(Assumed("exponent", ("item",)),))
    asked = PlanFile(target=TargetSection(samples_per_s=5000.0))
    return Gain(asked=asked, workload=workload, hosts=(name,), has_trace=False, scales=scales)


def test_the_text_says_what_was_found() -> None:
    text = " ".join(describe_gain(made()).split())
    assert "With today's rows, tiers save $400 of $1,000 a month (40 %; 40 % to 75 % if an input is off)." in text
    assert "With 10 times the rows, tiers save nothing: the cheapest fleet has every row in memory." in text
    assert "all in memory $1,000 ($1,000 to $2,000) 900 W tiered $600 ($500 to $600) 500 W (400 W to 500 W)" in text
    assert "skew x 0.5 $1,500 = 75 % $1,500 = 75 % $400 = 40 %" in text
    assert "as planned $400 = 40 % only a tiered fleet $0.00 = 0 %" in text
    assert "all in memory: no such fleet: shop is too small" in text


@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_has_a_bar_for_each_fleet_and_no_sideways_scroll(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "gain.html"
    path.write_text(gain_page_of(made(HOSTILE)), encoding="utf-8")
    watched = WatchedPage(browser, wait_ms=WAIT_MS, viewport={"width": width, "height": 800})
    watched.page.goto(path.as_uri())
    widths = [
        watched.page.evaluate("bar => bar.style.width", bar) for bar in watched.page.locator(".bar i").element_handles()
    ]
    assert widths == ["50%", "30%", "30%", "30%", "30%"]
    ends = watched.page.locator(".bar u").first.evaluate("line => [line.style.left, line.style.width]")
    assert ends == ["50%", "50%"]
    assert watched.page.title().startswith("<script>")
    assert watched.page.locator("img, script").count() == 0
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert watched.page.evaluate(overflow) == 0
    assert [url.partition(":")[0] for url in watched.urls] == ["file"]
    assert not watched.wrong
    watched.context.close()

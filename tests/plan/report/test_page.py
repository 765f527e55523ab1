"""The page as a browser shows it."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.chromium import WatchedPage
from tests.plan.report.results import HOSTILE, made_result, served_result
from tierstore.plan.report import page_of
from tierstore.plan.report.plots import plots_of

DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
INK, INK_AT_NIGHT = "rgb(30, 35, 38)", "rgb(231, 233, 234)"
WAIT_MS = 60_000


class Watched(WatchedPage):
    """A page opened from a file."""

    def __init__(self, browser: Browser, path: Path, **settings: Any) -> None:
        super().__init__(browser, wait_ms=WAIT_MS, **settings)
        self.page.goto(path.as_uri())
        self.page.locator("#price svg.main-svg").first.wait_for(state="attached")

    def number_of(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def overflow(self) -> int:
        found = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return int(found)

    def colour_of_ink(self) -> str:
        return str(self.page.evaluate("document.querySelector('#price svg .xtick text').style.fill"))


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(page_of(made_result()), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def watched(browser: Browser, page_file: Path, request: pytest.FixtureRequest) -> Iterator[Watched]:
    found = Watched(browser, page_file, viewport=request.param, has_touch=request.param is PHONE)
    yield found
    found.context.close()


def test_every_plot_is_drawn_without_error_network_or_sideways_scroll(watched: Watched) -> None:
    for plot in (plot for group in plots_of(made_result()).values() for plot in group):
        paths = watched.number_of(f"#{plot.name} .plot svg path")
        assert bool(paths) != plot.folded, plot.name
        title = watched.page.locator(f"#{plot.name} h3").text_content()
        assert title == plot.title
    assert watched.overflow() == 0
    assert [url.partition(":")[0] for url in watched.urls] == ["file"]
    assert not watched.wrong


def test_details_open_and_draw_what_waited(watched: Watched) -> None:
    for name in ("tables", "windows"):
        watched.page.locator(f"#{name} > details > summary").click()
        watched.page.locator(f"#{name} .plot svg path").first.wait_for(state="attached")
    for details in watched.page.locator(".panel details:not(.folded)").all():
        if details.get_attribute("open") is None:
            details.locator("summary").click()
        assert details.locator("tbody tr").first.is_visible()
    assert watched.overflow() == 0
    assert not watched.wrong


def test_the_answer_stands_first(watched: Watched) -> None:
    assert watched.page.title() == "shop: a plan"
    big = watched.page.locator(".answer .big").text_content() or ""
    assert big.startswith("Recommended: 1 x shop (16.0 GiB DDR, 8.0 MiB of it for float32 rows; 2 SSDs); memory for ")
    tiles = watched.page.locator(".tile b").all_text_contents()
    assert tiles == ["64,000", "4.00 ms", "50.00 %", "SSD reads", "$1,300", "$48.50", "190 W", "0.500"]
    assert watched.page.locator(".warnings li").all_text_contents() == list(made_result().warnings)
    verdicts = watched.page.locator("#setups tbody td:last-child").all_text_contents()
    assert verdicts == ["this plan", "reaches it", "too slow by 2.5 on shop", "does not fit: memory"]


def test_dark_follows_the_reader(browser: Browser, page_file: Path) -> None:
    watched = Watched(browser, page_file, viewport=DESKTOP, color_scheme="dark")
    dark = watched.colour_of_ink()
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    assert watched.page.evaluate(ground) == "rgb(19, 23, 26)"
    watched.page.emulate_media(color_scheme="light")
    watched.page.locator(f"#price svg .xtick text[style*='{INK}']").first.wait_for(state="attached")
    assert watched.page.evaluate(ground) == "rgb(244, 243, 239)"
    assert (dark, watched.colour_of_ink()) == (INK_AT_NIGHT, INK)
    assert not watched.wrong
    watched.context.close()


def test_paper_is_white_whatever_the_screen(browser: Browser, page_file: Path) -> None:
    watched = Watched(browser, page_file, viewport=DESKTOP, color_scheme="dark")
    watched.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert watched.colour_of_ink() == INK
    watched.page.emulate_media(media="print", color_scheme="dark")
    assert watched.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert watched.page.evaluate("getComputedStyle(document.documentElement).color") == INK
    watched.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert watched.colour_of_ink() == INK_AT_NIGHT
    watched.context.close()


def test_names_of_files_are_text_and_nothing_else(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(page_of(made_result(HOSTILE)), encoding="utf-8")
    watched = Watched(browser, path, viewport=PHONE)
    watched.page.locator("#tables > details > summary").click()
    watched.page.locator("#tables .plot svg path").first.wait_for(state="attached")
    assert watched.page.title().startswith("<script>")
    assert watched.number_of("img") == 0
    assert watched.overflow() == 0
    assert len(watched.urls) == 1
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
def test_the_page_is_one_file(result: Any) -> None:
    text = page_of(result)
    links = Links()
    links.feed(text)
    assert [link.partition(":")[0] for link in links.found] == ["data"]
    assert "default-src 'none'" in text
    assert not re.search(r"\bNaN\b|\bInfinity\b", text[text.index('id="figures"') : text.index("</script>")])
    assert text.count('<section class="panel') == sum(map(len, plots_of(result).values())) + 2


def test_what_was_assumed_stands_above_the_answer() -> None:
    text = page_of(made_result())
    begin = text.index("Assumed, as nobody said it")
    assert (
        begin < text.index("3 x shop: 51,000 samples/s; bound by dense model") < text.index('aria-label="The answer"')
    )
    assert "Assumed, as" not in page_of(served_result())


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"pip install 'PATH_OF_THE_CHECKOUT\[plan\]'"):
        page_of(made_result())

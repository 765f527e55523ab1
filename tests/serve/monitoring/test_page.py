"""The status page as a browser shows it."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.chromium import WatchedPage
from tests.serve.loops import WAIT_SECONDS
from tests.serve.monitored import Clock, FakeSource, Served
from tierstore.serve.admin.app import admin_app
from tierstore.serve.messages import Status
from tierstore.serve.monitoring.app import monitoring_routes
from tierstore.serve.monitoring.metrics import Metrics, TableInfo

PHONE = {"width": 360, "height": 740}
NOTHING = "\N{EN DASH}"
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


class Watched(WatchedPage):
    """The page of a server with something to show."""

    def __init__(self, browser: Browser) -> None:
        super().__init__(browser, wait_ms=WAIT_SECONDS * 1000, viewport=PHONE, locale="en-US")
        clock, self.source = Clock(), FakeSource()
        metrics = Metrics(["dlrm", "items"], clock=clock)
        for _ in range(300):
            metrics.answered("dlrm", "http", None, 0.004)
        for _ in range(15):
            metrics.answered("items", "grpc", Status.DEADLINE, 0.2)
        metrics.batched("dlrm", 4, 96, [0.0005] * 4, 0.02)
        metrics.refused("http", Status.TOO_LARGE)
        metrics.out_of_range("items", 6)
        metrics.updated(7, 0.25)
        clock.now += 3
        self.served = Served(admin_app(monitoring_routes(metrics, self.source)))

    def open(self) -> None:
        self.page.goto(self.served.url)
        self.until("#state-text", "Ready")

    def until(self, selector: str, text: str) -> None:
        """Wait until the element's text is ``text``."""
        self.page.locator(selector).filter(has_text=re.compile(f"^{re.escape(text)}$")).wait_for(state="attached")

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def tier(self, name: str) -> dict[str, str]:
        fields = self.page.locator(f"[data-tier={name}] [data-field]")
        return {field.get_attribute("data-field") or "": field.text_content() or "" for field in fields.all()}


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    found = Watched(browser)
    yield found
    found.context.close()
    found.served.stop()


def test_numbers_are_the_sources(watched: Watched) -> None:
    """Nothing is wider than the screen, and hostile names stay text."""
    state = watched.source.state
    tables = [TableInfo(name, 10**12, 4096, HOSTILE) for name in ("a" * 200, "b c " * 50, HOSTILE)]
    watched.source.state = state._replace(tables=tables)
    watched.open()
    assert {name: watched.texts(f"#{name}")[0] for name in ("version", "staleness", "rate", "total")} == {
        "version": "7 of 9", "staleness": "2.5 s behind", "rate": "105/s", "total": "315 since the start",
    }  # fmt: skip
    assert watched.texts("#p50") == watched.texts("#p95")
    assert float(watched.texts("#p50")[0].removesuffix(" ms")) == pytest.approx(4, rel=0.02)
    assert watched.texts("#failed-rate") + watched.texts("#failed-total") == ["5/s", "15 since the start"]
    tier = watched.tier("ddr")
    assert tier.pop("what").startswith("hit rate")
    assert tier == {
        "hit_rate": "75.00%", "chart": "", "hits": "15,000", "misses": "5,000", "lookups": "50,000",
        "evictions": "1,234", "capacity_rows": "8,000", "bytes": "3 MiB",
    }  # fmt: skip
    assert watched.tier("ssd")["hit_rate"] == "80.00%"
    assert watched.page.locator("svg:not([role=img][aria-label])").count() == 0
    label = watched.page.locator("#rate-chart svg").get_attribute("aria-label")
    assert label == "Requests each second, last minute: now 0, highest 315"
    assert (watched.tier("hbm")["hit_rate"], watched.tier("hbm")["what"]) == (NOTHING, "not in use")
    assert watched.texts("#found b") == ["0.00 %", "75.00 %", "20.00 %", "5.00 %"]
    fields = {"rate": ["100 /s", "5 /s"], "queued": ["17", "0"], "batch": ["96", NOTHING], "wait": ["500 µs", NOTHING]}
    for name, texts in fields.items():
        assert watched.texts(f"#models [data-field={name}]") == texts
    assert watched.texts("#models th") == ["dlrm", "items"]
    assert watched.texts("#tables [data-field=rows]") == ["1,000,000,000,000"] * 3
    assert watched.texts("#tables th")[-1] == watched.texts("#tables [data-field=type]")[-1] == HOSTILE
    assert watched.page.locator("main img, main script").count() == 0
    assert watched.page.title() == "tierstore"
    width = watched.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width == 0
    cut_off = watched.page.evaluate("""[...document.querySelectorAll("dd, td, th, b, .big")]
        .filter(({scrollWidth, clientWidth}) => clientWidth && scrollWidth > clientWidth + 1)
        .map((element) => element.textContent)""")
    assert cut_off == []
    assert dict(zip(watched.texts("#events dt"), watched.texts("#events dd"), strict=True)) == {
        "Updates applied": "1", "Last update": "version 7 in 250 ms, 3 s ago", "Updates failed": "0",
        "Ids out of range": "6", "Failed: deadline": "15", "Refused, http: too_large": "1",
    }  # fmt: skip
    assert not watched.wrong
    watched.source.state = watched.source.state._replace(ready=False)
    watched.until("#state-text", "Not taking requests")
    watched.served.stop()
    watched.until("#state-text", "Unreachable")
    assert watched.texts("#alert")[0].startswith("The server cannot be reached. The numbers are of ")

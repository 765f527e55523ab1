"""The summary in a terminal."""

import re
from dataclasses import replace

from tests.plan.hosts import SHOP_HOST
from tests.plan.report.results import made_result, served_result
from tierstore.plan.assumptions import Instead
from tierstore.plan.price import Pricing, price_of
from tierstore.plan.report import describe


def section(text: str, title: str) -> list[str]:
    """The lines under a heading, up to the next empty one."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((number for number in range(begin, len(lines)) if not lines[number]), len(lines))
    return lines[begin:end]


def test_the_answer_is_one_line_of_what_was_found() -> None:
    answer = " ".join(" ".join(section(describe(made_result()), "Answer")).split())
    assert answer == (
        "1 x shop (16.0 GiB DDR, 8.0 MiB of it for float32 rows; 2 SSDs): 64,000 samples/s, 4.00 ms a step; bound by "
        "SSD reads; $1,300 to buy, $48.50 a month, 190 W; its drives are written 2 times a day"
    )


def test_loads_are_ranked_with_bars_in_proportion_and_one_bottleneck() -> None:
    _, *lines, _, rule = section(describe(made_result()), "Time of a step")
    assert [re.findall(r"^  ( *\S+(?: \S+)*)", line)[0] for line in lines] == [
        "SSD reads",
        "computing the batch",
        "  dense model",
        "  work on cached rows",
    ]
    assert [(line.count("#"), line.count("-")) for line in lines[1:]] == [(15, 0), (0, 10), (0, 5)]
    assert lines[0].endswith("#" * 20 + " <- bottleneck")
    assert [line.endswith("<- bottleneck") for line in lines[1:]] == [False] * 3
    assert rule.endswith("is the bottleneck.")


def test_what_was_assumed_comes_before_the_answer_with_what_follows_if_it_is_off() -> None:
    text = describe(made_result())
    assert text.index("Assumed") < text.index("Answer")
    assert section(text, "Assumed") == [
        "  - skew: Zipf's law of exponent 1.05, in shop; or give exponent, or a trace",
        "    - if it is 0.5 times that, no setup of shop",
        "    - if it is 2 times that, 3 x shop (16.0 GiB DDR, 2 SSDs): 51,000 samples/s; bound by dense",
        "      model; $3,900 to buy, $146 a month",
    ]
    assert "Assumed" not in describe(made_result(assumptions=(), in_memory_if_off=()))


def test_what_tiers_save() -> None:
    whole, _, saved, off = section(describe(made_result()), "Compared with all rows in memory")
    assert whole == "  all rows in DDR or HBM: 2 x shop (16.0 GiB DDR, 2 SSDs): $97.00 a month, 380 W; bound by dense"
    assert saved == "  this plan saves $48.50 a month (50 %) and 190 W (50 %)"
    assert off.startswith("  if an assumption is off by two: $15.00 to $15.00 a month, 190 W")
    assert "all rows in DDR or HBM: too small" in describe(made_result(in_memory=Instead(None, "too small")))
    assert "Compared with all rows" not in describe(served_result())


def test_prices_of_parts_add_up() -> None:
    price = price_of(SHOP_HOST, 1, Pricing())
    result = made_result()
    result = replace(result, prediction=replace(result.prediction, price=price))
    *parts, every = (re.findall(r"[$\d,.]+", line)[-2:] for line in section(describe(result), "Price")[1:-1])
    usd, watts = (
        sum(float(each.strip("$").replace(",", "")) for each in column) for column in zip(*parts, strict=True)
    )
    assert (f"${usd:,.0f}", f"{watts:,.0f}") == tuple(every)
    assert (usd, watts) == (price.usd, price.watts)


def test_serving_tells_latency() -> None:
    text = describe(served_result())
    assert "500 queries/s, half of them within 2.00 ms, 99 % within 6.00 ms" in " ".join(text.split())
    assert "target: 500 queries/s, 99 % of queries within 10.0 ms" in text
    assert "Tiers of a host, in one query" in text


def test_lines_have_100_columns_and_no_colours_unless_asked_for() -> None:
    plain = describe(made_result("a shop of many words \x07" * 3))
    assert max(map(len, plain.splitlines())) <= 100
    assert sum(line.endswith(" <- bottleneck") for line in plain.splitlines()) == 1, "the mark is on its line"
    assert "\x1b" not in plain
    assert "\x07" not in plain
    coloured = describe(made_result("a shop of many words \x07" * 3), colours=True)
    assert coloured.replace("\x1b[1m", "").replace("\x1b[0m", "") == plain

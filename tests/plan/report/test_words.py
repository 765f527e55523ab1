"""Figures as people read them."""

import math

import pytest

from tierstore.plan.report import sections as words


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        *((words.significant(value), text) for value, text in ((0, "0"), (1234.5, "1,230"), (0.012345, "0.0123"))),
        *((words.significant(value), text) for value, text in ((math.inf, "unbounded"), (math.nan, "unknown"))),
        *((words.count(value), text) for value, text in ((7, "7.00"), (123.4, "123"), (56_143.2, "56,143"))),
        *((words.count(value), text) for value, text in ((12_345_678, "12.3 M"), (math.inf, "unbounded"))),
        *((words.duration(value), text) for value, text in ((0, "0 s"), (1.5, "1.50 s"), (0.00123, "1.23 ms"))),
        *((words.duration(value), text) for value, text in ((3e-9, "3.00 ns"), (math.inf, "unbounded"))),
        (words.share(0.1234), "12.3 %"),
        *((words.money(value), text) for value, text in ((1234.5, "$1,234"), (3.5, "$3.50"))),
        *((words.watts(value), text) for value, text in ((560, "560 W"), (56_000, "56.0 kW"))),
        (words.quantity(3 * 2**20, "bytes"), "3.0 MiB"),
        (words.quantity(12_000, "reads"), "12,000 reads"),
        (words.resource("ssd reads"), "SSD reads"),
        (words.named("plain \x07 word"), "plain \N{REPLACEMENT CHARACTER} word"),
        (words.named("x" * 100), "x" * 60 + "..."),
    ],
)
def test_figures(shown: str, text: str) -> None:
    assert shown == text

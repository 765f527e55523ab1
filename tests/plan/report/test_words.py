"""Figures as people read them."""

import math

import pytest

from tierstore.plan.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5, "1,230"),
        (0.012345, "0.0123"),
        (999.6, "1,000"),
        (-12.34, "-12.3"),
        (math.inf, "unbounded"),
        (math.nan, "unknown"),
    ],
)
def test_three_digits_count(value: float, text: str) -> None:
    assert words.significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7.00"),
        (123.4, "123"),
        (56_143.2, "56,143"),
        (12_345_678, "12.3 M"),
        (2.5e10, "25.0 G"),
        (math.inf, "unbounded"),
    ],
)
def test_counts_are_whole_or_scaled(value: float, text: str) -> None:
    assert words.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5, "1.50 s"),
        (0.00123, "1.23 ms"),
        (4.2e-5, "42.0 µs"),
        (3e-9, "3.00 ns"),
        (math.inf, "unbounded"),
    ],
)
def test_durations_take_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


def test_other_units() -> None:
    assert words.share(0.1234) == "12.3 %"
    assert words.money(1234.5) == "$1,234"
    assert words.money(3.5) == "$3.50"
    assert words.watts(560) == "560 W"
    assert words.watts(56_000) == "56.0 kW"
    assert words.quantity(3 * 2**20, "bytes") == "3.0 MiB"
    assert words.quantity(12_000, "reads") == "12,000 reads"
    assert words.resource("ssd reads") == "SSD reads"


def test_names_of_files_cannot_command_a_terminal_and_are_bounded() -> None:
    shown = words.named("a\x1b[2Jb" + "x" * 100)
    assert "\x1b" not in shown
    assert len(shown) == 63
    assert words.named_words("plain \x07 word") == "plain \N{REPLACEMENT CHARACTER} word"

"""The summary in a terminal, compared with the figures of the answer; and figures as people read them."""

import math
import re
from dataclasses import replace

import pytest

from tests.plan.asking import HOSTILE, planned, served
from tierstore.plan.prediction import describe_setup, in_words
from tierstore.plan.report import describe, sections
from tierstore.plan.report.sections import duration, money, watts
from tierstore.plan.what_if import Instead


def section(text: str, title: str) -> list[str]:
    """The lines under a heading, up to the next empty one."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((number for number in range(begin, len(lines)) if not lines[number]), len(lines))
    return lines[begin:end]


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_the_answer_is_one_line_of_what_was_found() -> None:
    found = planned().prediction
    answer = words(section(describe(planned()), "Answer"))
    assert answer.startswith(f"{describe_setup(found.setup)}: ")
    for part in (duration(found.step_s), in_words(found.bottleneck), money(found.price.usd), watts(found.price.watts)):
        assert part in answer
    assert words(section(describe(replace(planned(), marks=("it wears out",))), "Answer")) == f"{answer}; it wears out"


def test_loads_are_ranked_with_bars_in_proportion_and_one_bottleneck() -> None:
    found, lines = planned().prediction, section(describe(planned()), "Time of a step")[1:-1]
    bars = [max(line.count("#"), line.count("-")) for line in lines if not line.startswith("    ")]
    assert bars[0] == 20
    lanes = [round(20 * lane.seconds / found.step_s) for lane in found.lanes]
    assert all(abs(bar - lane) <= 1 for bar, lane in zip(bars, lanes, strict=False))
    (marked,) = [line for line in lines if line.endswith(" <- bottleneck")]
    assert in_words(found.bottleneck) in marked


def test_what_was_assumed_comes_before_the_answer_with_what_follows_if_it_is_off() -> None:
    result, text = planned(), describe(planned())
    assert text.index("Assumed") < text.index("Answer")
    lines = words(section(text, "Assumed"))
    for each in result.assumptions:
        assert f"- {each.text}; or give {each.figure}, or a trace" in lines
    assert lines.count(" times that, ") == 2 * len(result.assumptions) > 0
    assert "Assumed" not in describe(replace(result, assumptions=()))


def test_what_tiers_save_and_what_parts_cost() -> None:
    result, text = planned(), describe(planned())
    own, memory = result.prediction.price, result.in_memory
    assert memory is not None
    assert memory.prediction is not None
    saved = words(section(text, "Compared with all rows in memory"))
    assert f"this plan saves {money(memory.prediction.price.usd_a_month - own.usd_a_month)} a month" in saved
    told = describe(replace(result, in_memory=Instead(None, "too small")))
    assert "all rows in DDR or HBM: too small" in told
    assert "Compared with all rows" not in describe(served())
    *parts, every = (re.findall(r"[$\d,.]+", line)[-2:] for line in section(text, "Price")[1:-1])
    sums = [sum(float(cell.strip("$").replace(",", "")) for cell in column) for column in zip(*parts, strict=True)]
    assert sums == pytest.approx([own.usd, own.watts], abs=0.1)
    assert every == [f"${own.usd:,.0f}", f"{own.watts:,.0f}"]


def test_serving_tells_latency() -> None:
    latency, text = served().prediction.latency, describe(served())
    assert latency is not None
    assert f"50.0 queries/s, half of them within {duration(latency.p50_s)}, 99 % within " in words(text.splitlines())
    assert "! the target is missed: 99 % of queries within" in text
    assert "Tiers of a host, in one query" in text


def test_lines_have_100_columns_and_no_colours_unless_asked_for() -> None:
    plain = describe(planned(HOSTILE))
    assert max(map(len, plain.splitlines())) <= 100
    assert sum(line.endswith(" <- bottleneck") for line in plain.splitlines()) == 1, "the mark is on its line"
    assert "\x1b" not in plain
    assert "\x07" not in plain
    assert describe(planned(HOSTILE), colours=True).replace("\x1b[1m", "").replace("\x1b[0m", "") == plain


WORDS: dict[str, list[tuple[float, str]]] = {
    "significant": [(0, "0"), (1234.5, "1,230"), (0.012345, "0.0123"), (math.inf, "unbounded"), (math.nan, "unknown")],
    "count": [(7, "7.00"), (123.4, "123"), (56_143.2, "56,143"), (12_345_678, "12.3 M"), (math.inf, "unbounded")],
    "duration": [(0, "0 s"), (1.5, "1.50 s"), (0.00123, "1.23 ms"), (3e-9, "3.00 ns"), (math.inf, "unbounded")],
    "share": [(0.1234, "12.3 %")],
    "money": [(1234.5, "$1,234"), (3.5, "$3.50")],
    "watts": [(560, "560 W"), (56_000, "56.0 kW")],
}


@pytest.mark.parametrize("name", WORDS)
def test_figures_as_people_read_them(name: str) -> None:
    assert [(value, getattr(sections, name)(value)) for value, _ in WORDS[name]] == WORDS[name]
    assert (sections.quantity(3 * 2**20, "bytes"), sections.quantity(12_000, "reads")) == ("3.0 MiB", "12,000 reads")
    assert sections.resource("ssd reads") == "SSD reads"

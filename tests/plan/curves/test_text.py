"""Curves as text."""

import numpy as np

from tierstore.plan import MissRatioCurve
from tierstore.plan.curves import describe_curves


def straight(num_rows: int) -> MissRatioCurve:
    """One in ten hits for each tenfold size up to ten million, hit rate by the logarithm of the size."""
    sizes = np.unique(np.geomspace(1, num_rows, 50).astype(np.int64))
    return MissRatioCurve(
        policy="lru", sizes=sizes, miss_ratios=1 - np.log10(sizes) / 7, num_accesses=5000, num_rows=num_rows
    )


def test_a_table_of_hit_rates_and_bars() -> None:
    text = describe_curves({"lru": straight(10_000_000), "lfu": straight(10_000)}, [100, 10_000_000])
    lines = text.splitlines()
    assert lines[0].split() == ["rows", "cached", "lru", "lfu", "(hit", "rates)"]
    assert [line.split() for line in lines[1:3]] == [
        ["100", "0.2857", "0.2857"],
        ["10,000,000", "1.0000", "0.5714"],
    ]
    assert lines[4].split("|")[1].split() == ["10,000", "10,000,000"]
    bars = [line.split("|")[1] for line in lines[5:]]
    assert list(bars[0]) == sorted(bars[0])
    assert bars[0][0] + bars[0][-1] == "▅█"
    assert set(bars[1]) == {"▅"}
    assert lines[5].endswith("|   10,000,000 rows          5,000 accesses")
    assert max(map(len, lines)) <= 110


def test_sizes_are_round_and_reach_the_largest() -> None:
    lines = describe_curves({"lru": straight(123_456)}).splitlines()
    sizes = [int(line.split()[0].replace(",", "")) for line in lines[1 : lines.index("")]]
    assert sizes == [120, 270, 570, 1200, 2700, 5700, 12_000, 27_000, 57_000, 123_456]


def test_many_curves_are_a_line_each() -> None:
    lines = describe_curves({f"table {index}": straight(10 + index) for index in range(30)}).splitlines()
    assert len(lines) == 31
    assert lines[1].startswith("table 0")


def test_bars_begin_where_a_curve_does() -> None:
    part = MissRatioCurve(
        policy="lru", sizes=np.array([50, 100]), miss_ratios=np.array([0.5, 0.0]), num_accesses=9, num_rows=100
    )
    lines = describe_curves({"lru": straight(100), "part": part}).splitlines()
    assert lines[-3].split("|")[1].split() == ["50", "100"]
    assert lines[-1].split("|")[1][0] == "▄"


def test_a_cache_of_one_row() -> None:
    one = MissRatioCurve(policy="lru", sizes=np.array([1]), miss_ratios=np.array([0.25]), num_accesses=4, num_rows=1)
    lines = describe_curves({"lru": one}).splitlines()
    assert lines[1].split() == ["1", "0.7500"]
    assert set(lines[-1].split("|")[1]) == {"▆"}

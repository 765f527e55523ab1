"""The plots as data: figures that plotly takes, of the values that the result has, and the tables behind them."""

import json
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.plan.report.results import HOSTILE, made_curve, made_result, served_result
from tierstore.plan.report.figure import Plot, byte_ticks, time_ticks
from tierstore.plan.report.plots import plots_of, thinned
from tierstore.plan.result import PlanResult


def plots(result: PlanResult) -> dict[str, Plot]:
    return {plot.name: plot for group in plots_of(result).values() for plot in group}


def painted(value: Any) -> Any:
    """With a colour for each of the page's variables."""
    if isinstance(value, dict):
        return {key: painted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [painted(item) for item in value]
    return "#123456" if isinstance(value, str) and value.startswith("--") else value


@pytest.mark.parametrize(
    "result", [made_result(), served_result(), made_result(HOSTILE)], ids=["training", "serving", "hostile"]
)
def test_plotly_takes_every_figure_and_every_plot_has_a_table(result: PlanResult) -> None:
    for plot in plots(result).values():
        figure = go.Figure(painted(plot.figure))
        assert len(figure.data) == len(plot.figure["data"])
        assert plot.title[0].isupper() or not plot.title[0].isalpha()
        assert plot.table.rows
        assert {len(row) for row in plot.table.rows} == {len(plot.table.columns)}
        json.dumps(plot.figure, allow_nan=False)


def test_every_plot_is_there_and_curves_by_table_and_time_wait_to_be_asked_for() -> None:
    found = plots(made_result())
    assert list(found) == [
        *("curves", "tables", "windows", "roofline", "loads", "tiers", "gains", "grid", "line0", "line1"),
        *("setups", "price"),
    ]
    assert [name for name, plot in found.items() if plot.folded] == ["tables", "windows"]
    assert list(plots(served_result())) == [
        "curves",
        "tables",
        "windows",
        "loads",
        "tiers",
        "gains",
        "price",
    ]


def test_the_curve_is_the_results_own_with_the_plan_on_it() -> None:
    lru, opt, dot = plots(made_result())["curves"].figure["data"]
    curve = made_curve()
    for x, y in zip(lru["x"], lru["y"], strict=True):
        (index,) = np.flatnonzero(curve.sizes == x)
        assert y == pytest.approx(100 * curve.miss_ratios[index])
    assert (lru["x"][0], lru["x"][-1]) == (1, 500_000)
    assert (lru["name"], opt["name"]) == ("lru", "opt")
    assert (dot["x"], dot["y"]) == ([125_000.0], [pytest.approx(50, abs=0.1)])
    title = plots(made_result())["curves"].title
    assert title.startswith(
        "Memory for 125,000 rows (8.0 MiB) misses 50.0 % of accesses; twice as much would miss 29.3 %"
    )


def test_thinning_keeps_ends_and_takes_sizes_of_the_curve() -> None:
    curve = made_curve()
    sizes, ratios = thinned(curve, 20)
    assert len(sizes) <= 20
    assert (sizes[0], sizes[-1]) == (curve.sizes[0], curve.sizes[-1])
    assert set(sizes) <= set(curve.sizes.tolist())
    assert ratios == [curve.miss_ratio(size) for size in sizes]
    one = made_curve(top=2)
    assert thinned(one, 20)[0] == one.sizes.tolist()


def test_the_roof_is_the_step_and_the_title_tells_where_its_reason_changes() -> None:
    plot = plots(made_result())["roofline"]
    *bounds, step, mark = plot.figure["data"]
    assert [each["name"] for each in bounds] == ["dense model", "SSD reads"]
    assert step["y"] == [max(values) for values in zip(*(each["y"] for each in bounds), strict=True)]
    assert (mark["x"], mark["y"]) == ([2.0**23], [0.004])
    assert plot.title == "With little memory bound by SSD reads; from 16.0 MiB on by dense model"


def test_shares_of_tiers_add_up() -> None:
    data = plots(made_result())["tiers"].figure["data"]
    assert {each["name"]: each["x"][0] for each in data} == pytest.approx({"DDR": 50, "page cache": 12.5, "SSD": 37.5})


def test_loads_are_in_order_with_one_bottleneck() -> None:
    figure = plots(made_result())["loads"].figure
    assert [(bar["name"], bar["y"], bar["x"], bar["marker"]["color"]) for bar in figure["data"]] == [
        ("SSD reads", ["SSD reads"], [4], "--mark"),
        ("dense model", ["computing the batch"], [2], "--rest"),
        ("work on cached rows", ["computing the batch"], [1], "--rest"),
    ]
    assert figure["layout"]["yaxis"]["categoryarray"] == ["computing the batch", "SSD reads"], "the longest at the top"


def test_the_tornado_has_a_bar_for_each_change_and_leaves_out_what_brings_nothing() -> None:
    plot = plots(made_result())["gains"]
    tenth, gib = plot.figure["data"]
    assert tenth["y"] == gib["y"] == ["SSD reads", "DDR"]
    assert (tenth["x"], gib["x"]) == ([10, 2], [None, 50])
    assert plot.title == "+1 GiB of DDR brings 50.0 % more samples/s; more flops brings nothing"


def test_the_heat_map_marks_the_plan_and_tells_which_step_is_better() -> None:
    plot = plots(made_result())["grid"]
    heat, mark = plot.figure["data"]
    assert (mark["x"], mark["y"]) == (["8.0 MiB"], ["200,000/s"])
    assert heat["z"][1] == list(made_result().lines[0].samples_per_s)
    assert plot.title == "The next step of memory brings 100.0 % more samples/s, that of drives 100.0 %"


def test_setups_that_reach_the_target_are_told_from_those_that_fail() -> None:
    plot = plots(made_result())["setups"]
    reach, fail, this = plot.figure["data"]
    assert (reach["y"], fail["y"], this["y"]) == ([90e3], [20e3], [64e3])
    assert [row[-1] for row in plot.table.rows] == [
        "this plan",
        "reaches it",
        "too slow by 2.5 on shop",
        "does not fit: memory",
    ]


def test_names_of_files_are_escaped_for_plotly() -> None:
    text = json.dumps([plot.figure for plot in plots(made_result(HOSTILE)).values()])
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text


def test_ticks_are_few_and_inside() -> None:
    for low, high in ((3e6, 7e12), (1.5e9, 1.7e9), (1, 2)):
        places, texts = byte_ticks(low, high)
        assert len(places) == len(texts) <= 6
        assert all(low <= place <= high for place in places)
    assert byte_ticks(2**29, 2**31) == ([2.0**29, 2.0**30, 2.0**31], ["512 MiB", "1 GiB", "2 GiB"])
    assert time_ticks(8e-4, 3e-3) == ([1e-3, 2e-3], ["1.00 ms", "2.00 ms"])
    assert time_ticks(1.1e-3, 1.2e-3)[0] == [1.1e-3, 1.2e-3]

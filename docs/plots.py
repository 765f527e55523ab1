"""The plots of docs, drawn from the JSON in bench/results.

Each names the figures it was drawn from, so that a check needs no drawing: another release of the library draws other
bytes.
"""

import hashlib
import io
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["PLOTS", "Plot", "draw", "is_current"]

Plot = Callable[[Any, dict[str, Any]], None]
"""Draws a result's figures on matplotlib's axes."""


def _growth(axes: Any, figures: dict[str, Any]) -> None:
    for name, label in (("file_bytes", "each rewrites every row"), ("file_bytes_of_parts", "each rewrites a few rows")):
        sizes = figures[name]
        axes.plot(range(len(sizes)), [size / sizes[0] for size in sizes], label=label)
    axes.axhline(2.2, color="0.6", linewidth=1, linestyle="--", label="goal: under 2.2")
    axes.set(xlabel="commits", ylabel="size of the row file, of the first commit's", ylim=(0, 3))
    axes.legend(loc="lower right")


def _bars(axes: Any, rates: dict[str, dict[str, float]], scale: float) -> None:
    """A bar a name, the fastest first, with a whisker from the lowest to the highest repetition."""
    names = sorted(rates, key=lambda name: rates[name]["median"])
    values = [rates[name]["median"] * scale for name in names]
    spread = [
        [(rates[name]["median"] - rates[name]["lowest"]) * scale for name in names],
        [(rates[name]["highest"] - rates[name]["median"]) * scale for name in names],
    ]
    colors = ["C0" if name.startswith("tierstore") else "0.7" for name in names]
    axes.barh(names, values, xerr=spread, color=colors, ecolor="0.4")


def _training(axes: Any, figures: dict[str, Any]) -> None:
    labels = {
        "tierstore": "tierstore, rows updated in backward",
        "tierstore, backward and then store.optimizer().step()": "tierstore, store.optimizer().step()",
        "the same with clip_grad_norm_ between": "tierstore, gradients clipped, then step()",
        "torch.nn.EmbeddingBag, sparse": "torch.nn.EmbeddingBag, sparse",
        "FBGEMM, table-batched": "FBGEMM, table-batched",
    }
    rates = figures["train"]["lookups_per_s"]["row-wise Adagrad"]
    _bars(axes, {label: rates[name] for name, label in labels.items()}, 1e-6)
    axes.set(xlabel="million lookups/s, row-wise Adagrad")


def _cold_reads(axes: Any, figures: dict[str, Any]) -> None:
    case = figures["cases"][0]
    _bars(axes, case["rates"], 1e-3)
    axes.set(xlabel=f"thousand rows/s from SSD, {case['dim']} float32 a row")


def _of_tiers(axes: Any, figures: dict[str, Any], quantity: str, scale: float) -> None:
    """A line for each workload of bench.tiers, over the share of its tables in DDR."""
    points = [point for part in ("zipf", "criteo") if part in figures for point in figures[part]["points"]]
    for name in dict.fromkeys(point["workload"] for point in points):
        mine = [point for point in points if point["workload"] == name]
        shares = [point["budget_percent"] for point in mine]
        (line,) = axes.plot(shares, [scale * point[quantity] for point in mine], marker="o", label=name)
        if quantity == "step_s":
            roofline = [scale * point["roofline_s"] for point in mine]
            axes.plot(shares, roofline, color=line.get_color(), linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([1, 5, 10, 20, 50, 100], ["1", "5", "10", "20", "50", "100"])
    axes.set_xticks([], minor=True)
    axes.legend()


def _step_time(axes: Any, figures: dict[str, Any]) -> None:
    _of_tiers(axes, figures, "step_s", 1e3)
    axes.set_yscale("log")
    axes.set(xlabel="% of the tables in DDR; dashed: the roofline", ylabel="ms a step")


def _hit_rate(axes: Any, figures: dict[str, Any]) -> None:
    _of_tiers(axes, figures, "hit_rate", 100)
    axes.set(xlabel="% of the tables in DDR", ylabel="% of lookups that hit", ylim=(0, 102))


def _served(axes: Any, figures: dict[str, Any]) -> None:
    """Latencies by load of bench.serve, the median of each load's repetitions."""
    load = figures["load"]
    for protocol in dict.fromkeys(step["protocol"] for step in load["steps"]):
        own = [step for step in load["steps"] if step["protocol"] == protocol]
        rates = sorted({step["rate"] for step in own})
        for name, style in (("p99", "-"), ("p50", ":")):
            values = [statistics.median(step[name] for step in own if step["rate"] == rate) for rate in rates]
            axes.plot(rates, values, marker=".", linestyle=style, label=f"{protocol}, {name}")
    axes.axhline(load["p99_ms"], color="0.6", linewidth=1, label="bound of p99")
    axes.set_yscale("log")
    axes.set(xlabel="queries/s of 270 samples on average", ylabel="ms")
    axes.legend()


def _by_batch(axes: Any, figures: dict[str, Any]) -> None:
    """A line for each optimizer and set of bench.generalisation; bands from the least to the most of any seed."""
    cells, styles = figures["cells"], {"criteo": "-", "items": "--"}
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(cell["optimizer"] for cell in cells))}
    for name, style in styles.items():
        for optimizer, color in colors.items():
            own = [cell for cell in cells if (cell["set"], cell["optimizer"]) == (name, optimizer)]
            batches, aucs = [cell["batch"] for cell in own], [[run["auc"] for run in cell["runs"]] for cell in own]
            label = optimizer if name == "criteo" else None
            axes.plot(batches, list(map(statistics.fmean, aucs)), style, color=color, marker=".", label=label)
            axes.fill_between(batches, list(map(min, aucs)), list(map(max, aucs)), color=color, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="rows a batch; dashed: next items", ylabel="test AUC")
    axes.legend(loc="lower left")


PLOTS: Final[dict[str, tuple[str, Plot]]] = {
    "commit_growth.svg": ("commit", _growth),
    "train.svg": ("overhead", _training),
    "cold.svg": ("cold", _cold_reads),
    "tiers_step.svg": ("tiers", _step_time),
    "tiers_hits.svg": ("tiers", _hit_rate),
    "serve_load.svg": ("serve", _served),
    "batches.svg": ("generalisation", _by_batch),
}
"""By file: the result it is drawn from, and how."""


def _mark(figures: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
    return f"<!-- drawn from figures {digest[:16]} -->"


def is_current(path: Path, figures: dict[str, Any]) -> bool:
    """Whether the plot at ``path`` was drawn from these figures."""
    return path.exists() and _mark(figures) in path.read_text()


def draw(path: Path, plot: Plot, figures: dict[str, Any]) -> None:
    """Draw a plot into an SVG file."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    with mpl.rc_context({"svg.hashsalt": path.name, "font.size": 9}):
        figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
        plot(axes, figures)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    path.write_text("\n".join([*lines, _mark(figures)]) + "\n")

"""The plots of docs, drawn from the JSON in bench/results.

Each names the figures it was drawn from, so that a check needs no drawing: another release of the library draws other
bytes.
"""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["PLOTS", "Plot", "draw", "is_current"]

Plot = Callable[[Any, dict[str, Any]], None]
"""Draws a result's figures on matplotlib's axes."""


def _growth(axes: Any, figures: dict[str, Any]) -> None:
    sizes, data_bytes = figures["file_bytes"], figures["data_bytes"]
    axes.plot(range(1, len(sizes) + 1), [size / data_bytes for size in sizes], label="row file")
    axes.axhline(1, color="0.6", linewidth=1, label="the data")
    axes.axhline(2.5, color="0.6", linewidth=1, linestyle="--", label="goal: under 2.5")
    axes.set(xlabel="commits, each of which rewrote every row", ylabel="size, of the data", ylim=(0, 3))
    axes.legend(loc="lower right")


PLOTS: Final[dict[str, tuple[str, Plot]]] = {"commit_growth.svg": ("commit", _growth)}
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

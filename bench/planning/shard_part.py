"""Part "shards": how evenly devices are loaded by a plan when it is run."""

import dataclasses
from typing import Any, Final

from ..common import Run, Table
from ..parts import Part, Told
from .sharding import measure_sharding

__all__ = ["PART"]


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    found = dataclasses.asdict(measure_sharding(request.folder, quick=request.quick))
    return found | {"held_out": {name: each._asdict() for name, each in found["held_out"].items()}}


def _tell(figures: dict[str, Any]) -> Told:
    models = [
        [name, f"{each['median']:.1%}", f"{each['p90']:.1%}", f"{each['worst']:.0%}", f"{each['bias']:+.1%}"]
        for name, each in figures["held_out"].items()
    ]
    plans = [
        [
            f"{each['num_devices']}, {each['model']}", str(each["parts"]), f"{each['predicted_balance']:.3f}",
            f"{each['balance']:.3f}", f"{1e3 * each['slowest_s']:.1f}", f"{1e3 * each['total_s']:.1f}",
        ]
        for each in figures["plans"]
    ]  # fmt: skip
    columns = ["devices, by", "parts", "balance predicted", "measured", "slowest ms", "all ms"]
    return Told(
        tables=[
            Table(
                title="costs of tables that no model was fitted to",
                columns=["model", "median error", "p90", "worst", "bias"],
                rows=models,
            ),
            Table(title="40 tables over devices: the most loaded over the mean", columns=columns, rows=plans),
        ],
        notes=[
            f"Shards: models are fitted to {figures['num_fitted']} lookups of other tables ({figures['fit_s']:.0f} s). "
            "A device is a store on one thread; forward and backward of its parts are timed. By 'timed': each table's "
            "own measured time, the best that a model of single tables can do."
        ],
    )  # fmt: skip


PART: Final = Part(_measure, _tell)

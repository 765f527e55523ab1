"""Training in the shape of Criteo-Kaggle: steps a second with all rows, a tenth and a hundredth in device memory.

The rest are in host memory. Every run takes the same steps and must end in the same bits.
"""

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import tierstore

from ..common import Goal, Spread, Table
from .part import Part
from .rig import Rig
from .stores import Batch, Trainer, draw_batches, hbm_bytes, make_tables, open_fresh

__all__ = ["run"]

_ALL: Final = 1.0
_SPARE: Final = 1.6
"""Slots for each row where all rows shall have one in their set."""
_WANTED: Final = 0.9


def run(rig: Rig, config: dict[str, Any], folder: Path) -> Part:
    batches = draw_batches(rig, config["table_sizes"], config["exponent"], config["batch"], config["steps"])
    with contextlib.ExitStack() as stack:
        trainers = {share: _open(rig, config, folder, share, stack) for share in config["shares"]}
        for trainer in trainers.values():
            trainer.take_steps(batches)
        before = {share: trainer.store.stats().hbm for share, trainer in trainers.items()}
        seconds: dict[float, list[float]] = {share: [] for share in trainers}
        for _ in range(config["repetitions"]):
            for share, trainer in trainers.items():
                seconds[share].append(trainer.take_steps(batches) / len(batches))
        waited = {share: trainer.waited_share(batches) for share, trainer in trainers.items()}
        ends = {share: trainer.digest(batches) for share, trainer in trainers.items()}
        cases = {share: _case(trainer, before[share], seconds[share]) for share, trainer in trainers.items()}
        dense = next(iter(trainers.values())).dense_seconds(batches, config["dim"]) / len(batches)
    for share, case in cases.items():
        case |= {"waited_share": waited[share], "bits": ends[share]}
    return _report(cases, dense, batches, config)


def _open(rig: Rig, config: dict[str, Any], folder: Path, share: float, stack: contextlib.ExitStack) -> Trainer:
    rule = tierstore.optim.RowWiseAdagrad(lr=0.02)
    rows = sum(config["table_sizes"])
    # A row of this shape: its weights, and a word of state.
    budget = hbm_bytes(rows * (share if share < _ALL else _SPARE), 4 * config["dim"] + 8)
    store = open_fresh(folder / f"gpu-training-{share}", ddr=config["ddr"], hbm=budget, device=str(rig.device))
    stack.callback(store.close)
    make_tables(store, config["table_sizes"], config["dim"], rule)
    return Trainer(rig, store, config, depth=config["depth"])


def _case(trainer: Trainer, before: Any, seconds: list[float]) -> dict[str, Any]:
    after = trainer.store.stats().hbm
    return {
        "step_s": asdict(Spread.of(seconds)),
        "capacity_rows": after.capacity_rows,
        "hbm_bytes": after.bytes,
        "hit_rate": (after.hits - before.hits) / (after.unique - before.unique),
        "conflict_misses": after.conflict_misses,
        "split_batches": after.split_batches,
    }


def _report(cases: dict[float, dict[str, Any]], dense: float, batches: list[Batch], config: dict[str, Any]) -> Part:
    rows = sum(config["table_sizes"])
    whole = cases[_ALL]["step_s"]["median"]
    least = min(cases)
    shown = [
        [
            "all rows" if share == _ALL else f"{share:.0%} of rows",
            f"{case['hbm_bytes'] / 2**20:,.0f} MiB",
            f"{case['hit_rate']:.1%}",
            f"{1 / case['step_s']['median']:,.0f}",
            f"{case['step_s']['median'] * 1e3:.2f}",
            f"{whole / case['step_s']['median']:.2f}",
            f"{case['waited_share']:.1%}",
            case["bits"][:12],
        ]
        for share, case in cases.items()
    ]
    shown.append(
        ["dense part alone", "", "", f"{1 / dense:,.0f}", f"{dense * 1e3:.2f}", f"{whole / dense:.2f}", "", ""]
    )
    return Part(
        tables=[
            Table(
                title=f"DLRM, {len(config['table_sizes'])} tables, {rows:,} rows of {config['dim']}, batch "
                f"{config['batch']:,}, Zipf {config['exponent']}",
                columns=["in device memory", "takes", "hits", "steps/s", "ms/step", "of all", "stood still", "bits"],
                rows=shown,
            )
        ],
        figures={"cases": {str(share): case for share, case in cases.items()}, "dense_step_s": dense},
        goals=[
            Goal(
                name=f"training with {least:.0%} of rows in device memory: steps a second over those with all",
                value=round(whole / cases[least]["step_s"]["median"], 3),
                at_least=_WANTED,
            ),
            Goal(
                name="training: different ends, over all sizes of device memory",
                value=len({case["bits"] for case in cases.values()}),
                exactly=1,
            ),
        ],
        notes=[
            f"Training: {len(batches)} batches again and again, {config['depth']} of them prefetched, dense features "
            "on the device already, ids on the host; rows that are not in device memory are in host memory after the "
            "first pass, which is not timed. Stood still: the share of the time for which the model's stream waited "
            "for rows (CUDA events). Bits: digest of the dense weights and of every row that was trained."
        ],
    )

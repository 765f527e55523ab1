"""Training in the shape of Criteo-Kaggle, all rows in device memory: steps a second beside torch's own DLRM.

Every step has a batch that was never seen before. Torch's has one ``nn.EmbeddingBag`` a table, in device memory, with
sparse gradients and SGD; the tier's has row-wise Adagrad.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

import tierstore

from ..common import Goal, Report, Table, fresh_folder, spread
from ..workload import make_store
from .rig import Asked, Rig, asked_of
from .stores import Batch, Steps, Trainer, draw_batches, hbm_bytes, shape_of

SPARE: Final = 1.6
"""Of the rows: device memory for so many has room for all of them, whatever holds them."""
_WANTED: Final = 1.0
_PROBES: Final = 2
_NAMES: Final = {
    "tierstore": "tierstore",
    "torch": "torch's DLRM, nn.EmbeddingBag",
    "dense part": "dense part alone",
}


class _TorchTables(nn.Module):
    """Every table an ``nn.EmbeddingBag`` on the device; ids come from the host."""

    def __init__(self, sizes: Sequence[int], dim: int, device: torch.device) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, include_last_offset=True, device=device)
            for rows in sizes
        )
        self._device = device

    def forward(self, features: tierstore.KeyedJaggedTensor) -> Any:
        ids = features.values().to(self._device, non_blocking=True).chunk(len(self.tables))
        offsets = torch.arange(len(ids[0]) + 1, device=self._device)
        pooled = torch.cat([table(own, offsets) for table, own in zip(self.tables, ids, strict=True)], dim=1)
        return SimpleNamespace(values=lambda: pooled)  # as the tier's collection answers


def measure(rig: Rig, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    sizes, rule = config["table_sizes"], tierstore.optim.RowWiseAdagrad(lr=0.02)
    budget = hbm_bytes(SPARE * sum(sizes), 4 * config["dim"] + 8)
    shape = {"rows": sizes, "dim": config["dim"], "ddr": config["ddr"], "hbm": budget, "device": str(rig.device)}
    with fresh_folder(folder / "gpu-training") as path, make_store(path, optimizer=rule, **shape) as store:
        own = Trainer(rig, store, config, depth=config["depth"])
        theirs = Steps(rig, _TorchTables(sizes, config["dim"], rig.device), len(sizes), config)
        cases = [_measure(rig, own, theirs, case, config) for case in config["cases"]]
        return {"cases": cases, "hbm_bytes": store.stats().hbm.bytes, "shape": shape_of(config)}


def _measure(rig: Rig, own: Trainer, theirs: Steps, case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    steps, repetitions = case["steps"], config["repetitions"]
    batches = draw_batches(
        rig, config["table_sizes"], config["exponent"], case["batch"], (repetitions + 1) * steps + 2 * _PROBES
    )
    rounds = [batches[start : start + steps] for start in range(0, (repetitions + 1) * steps, steps)]
    seconds: dict[str, list[float]] = {name: [] for name in ("tierstore", "torch", "dense part")}
    for number, part in enumerate(rounds):
        taken = {"tierstore": own.take_steps(part), "torch": theirs.take_steps(part)}
        taken["dense part"] = own.dense_seconds(part, config["dim"])
        for name in seconds if number else ():
            seconds[name].append(taken[name] / steps)
    probes = batches[-2 * _PROBES :]
    asked = {"tierstore": _asked(rig, own, probes[:_PROBES]), "torch": _asked(rig, theirs, probes[_PROBES:])}
    return {
        "batch": case["batch"],
        "steps": steps,
        "step_s": {name: spread(each) for name, each in seconds.items()},
        "asked": {name: None if found is None else found._asdict() for name, found in asked.items()},
    }


def _asked(rig: Rig, steps: Steps, batches: list[Batch]) -> Asked | None:
    """Of a step without prefetching, the dense part's included; the first one warms up."""
    for batch in batches[:-1]:
        steps.step(batch)
    return asked_of(rig, lambda: steps.step(batches[-1]))


def tell(found: dict[str, Any]) -> Report:
    rows, goals = [], []
    for case in found["cases"]:
        own = case["step_s"]["tierstore"]["median"]
        for name, seconds in case["step_s"].items():
            median, asked = seconds["median"], case["asked"].get(name)
            counts = ["", ""] if asked is None else [f"{asked['launches']}", f"{asked['waits']}"]
            times = [f"{1 / median:,.0f}", f"{median * 1e3:.2f}", f"{median / own:.2f}"]
            rows.append([f"{case['batch']:,}: {_NAMES[name]}", *times, *counts])
        name = f"training, all rows in device memory, batch {case['batch']:,}: steps a second over torch's DLRM"
        goals.append(Goal(name, round(case["step_s"]["torch"]["median"] / own, 3), at_least=_WANTED))
    title = f"DLRM, {found['shape']}, all in device memory ({found['hbm_bytes'] / 2**20:,.0f} MiB)"
    columns = ["batch", "steps/s", "ms/step", "x tierstore", "launches a step", "waits"]
    note = (
        "Training, all rows in device memory: batches never seen before, dense features and labels on the device, ids "
        "on the host, prefetched by the tier. Torch: nn.EmbeddingBag with sparse gradients and SGD, where the tier has "
        "row-wise Adagrad. Launches and waits: of one step without prefetching, those of the dense part included, as "
        "the profiler sees them."
    )
    return Report([Table(title, columns, rows)], goals, [note])

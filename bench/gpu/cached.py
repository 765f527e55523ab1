"""Training in the shape of Criteo-Kaggle, some rows in device memory: steps a second beside those with all rows there.

All rows are in host memory before. Every run takes the same steps, each with a batch that was never seen before, and
must end in the same bits.
"""

import contextlib
from pathlib import Path
from typing import Any, Final

import tierstore

from ..common import Goal, Report, Table, fresh_folder, spread
from ..workload import make_store
from .rig import Rig, asked_of
from .stores import Batch, Trainer, draw_batches, fill_host_memory, hbm_bytes, shape_of
from .training import SPARE

_ALL: Final = 1.0
_WANTED: Final = 0.9


def measure(rig: Rig, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    steps, repetitions = config["steps"], config["repetitions"]
    # A first round to warm up, and one step to count.
    count = (repetitions + 1) * steps + 1
    batches = draw_batches(rig, config["table_sizes"], config["exponent"], config["batch"], count)
    cases = {}
    for share in config["shares"]:
        with contextlib.ExitStack() as stack:
            trainer = _open(rig, config, folder, share, stack)
            cases[str(share)] = _measure(rig, trainer, batches, config)
    return {"cases": cases, "shape": shape_of(config), "depth": config["depth"]}


def _open(rig: Rig, config: dict[str, Any], folder: Path, share: float, stack: contextlib.ExitStack) -> Trainer:
    sizes, rule = config["table_sizes"], tierstore.optim.RowWiseAdagrad(lr=0.02)
    # A row of this shape: its weights, and a word of state.
    budget = hbm_bytes(sum(sizes) * (share if share < _ALL else SPARE), 4 * config["dim"] + 8)
    shape = {"rows": sizes, "dim": config["dim"], "ddr": config["ddr"], "hbm": budget, "device": str(rig.device)}
    path = stack.enter_context(fresh_folder(folder / f"gpu-cached-{share}"))
    store = stack.enter_context(make_store(path, optimizer=rule, **shape))
    trainer = Trainer(rig, store, config, depth=config["depth"])
    if share < _ALL:
        fill_host_memory(store)
    return trainer


def _measure(rig: Rig, trainer: Trainer, batches: list[Batch], config: dict[str, Any]) -> dict[str, Any]:
    steps = config["steps"]
    rounds = [batches[start : start + steps] for start in range(0, len(batches) - 1, steps)]
    trainer.take_steps(rounds[0])
    before = trainer.store.stats().hbm
    seconds = [trainer.take_steps(part) / steps for part in rounds[1:]]
    after = trainer.store.stats().hbm
    asked = asked_of(rig, lambda: trainer.step(batches[-1]))
    if asked is None:
        trainer.step(batches[-1])
    found = after.unique - before.unique
    return {
        "step_s": spread(seconds),
        "capacity_rows": after.capacity_rows,
        "hbm_bytes": after.bytes,
        "hit_rate": (after.hits - before.hits) / found if found else 1.0,
        "conflict_misses": after.conflict_misses,
        "split_batches": after.split_batches,
        "asked": None if asked is None else asked._asdict(),
        "bits": trainer.digest(batches[-steps:]),
    }


def tell(found: dict[str, Any]) -> Report:
    cases = {float(share): case for share, case in found["cases"].items()}
    whole, least = cases[_ALL]["step_s"]["median"], min(cases)
    name, ends = "training: different ends, over all sizes of device memory", {case["bits"] for case in cases.values()}
    goals = [Goal(name, len(ends), exactly=1)]
    if least < _ALL:
        reached = round(whole / cases[least]["step_s"]["median"], 3)
        name = f"training with {least:.0%} of rows in device memory: steps a second over those with all"
        goals.insert(0, Goal(name, reached, at_least=_WANTED))
    columns = ["in device memory", "takes", "hits", "steps/s", "ms/step", "of all", "launches", "waits"]
    rows = [_row(share, case, whole) for share, case in cases.items()]
    note = (
        f"Training, some rows in device memory: batches never seen before, {found['depth']} of them prefetched, dense "
        "features on the device already, ids and all other rows in host memory. Launches and waits: of one more step, "
        "without prefetching and with the dense part's. Bits: digest of the dense weights and of the rows of the last "
        "steps."
    )
    return Report([Table(f"DLRM, {found['shape']}", [*columns, "bits"], rows)], goals, [note])


def _row(share: float, case: dict[str, Any], whole: float) -> list[str]:
    median, asked = case["step_s"]["median"], case["asked"]
    return [
        "all rows" if share == _ALL else f"{share:.0%} of rows",
        f"{case['hbm_bytes'] / 2**20:,.0f} MiB",
        f"{case['hit_rate']:.1%}",
        f"{1 / median:,.0f}",
        f"{median * 1e3:.2f}",
        f"{whole / median:.2f}",
        *(["", ""] if asked is None else [f"{asked['launches']}", f"{asked['waits']}"]),
        case["bits"][:12],
    ]

"""Part "tiers": time of a step with few of the rows in host memory and the rest on SSD, over ranks."""

import shutil
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import tierstore

from ..common import Goal, Run, Table
from ..parts import Part, Told
from ..steps import kaggle
from ..workload import CHUNK
from .ranks import run_ranks
from .systems import Ours, Setup
from .turns import contender, spreads, take_turns

__all__ = ["PART"]

RANKS: Final = 2
MEMORY: Final = "all rows in DDR"
FEW: Final = "few rows in DDR"
_GOAL: Final = 0.8


def _write_owned(system: Ours) -> None:
    """Every row that this rank owns, so that it has to be read, where else it would be computed."""
    for table in system.store.tables.values():
        owned = table.local.rows
        for first in range(owned.start, owned.stop, CHUNK):
            ids = torch.arange(first, min(first + CHUNK, owned.stop))
            table.local.write(ids, torch.full((len(ids), table.config.embedding_dim), 0.01))
    system.store.commit()


def _in_rank(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    warm, turns = config["tiers_warm_batches"], config["tiers_turns"] + 1
    shape = {"kaggle_batch": config["batch"], "kaggle_dim": config["dims"][0], "seed": config["seed"] + dist.get_rank()}
    workload = kaggle(config | shape, warm + turns * config["tiers_batches"])
    few = int(workload.table_bytes * config["tiers_percent"] / 100 / RANKS)
    mlps, found = (config["bottom_mlp"], config["top_mlp"]), {}
    for name, is_model in (("tables alone", False), ("DLRM", True)):
        systems = {}
        for ddr, where in ((None, MEMORY), (str(few), FEW)):
            setup = Setup(
                workload.rows,
                workload.dim,
                "row_wise",
                mlps=mlps if is_model else None,
                ddr=ddr,
                folder=folder / name / where,
            )
            systems[where] = Ours(setup)
            _write_owned(systems[where])
        contenders = {
            where: contender(system, workload.batches[warm:], is_model=is_model, turns=turns, depth=config["depth"])
            for where, system in systems.items()
        }
        for system in systems.values():
            with torch.no_grad():
                for batch in tierstore.prefetch(workload.batches[:warm], system.module):
                    system.module(batch)
        before = systems[FEW].store.local.stats().ddr
        seconds = take_turns(contenders, turns - 1)
        after = systems[FEW].store.local.stats().ddr
        hit_rate = (after.hits - before.hits) / (after.unique - before.unique)
        found[name] = {"seconds": seconds, "hit_rate": hit_rate}
        for system in systems.values():
            system.close()
    return found | {"rows": sum(workload.rows)}


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    folder = request.folder / "dist_store"
    shutil.rmtree(folder, ignore_errors=True)
    of_ranks = run_ranks(_in_rank, RANKS, request.config, folder)
    shutil.rmtree(folder)
    points = [
        {
            "what": what,
            "seconds": spreads([each[what]["seconds"] for each in of_ranks]),
            "hit_rate": [each[what]["hit_rate"] for each in of_ranks],
        }
        for what in ("tables alone", "DLRM")
    ]
    names = "tiers_percent", "batch", "depth"
    return {"points": points, "rows": of_ranks[0]["rows"], **{name: request.config[name] for name in names}}


def _tell(figures: dict[str, Any]) -> Told:
    rows, ratios = [], []
    for point in figures["points"]:
        memory, few = (point["seconds"][where]["median"] for where in (MEMORY, FEW))
        ratios.append(memory / few)
        hits = min(point["hit_rate"])
        rows.append([point["what"], f"{1e3 * memory:.1f}", f"{1e3 * few:.1f}", f"{hits:.1%}", f"{memory / few:.2f}"])
    percent = figures["tiers_percent"]
    columns = ["step of", MEMORY, f"{percent} % in DDR", "hits", "of its speed"]
    title = f"ms of a step of {RANKS} ranks, row-wise, {figures['rows']:,} rows, Zipf 1.05"
    goal = Goal(
        name=f"{RANKS} ranks, {percent} % of rows in DDR: speed over all in memory, DLRM",
        value=round(ratios[-1], 3),
        at_least=_GOAL,
    )
    note = (
        "Tiers: the shape of Criteo-Kaggle's tables, every row written before, the files in the page cache; "
        f"{figures['batch']:,} samples a rank, batches prefetched {figures['depth']} ahead."
    )
    return Told(tables=[Table(title=title, columns=columns, rows=rows)], goals=[goal], notes=[note])


PART: Final = Part(_measure, _tell)

"""Placement by tierstore: all rows on SSD, those in use in memory and in that of accelerators."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ...errors import BudgetError
from ..host import Host
from ..prediction import Prediction
from ..tiers import file_of
from ..workload import Workload
from .plan import PlacedPart, PlacementPlan, Room, Step, StoreModel, TierUse

__all__ = ["place_on_ssd", "stored_bytes"]


def place_on_ssd(
    workload: Workload, host: Host, *, hosts: int, room: Room, store_model: StoreModel | None
) -> PlacementPlan:
    """Each host has an equal part of the rows of every table on its drives, and caches in its memories.

    Raises:
        ValueError: no ``store_model``.
    """
    if store_model is None:
        raise ValueError('strategy "ssd" needs a store_model, which says what a step through the tiers takes')
    needed, drives = stored_bytes(workload, 1), room.ssd_share * sum(each.capacity_bytes for each in host.storage)
    used = float(hosts * stored_bytes(workload, hosts))
    plan = PlacementPlan(
        strategy="ssd", workload=workload.name, host=host.name, hosts=hosts, parts=tuple(_parts(workload, hosts)),
        tiers=(TierUse("ssd", hosts * drives, used),), missing_bytes=max(0.0, used - hosts * drives),
        hosts_needed=int(-(-needed // drives)) if drives else None,
    )  # fmt: skip
    if plan.missing_bytes:
        return dataclasses.replace(plan, why="no room in ssd" if drives else "the host has no drive")
    hbm = room.hbm_share * min((each.hbm.capacity_bytes for each in host.accelerators), default=0.0)
    ddr = room.ddr_share * host.ddr.capacity_bytes
    try:
        prediction = store_model(workload, host, hosts=hosts, ddr_bytes=ddr, hbm_bytes=hbm)
    except (BudgetError, ValueError) as error:
        return dataclasses.replace(plan, why=str(error))
    caches = tuple(_caches(workload, host, hosts, ddr, hbm))
    return dataclasses.replace(plan, fits=True, tiers=(*caches, *plan.tiers), step=_step(prediction))


def stored_bytes(workload: Workload, hosts: int) -> int:
    """What the file of one host's rows takes at most."""
    files = (file_of(workload.layout(table), -(-table.num_embeddings // hosts), workload) for table in workload.tables)
    return math.ceil(sum(file.bytes for file in files))


def _caches(workload: Workload, host: Host, hosts: int, ddr: float, hbm: float) -> Iterator[TierUse]:
    """They are used as far as there are rows for them."""
    if hbm:
        capacity = hosts * len(host.accelerators) * hbm
        yield TierUse("hbm", capacity, min(capacity, float(workload.table_bytes)))
    yield TierUse("ddr", hosts * ddr, min(hosts * ddr, float(workload.table_bytes)))


def _parts(workload: Workload, hosts: int) -> Iterator[PlacedPart]:
    for table in workload.tables:
        row_bytes, total = workload.layout(table).row_bytes, table.num_embeddings
        bounds = [total * host // hosts for host in range(hosts + 1)]
        for host, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if end > begin:
                size = (end - begin) * row_bytes
                yield PlacedPart(table.name, "ssd", host, begin, end - begin, 0, table.embedding_dim, size)


def _step(prediction: Prediction) -> Step:
    overlapped = max((load.seconds for load in prediction.loads), default=prediction.step_s)
    return Step(prediction.loads, prediction.step_s, overlapped, prediction.samples_per_s, prediction.bottleneck)

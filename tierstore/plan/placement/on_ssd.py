"""Placement by tierstore: all rows on SSD, those in use in memory and in that of accelerators."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ..demand import Demand
from ..host import Host
from ..model import predict
from ..prediction import Prediction, Setup
from ..tiers import file_of
from ..workload import Workload
from .plan import PlacedPart, PlacementPlan, Room, Step, StoreModel, TierUse

__all__ = ["place_on_ssd", "planned_store", "stored_bytes"]


def planned_store(policy: str = "auto") -> StoreModel:
    """``predict`` with the demand that follows from the workload alone."""

    def model(workload: Workload, host: Host, *, hosts: int, ddr_bytes: float, hbm_bytes: float) -> Prediction:
        setup = Setup(
            workload=workload, host=host, hosts=hosts, ddr_bytes=ddr_bytes, hbm_bytes=hbm_bytes, policy=policy,
            threads=host.processor.cores,
        )  # fmt: skip
        return predict(setup, Demand.analytic(workload, policy))

    return model


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
    except ValueError as error:
        return dataclasses.replace(plan, why=str(error))
    capacities = {"hbm": hosts * len(host.accelerators) * hbm, "ddr": hosts * ddr}
    caches = tuple(
        TierUse(tier, capacity, min(capacity, float(workload.table_bytes)))  # type: ignore[arg-type]
        for tier, capacity in capacities.items()
        if capacity or tier == "ddr"
    )
    overlapped = max((load.seconds for load in prediction.loads), default=prediction.step_s)
    step = Step(prediction.loads, prediction.step_s, overlapped, prediction.samples_per_s, prediction.bottleneck)
    return dataclasses.replace(plan, fits=True, tiers=(*caches, *plan.tiers), step=step)


def stored_bytes(workload: Workload, hosts: int) -> int:
    """What the file of one host's rows takes at most."""
    files = (file_of(workload.layout(table), -(-table.num_embeddings // hosts), workload) for table in workload.tables)
    return math.ceil(sum(file.bytes for file in files))


def _parts(workload: Workload, hosts: int) -> Iterator[PlacedPart]:
    for table in workload.tables:
        row_bytes, total = workload.layout(table).row_bytes, table.num_embeddings
        bounds = [total * host // hosts for host in range(hosts + 1)]
        for host, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if end > begin:
                size = (end - begin) * row_bytes
                yield PlacedPart(table.name, "ssd", host, begin, end - begin, 0, table.embedding_dim, size)

"""Hosts and workloads with figures to reckon with by hand."""

from dataclasses import replace
from typing import Any

from tierstore.plan import Accelerator, Host, Link, Memory, Processor, SoftwareCosts, Storage, TableShape, Workload
from tierstore.plan.placement import Room, TableDemand

ALL = Room(hbm_share=1.0, ddr_share=1.0, ssd_share=1.0)


def host_of(gpus: int, **changes: Any) -> Host:
    """Each rate another power of ten, so that seconds say where they come from."""
    gpu = Accelerator(
        hbm=Memory(capacity_bytes=1600.0, row_bytes_per_s=1e3),
        pcie=Link(bytes_per_s=1e2, latency_us=1.0),
        peer=Link(bytes_per_s=1e4, latency_us=1000.0),
        flops=1e5,
    )
    host = Host(
        name="toy",
        processor=Processor(cores=2, flops=1e6),
        ddr=Memory(capacity_bytes=4000.0, bytes_per_s=1e6, row_bytes_per_s=1e5),
        network=Link(bytes_per_s=10.0, latency_us=1e6),
        costs=SoftwareCosts(),
        accelerators=(gpu,) * gpus,
    )
    return replace(host, **changes)


def drive() -> Storage:
    return Storage(capacity_bytes=1e6)


def workload_of(tables: int = 2, *, optimizer: str = "sgd", dense_flops: float = 0.0) -> Workload:
    """Tables of 100 rows of 4 float32, 16 bytes a row; 2 ids a sample, 8 samples."""
    shapes = tuple(
        TableShape(name=f"t{index}", num_embeddings=100, embedding_dim=4, pooling_factor=2.0) for index in range(tables)
    )
    settings: dict[str, Any] = {"optimizer": optimizer, "dense_flops": dense_flops}
    return Workload(name="toy", tables=shapes, batch_samples=8, **settings)


def demand_of(workload: Workload) -> dict[str, TableDemand]:
    """16 ids a table name 10 rows."""
    return {table.name: TableDemand(16.0, 10.0) for table in workload.tables}

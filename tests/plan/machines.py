"""A small host and workload whose figures are easy to reckon with, for tests of plans."""

from dataclasses import replace
from typing import Any

from tierstore.plan import Accelerator, Host, Link, Memory, Processor, SoftwareCosts, Storage, TableShape, Workload

__all__ = ["DRIVE", "HOST", "gpu_host", "workload_of"]

DRIVE = Storage(
    capacity_bytes=1e12,
    read_latency_us=100.0,
    reads_per_s=100_000.0,
    read_bytes_per_s=2e9,
    writes_per_s=50_000.0,
    write_bytes_per_s=1e9,
    drive_writes_a_day=1.0,
    watts=10.0,
    usd=200.0,
)
HOST = Host(
    name="box",
    processor=Processor(cores=4, flops=1e11, watts=100.0, usd=500.0),
    ddr=Memory(capacity_bytes=2.0**34, bytes_per_s=2e10, row_bytes_per_s=1e10, watts=20.0, usd=100.0),
    network=Link(bytes_per_s=1e9, latency_us=10.0),
    costs=SoftwareCosts(batch_us=50.0, admit_ns=40.0, pool_ns=10.0, update_ns=50.0, miss_ns=500.0, write_ns=2000.0),
    storage=(DRIVE, DRIVE),
    watts=50.0,
    usd=300.0,
    source="figures made up for tests",
)


def gpu_host() -> Host:
    gpu = Accelerator(
        hbm=Memory(capacity_bytes=2.0**31, bytes_per_s=1e12, row_bytes_per_s=5e11),
        pcie=Link(bytes_per_s=1e10, latency_us=5.0),
        peer=Link(bytes_per_s=1e11, latency_us=2.0),
        flops=1e13,
        watts=300.0,
        usd=5000.0,
    )
    return replace(HOST, name="gpu box", accelerators=(gpu,))


def workload_of(**given: Any) -> Workload:
    tables = tuple(
        TableShape(name=name, num_embeddings=rows, embedding_dim=16, pooling_factor=4.0)
        for name, rows in (("item", 400_000), ("user", 100_000))
    )
    found: dict[str, Any] = {"name": "shop", "tables": tables, "batch_samples": 256, "optimizer": "rowwise_adagrad"}
    return Workload(**(found | given))

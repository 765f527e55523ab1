"""Hosts and workloads with round figures, to be reckoned by hand; plan files of them, and their answers."""

import argparse
import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.cli.plan import COMMANDS
from tierstore.plan import (
    Accelerator,
    Host,
    Link,
    Memory,
    MissRatioCurve,
    Processor,
    Setup,
    SoftwareCosts,
    Storage,
    TableShape,
    Workload,
)
from tierstore.plan.demand import Demand, PoolDemand
from tierstore.plan.host import write_host
from tierstore.plan.planning import PlanFile, PlanResult, load, parse_override, plan
from tierstore.plan.workload import Assumed, workload_toml

MIB, GIB = float(2**20), float(2**30)

COSTS = SoftwareCosts(
    batch_us=100.0, id_ns=40.0, byte_ns=0.1, miss_ns=200.0, read_ns=300.0, append_ns=800.0, append_ns_per_byte=1.0,
    transaction_us=400.0, wake_us=25.0, value_ns=0.6,
)  # fmt: skip
DRIVE = Storage(
    capacity_bytes=1e12, read_latency_us=100.0, reads_per_s=1e5, read_bytes_per_s=2e9, write_bytes_per_s=1e9,
    drive_writes_a_day=1.0, watts=10.0, usd=100.0,
)  # fmt: skip
DDR = Memory(capacity_bytes=64 * GIB, bytes_per_s=1e11, row_bytes_per_s=1e10, watts=20.0, usd=640.0)
GPU = Accelerator(
    hbm=Memory(capacity_bytes=8 * GIB, bytes_per_s=2e12, row_bytes_per_s=1e12),
    pcie=Link(bytes_per_s=1e10, latency_us=10.0), flops=1e13, watts=300.0, usd=10_000.0,
)  # fmt: skip


def make_host(*, drives: int = 1, gpus: int = 0, cores: int = 4, **changes: Any) -> Host:
    fields: dict[str, Any] = {
        "name": "box",
        "processor": Processor(cores=cores, flops=1e11, watts=100.0, usd=1000.0),
        "ddr": DDR,
        "network": Link(bytes_per_s=1e9, latency_us=20.0),
        "costs": COSTS,
        "storage": (DRIVE,) * drives,
        "accelerators": (GPU,) * gpus,
        "watts": 50.0,
        "usd": 500.0,
    }
    return Host(**(fields | changes))


SHOP_HOST = make_host(drives=2, ddr=replace(DDR, capacity_bytes=16 * GIB), source="figures made up for tests")


def make_workload(*, rows: int = 1_000_000, tables: int = 1, training: bool = True, **changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "name": "w",
        "tables": tuple(
            TableShape(name=f"t{number}", num_embeddings=rows, embedding_dim=64, pooling_factor=4.0)
            for number in range(tables)
        ),
        "batch_samples": 1000,
        "optimizer": "rowwise_adagrad" if training else "none",
        "dense_flops": 1e5,
    }
    return Workload(**(fields | changes))


def shop_workload(**changes: Any) -> Workload:
    tables = tuple(
        TableShape(name=name, num_embeddings=rows, embedding_dim=16, pooling_factor=4.0)
        for name, rows in (("item", 400_000), ("user", 100_000))
    )
    workload = make_workload(name="shop", batch_samples=256, dense_flops=1.0)
    return replace(workload, **({"tables": tables} | changes))


def make_setup(workload: Workload | None = None, **changes: Any) -> Setup:
    fields: dict[str, Any] = {"host": make_host(), "ddr_bytes": 64 * MIB, "threads": 2}
    return Setup(**({"workload": workload or make_workload()} | fields | changes))


def flat_demand(workload: Workload, *, unique: float, miss_ratio: float) -> Demand:
    curve = MissRatioCurve(
        policy="lru", sizes=np.ones(1, np.int64), miss_ratios=np.array([miss_ratio]), num_accesses=1, num_rows=1
    )
    pool = PoolDemand(
        tables=workload.tables,
        lookups=workload.lookups,
        unique=unique,
        curve=curve,
        rows_of=lambda parts: min(unique, workload.lookups / parts),
    )
    return Demand(batch_samples=workload.batch_samples, policy="lru", pools=(pool,))


HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\x1b[2J\x07"


def run(name: str, *words: object) -> int:
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    return COMMANDS[name].run(parser.parse_args([str(word) for word in words]))


def shop_plan(folder: Path, *overrides: str, host: Host = SHOP_HOST, workload: Workload | None = None) -> PlanFile:
    write_host(host, folder / "box.json", force=True)
    (folder / "shop.toml").write_text(workload_toml(workload or shop_workload()))
    path = folder / "plan.toml"
    path.write_text(f'[workload]\nfile = "{folder}/shop.toml"\n[host]\nfile = "{folder}/box.json"\n')
    return load(path, [parse_override(text) for text in overrides])


@functools.cache
def planned(name: str = "shop", *overrides: str) -> PlanResult:
    """Of training at a rate, by a search; a host and a table have that name."""
    tables = (TableShape(name=name, num_embeddings=400_000, embedding_dim=16, pooling_factor=4.0),)
    workload = shop_workload(name=name, tables=tables, optimizer="sgd", assumed=(Assumed("exponent", (name,)),))
    asked = overrides or ("target.samples_per_s=20000", "search.memory_shares=[0.03, 0.1]")
    with tempfile.TemporaryDirectory() as folder:
        return plan(shop_plan(Path(folder), *asked, host=replace(SHOP_HOST, name=name), workload=workload))


def served() -> PlanResult:
    keys = ("setup.ddr=8MiB", "workload.optimizer=none", "target.queries_per_s=50", "target.p99_ms=1e-6")
    return planned("shop", *keys)

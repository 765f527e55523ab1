"""Answers to plan files, whose sections are compared with their figures."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.plan.hosts import SHOP_HOST
from tierstore.plan.parts import write_host
from tierstore.plan.plan_file import HostSection, PlanFile, SearchSpace, SetupSection, TargetSection, WorkloadSection
from tierstore.plan.planning import PlanResult, plan
from tierstore.plan.workload import TableSpec

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\x1b[2J\x07"


@functools.cache
def planned(name: str = "shop") -> PlanResult:
    """Of training at a rate, by a search; a host and a table have that name."""
    return _answered(name, TargetSection(samples_per_s=20_000.0), SetupSection(), "sgd")


@functools.cache
def served() -> PlanResult:
    """Of a given setup that serves at a rate, slower than asked for."""
    return _answered("shop", TargetSection(queries_per_s=50.0, p99_ms=1e-6), SetupSection(ddr="8MiB"), "none")


def _answered(name: str, target: TargetSection, setup: SetupSection, optimizer: str) -> PlanResult:
    tables = (TableSpec(name=name, num_embeddings=400_000, embedding_dim=16, pooling_factor=4.0),)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "box.json"
        write_host(replace(SHOP_HOST, name=name), path)
        asked = PlanFile(
            workload=WorkloadSection(tables=tables, name=name, batch_samples=256, optimizer=optimizer, dense_flops=1.0),
            host=HostSection(file=str(path)), setup=setup, target=target,
            search=SearchSpace(memory_shares=(0.001, 0.01), runners_up=3),
        )  # fmt: skip
        return plan(asked)

"""The search, against looking at everything by hand, and what it says where nothing will do."""

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.hosts import DRIVE, GIB, make_host, make_workload
from tierstore.plan import Host, Memory, Prediction, Setup
from tierstore.plan.demand import Demand
from tierstore.plan.host import Pricing, years_of_life
from tierstore.plan.model import predict
from tierstore.plan.search import SearchResult, SearchSpace, Target, search

TRAINED = make_workload(rows=2_000_000, tables=2)
SERVED = make_workload(rows=2_000_000, tables=2, training=False, batch_samples=100)
DEMANDS = {workload: Demand.analytic(workload) for workload in (TRAINED, SERVED)}
DURABLE = replace(DRIVE, drive_writes_a_day=1000.0)
SMALL = Memory(capacity_bytes=2 * GIB, row_bytes_per_s=1e10, watts=20.0, usd=640.0)
HOST = make_host(storage=(DURABLE,) * 4, ddr=SMALL)
SPACE = SearchSpace(memory_shares=(0.25, 0.5, 1.0), row_shares=(0.5, 0.8), drives=(1, 2, 4), hosts=(1, 2, 3, 4))


def find(target: Target, workload: Any = TRAINED, hosts: tuple[Host, ...] = (HOST,), **options: Any) -> SearchResult:
    return search(workload, DEMANDS[workload], hosts, target, **({"space": SPACE} | options))


@functools.cache
def everything() -> list[Prediction]:
    """Every setup of the space that trains, one after another."""
    found, shares = [], itertools.product(SPACE.memory_shares, SPACE.row_shares)
    for (memory, rows), drives, hosts, dtype in itertools.product(
        shares, SPACE.drives, SPACE.hosts, ("float32", "float16")
    ):
        size = memory * 2 * GIB
        ddr = replace(SMALL, capacity_bytes=size, watts=memory * 20.0, usd=memory * 640.0)
        setup = Setup(
            workload=replace(TRAINED, dtype=dtype), host=replace(HOST, ddr=ddr, storage=HOST.storage[:drives]),
            ddr_bytes=rows * size, page_cache_bytes=(0.9 - rows) * size, hosts=hosts, threads=4,
        )  # fmt: skip
        found.append(predict(setup, DEMANDS[TRAINED]))
    return found


targets = st.one_of(
    st.builds(lambda rate: Target(samples_per_s=rate), st.floats(1e3, 2e5)),
    st.builds(lambda usd: Target(usd=usd), st.floats(1000, 12_000)),
    st.builds(lambda rate, watts: Target(samples_per_s=rate, watts=watts), st.floats(1e3, 1e5), st.floats(150, 1000)),
)


def _reaches(found: Prediction, target: Target) -> bool:
    price, limits = found.price, (target.usd or math.inf, target.watts or math.inf)
    is_within = found.samples_per_s >= target.samples_per_s and price.usd <= limits[0] and price.watts <= limits[1]
    return is_within and years_of_life(found.setup.host, found.drive_writes_a_day, Pricing()) >= 4


@settings(max_examples=20)
@given(targets)
def test_the_best_is_that_of_all(target: Target) -> None:
    """The cheapest at a rate, else the fastest; those after it are told if they are better in something; what fails has
    its reason."""
    enough = [each for each in everything() if _reaches(each, target)]
    if not enough:
        with pytest.raises(ValueError, match="no setup meets the target; the nearest"):
            find(target)
        return
    found = find(target)
    assert found.best in enough
    if target.samples_per_s:
        assert found.best.price.usd_a_month == min(each.price.usd_a_month for each in enough)
    else:
        assert found.best.samples_per_s == max(each.samples_per_s for each in enough)
    told = [found.best, *found.runners_up]
    for place, each in enumerate(told):
        assert each in enough
        for before in told[:place]:
            is_less = any(one < other for one, other in zip(each.price, before.price, strict=True))
            assert is_less or each.samples_per_s > before.samples_per_s or each.setup.workload != before.setup.workload
    assert found.num_setups == 2 * 3 * 3 * 2
    assert [each.shortfall for each in found.failures] == sorted(each.shortfall for each in found.failures)
    assert all(each.reason for each in found.failures)


def test_queries_within_a_bound_by_as_few_replicas_as_do() -> None:
    target, sizes = Target(queries_per_s=30_000.0, p99_ms=6.0), (50.0, 100.0, 300.0)
    space = replace(SPACE, hosts=tuple(range(1, 41)), memory_shares=(0.5,), row_shares=(0.8,), workers=(1, 2))
    found = find(target, SERVED, space=space, query_sizes=sizes).best
    assert found.setup.replicas > 1
    fewer = replace(found.setup, replicas=found.setup.replicas - 1)
    less = predict(fewer, DEMANDS[SERVED], queries_per_s=30_000.0, query_sizes=sizes)
    assert found.latency is not None
    assert less.latency is not None
    assert found.latency.p99_s <= 0.006 < less.latency.p99_s


def test_a_gpu_is_to_train_on_one_host() -> None:
    hosts, space = (replace(HOST, accelerators=make_host(gpus=2).accelerators),), replace(SPACE, accelerators=(1,))
    found = find(Target(samples_per_s=1.0), hosts=hosts, space=space)
    for setup in (found.best.setup, *(each.setup for each in (*found.runners_up, *found.failures))):
        assert (setup.hbm_bytes, setup.hosts, len(setup.host.accelerators)) == (0.8 * 8 * GIB, 1, 1)
    for workload, other in ((SERVED, space), (TRAINED, replace(space, hosts=(2, 3)))):
        with pytest.raises(ValueError, match="a GPU is to train on one host"):
            find(Target(samples_per_s=1.0), workload, hosts, space=other)


def test_searches_of_nothing_name_what_is_nearest_and_what_stops_it() -> None:
    rate, tiny = Target(samples_per_s=1.0), replace(HOST, storage=(replace(DRIVE, capacity_bytes=1e6),))
    fastest = f"{max(each.samples_per_s for each in everything()):,.0f}"
    bound, many = Target(queries_per_s=10.0, p99_ms=0.01), replace(SPACE, hosts=tuple(range(1, 4000)))
    for target, options, said in (
        (Target(samples_per_s=1e9), {}, f": {fastest} of 1,000,000,000 samples/s; what stops it is: "),
        (bound, {"workload": SERVED}, r"99 % of queries that never wait within .* ms, not 0\.01 ms"),
        (Target(usd=10.0), {}, r"US dollars, 10 at most were asked for"),
        (Target(), {}, "names no rate and no limit"),
        (Target(queries_per_s=1.0), {}, "queries_per_s is a target of serving"),
        (rate, {"hosts": (tiny,)}, "does not fit: SSD"),
        (rate, {"hosts": ()}, "no host"),
        (rate, {"space": replace(SPACE, drives=(5,))}, "ask for drives and GPUs that they have"),
        (rate, {"space": many}, r"the grid has [\d,]+ setups; at most 100,000"),
    ):
        with pytest.raises(ValueError, match=said):
            find(target, **options)
    with pytest.raises(ValueError, match=r"p99_ms=100\.0: needs queries_per_s"):
        Target(p99_ms=100.0, usd=1.0)
    for wrong in ({"hosts": (2, 1)}, {"memory_shares": (0.0,)}, {"row_shares": (0.95,)}, {"workers": (0,)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SearchSpace(**wrong)

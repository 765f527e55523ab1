"""The search, against looking at everything by hand, and what it says where nothing will do."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.hosts import DRIVE, GIB, make_host, make_workload
from tierstore.plan import Host, Memory, Prediction, Setup
from tierstore.plan.assumptions import describe_setup
from tierstore.plan.demand import Demand
from tierstore.plan.model import predict
from tierstore.plan.price import Pricing, years_of_life
from tierstore.plan.search import SearchResult, SearchSpace, Target, search, with_parts

TRAINED = make_workload(rows=2_000_000, tables=2)
SERVED = make_workload(rows=2_000_000, tables=2, training=False, batch_samples=100)
DEMANDS = {workload: Demand.analytic(workload) for workload in (TRAINED, SERVED)}
DURABLE = replace(DRIVE, drive_writes_a_day=1000.0)
SMALL = Memory(capacity_bytes=2 * GIB, row_bytes_per_s=1e10, watts=20.0, usd=640.0)
HOST = make_host(storage=(DURABLE,) * 4, ddr=SMALL)
SPACE = SearchSpace(memory_shares=(0.25, 0.5, 1.0), row_shares=(0.5, 0.8), drives=(1, 2, 4), hosts=(1, 2, 3, 4))


def find(target: Target, workload: Any = TRAINED, hosts: tuple[Host, ...] = (HOST,), **options: Any) -> SearchResult:
    return search(workload, DEMANDS[workload], hosts, target, **({"space": SPACE} | options))


def everything(workload: Any = TRAINED) -> list[Prediction]:
    """Every setup of the space that fits, one after another."""
    found = []
    for dtype, drives, memory, rows, hosts in itertools.product(
        ("float32", "float16"), SPACE.drives, SPACE.memory_shares, SPACE.row_shares, SPACE.hosts
    ):
        size = memory * 2 * GIB
        ddr = replace(SMALL, capacity_bytes=size, watts=memory * 20.0, usd=memory * 640.0)
        setup = Setup(
            workload=replace(workload, dtype=dtype), host=replace(HOST, ddr=ddr, storage=HOST.storage[:drives]),
            ddr_bytes=rows * size, page_cache_bytes=(0.9 - rows) * size, hosts=hosts, threads=4,
        )  # fmt: skip
        found.append(predict(setup, DEMANDS[workload]))
    return found


@pytest.mark.parametrize("rate", [10_000.0, 30_000.0, 60_000.0, 100_000.0])
def test_the_cheapest_is_that_of_all(rate: float) -> None:
    enough = [each for each in everything() if each.samples_per_s >= rate and years_of_life(each, Pricing()) >= 4]
    found = find(Target(samples_per_s=rate)).best
    assert found.price.usd_a_month == min(each.price.usd_a_month for each in enough)
    assert found in enough


def test_without_a_rate_the_fastest_that_limits_allow() -> None:
    for limit in (2500.0, 5000.0, 9000.0):
        allowed = [each for each in everything() if each.price.usd <= limit and years_of_life(each, Pricing()) >= 4]
        found = find(Target(usd=limit)).best
        assert found.price.usd <= limit
        assert found.samples_per_s == max(each.samples_per_s for each in allowed)


def test_runners_up_are_of_other_parts_and_failures_say_why() -> None:
    found = find(Target(samples_per_s=60_000.0))
    told = [found.best, *found.runners_up]
    costs = [each.price.usd_a_month for each in told]
    assert costs == sorted(costs)
    parts = [
        (each.setup.workload.dtype, each.setup.host.ddr.capacity_bytes, len(each.setup.host.storage)) for each in told
    ]
    assert len(set(parts)) == len(parts) > 1
    assert found.num_setups == 2 * 3 * 3 * 2
    shortfalls = [each.shortfall for each in found.failures]
    assert shortfalls == sorted(shortfalls)
    for failure in found.failures:
        assert failure.shortfall > 1
        assert "of 60,000 samples" in failure.reason or "wear out" in failure.reason or "does not fit" in failure.reason


def test_the_same_arguments_find_the_same() -> None:
    assert find(Target(samples_per_s=30_000.0)) == find(Target(samples_per_s=30_000.0))


def test_the_cheaper_host_is_chosen_and_drives_that_last() -> None:
    cheap = replace(HOST, name="cheap", usd=100.0)
    assert find(Target(samples_per_s=30_000.0), hosts=(HOST, cheap)).best.setup.host.name == "cheap"
    worn = replace(cheap, storage=(replace(DRIVE, drive_writes_a_day=0.03),) * 4)
    target, space = Target(samples_per_s=30_000.0), replace(SPACE, memory_shares=(0.25,))
    found = find(target, hosts=(HOST, worn), space=space)
    assert found.best.setup.host.name != "cheap"
    assert any("its drives wear out in" in each.reason for each in found.failures)


@pytest.mark.parametrize("rate", [20_000.0, 150_000.0])
def test_queries_within_a_bound_by_as_few_replicas_as_do(rate: float) -> None:
    target = Target(queries_per_s=rate, p99_ms=6.0)
    space = replace(SPACE, hosts=tuple(range(1, 201)), workers=(1, 2))
    found = find(target, SERVED, space=space, query_sizes=(50.0, 100.0, 300.0)).best
    assert found.latency is not None
    assert found.latency.queries_per_s == rate
    assert found.latency.p99_s <= 0.006
    setup = found.setup
    assert setup.replicas > 1
    fewer = replace(setup, replicas=setup.replicas - 1)
    less = predict(fewer, DEMANDS[SERVED], queries_per_s=rate, query_sizes=(50.0, 100.0, 300.0))
    assert less.latency is not None
    assert less.latency.p99_s > 0.006


@pytest.mark.parametrize("target", [Target(usd=20_000.0), Target(queries_per_s=6e3), Target(samples_per_s=6e5)])
@pytest.mark.parametrize("hosts", [(1, 4), (2, 5, 6), (3, 5, 6)])
def test_serving_takes_as_many_hosts_as_the_space_has(target: Target, hosts: tuple[int, ...]) -> None:
    found = find(target, SERVED, space=replace(SPACE, hosts=hosts, workers=(1,), drives=(1,)))
    assert {each.setup.num_hosts for each in (found.best, *found.runners_up)} <= set(hosts)


@pytest.mark.parametrize("rate", [300.0, 4000.0])
def test_rows_that_one_host_has_on_a_slow_drive_are_in_memory_of_two(rate: float) -> None:
    ddr = replace(SMALL, capacity_bytes=0.9 * SERVED.table_bytes)
    host = make_host(storage=(replace(DURABLE, reads_per_s=2000.0),), ddr=ddr)
    for in_memory in (True, False):
        space = SearchSpace(memory_shares=(1.0,), row_shares=(0.8,), dtypes=("float32",), in_memory=in_memory)
        best = find(Target(queries_per_s=rate), SERVED, (host,), space=space).best
        assert (best.setup.hosts, best.setup.num_hosts, best.is_in_memory) == (2, 2, True)


def test_a_gpu_is_to_train_on_one_host() -> None:
    hosts, space = (replace(HOST, accelerators=make_host(gpus=2).accelerators),), replace(SPACE, accelerators=(1,))
    found = find(Target(samples_per_s=1.0), hosts=hosts, space=space)
    for setup in (found.best.setup, *(each.setup for each in (*found.runners_up, *found.failures))):
        assert (setup.hbm_bytes, setup.hosts, len(setup.host.accelerators)) == (0.8 * 8 * GIB, 1, 1)
    for workload, other in ((SERVED, space), (TRAINED, replace(space, hosts=(2, 3)))):
        with pytest.raises(ValueError, match="a GPU is to train on one host"):
            find(Target(samples_per_s=1.0), workload, hosts, space=other)


@pytest.mark.parametrize("target", [Target(samples_per_s=60_000.0), Target(usd=9000.0)])
def test_no_setup_that_is_told_is_worse_in_all_than_one_before(target: Target) -> None:
    found = find(target)
    told = [found.best, *found.runners_up]
    for place, each in enumerate(told):
        for before in told[:place]:
            is_cheaper = each.price.usd < before.price.usd or each.price.usd_a_month < before.price.usd_a_month
            is_less = is_cheaper or each.price.watts < before.price.watts
            assert is_less or each.samples_per_s > before.samples_per_s or each.setup.workload != before.setup.workload


def test_targets_that_nothing_meets_name_what_is_nearest_and_what_stops_it() -> None:
    fastest = max(each.samples_per_s for each in everything())
    with pytest.raises(
        ValueError, match=r"no setup meets the target; the nearest, .* of 1,000,000,000 samples/s"
    ) as told:
        find(Target(samples_per_s=1e9))
    assert f": {fastest:,.0f} of 1,000,000,000 samples/s; what stops it is: " in str(told.value)
    with pytest.raises(
        ValueError, match=r"99 % of queries that never wait within .* ms, not 0\.01 ms; what stops it is"
    ):
        find(Target(queries_per_s=10.0, p99_ms=0.01), SERVED)
    with pytest.raises(ValueError, match=r": .* of 10,000,000 queries/s; what stops it is"):
        find(Target(queries_per_s=1e7, p99_ms=1000.0), SERVED)
    with pytest.raises(ValueError, match=r"US dollars, 10 at most were asked for"):
        find(Target(usd=10.0))
    with pytest.raises(ValueError, match=r"does not fit: SSD"):
        find(Target(usd=10_000.0), hosts=(replace(HOST, storage=(replace(DRIVE, capacity_bytes=1e6),)),))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "names no rate and no limit"),
        ({"p99_ms": 100.0, "usd": 1.0}, "needs queries_per_s"),
        ({"usd": -1.0}, "usd=-1.0: expected a number from 0"),
        ({"samples_per_s": 1.0, "queries_per_s": 1.0}, "queries_per_s=1.0: samples_per_s is given too"),
        ({"samples_per_s": math.nan}, "samples_per_s=nan"),
    ],
)
def test_targets_that_cannot_be(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find(Target(**wrong))


def test_searches_that_cannot_be() -> None:
    target = Target(samples_per_s=1.0)
    with pytest.raises(ValueError, match="no host"):
        find(target, hosts=())
    with pytest.raises(ValueError, match="ask for drives and GPUs that they have"):
        find(target, space=replace(SPACE, drives=(5,)))
    assert find(target, space=replace(SPACE, drives=(2, 5))) == find(target, space=replace(SPACE, drives=(2,)))
    with pytest.raises(ValueError, match="queries_per_s is a target of serving"):
        find(Target(queries_per_s=1.0))
    with pytest.raises(ValueError, match=r"the grid has [\d,]+ setups; at most 100,000"):
        find(target, space=replace(SPACE, hosts=tuple(range(1, 4000))))
    for wrong in ({"hosts": (2, 1)}, {"memory_shares": (0.0,)}, {"row_shares": (0.95,)}, {"workers": (0,)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SearchSpace(**wrong)


def test_parts_of_a_host_and_its_line() -> None:
    host = with_parts(make_host(drives=4, gpus=2), memory_bytes=16 * GIB, drives=3, accelerators=1)
    assert (host.ddr.capacity_bytes, host.ddr.watts, host.ddr.usd) == (16 * GIB, 5.0, 160.0)
    assert (len(host.storage), len(host.accelerators)) == (3, 1)
    setup = Setup(workload=SERVED, host=host, ddr_bytes=8 * GIB, hbm_bytes=GIB, replicas=2, workers=4)
    memory, gpus = "16.0 GiB DDR, 8.0 GiB of it for float32 rows", "1 GPU, 1.0 GiB of its HBM for rows"
    line = f"2 x box with 1 of 2 GPUs ({memory}; {gpus}; 3 SSDs; 4 workers)"
    assert describe_setup(setup) == line

"""Predictions, and searches against looking at everything by hand; money and wear; queues event by event."""

import functools
import heapq
import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.hosts import COSTS, DDR, DRIVE, GIB, MIB, flat_demand, make_host, make_setup, make_workload
from tierstore.plan import Host, Memory, Prediction, Setup, SoftwareCosts
from tierstore.plan.demand import Demand
from tierstore.plan.host import (
    LIBRARY_BYTES,
    PARENT_BYTES,
    PROCESS_BYTES,
    SERVED_BATCHES,
    Pricing,
    price_of,
    times,
    wear_of,
)
from tierstore.plan.loads import lanes_of
from tierstore.plan.model import (
    Queue,
    at_rate,
    latencies,
    latency_at,
    marginal_values,
    misfit,
    predict,
    processes_bytes,
)
from tierstore.plan.search import SearchResult, SearchSpace, Target, search

TRAINED = make_workload(rows=300_000, tables=2)
SERVED = make_workload(rows=300_000, tables=2, training=False)
IDLE = replace(SERVED, dense_flops=0, tables=tuple(replace(each, pooling_factor=0.0) for each in SERVED.tables))
DEMANDS = {workload: Demand.analytic(workload) for workload in (TRAINED, SERVED, IDLE)}


def plan(setup: Setup) -> Prediction:
    return predict(setup, DEMANDS[setup.workload])


def seconds(found: Prediction) -> dict[str, float]:
    return {load.resource: load.seconds for load in found.loads}


def test_a_query_waits_for_everything_and_shares_the_host() -> None:
    """Each worker has a queue of its own. Drives work for all of them, but the latency of a read is nobody's work."""
    found, several = (at_rate(plan(make_setup(SERVED, workers=workers)), 5.0) for workers in (1, 4))
    assert found.step_s == lanes_of(seconds(found), is_ahead=False)[0].seconds
    assert found.queue is not None
    assert several.queue is not None
    assert found.queue.alone_s == pytest.approx(found.step_s)
    assert found.queue.batch_s == pytest.approx(SERVED_BATCHES * 100e-6 + 100e-6), "the batch, and one read"
    busy = max(several.step_s, 4 * (seconds(several)["ssd reads"] - 100e-6), 4 * seconds(several)["cores"])
    assert several.queue.alone_s == pytest.approx(busy)
    assert several.samples_per_s == pytest.approx(4 * 4000 / (busy + 3 * several.queue.query_s)), "four a batch"
    for each, queue, workers in ((found, found.queue, 1), (several, several.queue, 4)):
        assert each.latency == latency_at(queue, 5.0 / workers)._replace(queries_per_s=5.0)
        assert each.rate_max == pytest.approx(each.samples_per_s / 1000)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ddr_bytes": 65 * GIB}, r"memory for rows, .*: 65.7 ?GiB of a host are wanted, 64.0 ?GiB are there"),
        ({"page_cache_bytes": 64 * GIB}, r"memory for rows, page cache and processes: 64.8 ?GiB"),
        ({"hbm_bytes": 9 * GIB, "host": make_host(gpus=1)}, "memory of an accelerator: 9.0"),
        ({"host": make_host(drives=0)}, r"SSD: .* are wanted, 0"),
        ({"ddr_bytes": math.nan}, "ddr_bytes=nan"),
        ({"policy": "lfu"}, "curves are of lru, the setup's policy is lfu"),
        ({"workers": 2}, "workers=2: they are of serving"),
        ({"workload": IDLE, "host": make_host(costs=SoftwareCosts())}, r"nothing takes time on host '.*': its costs"),
    ],
)  # fmt: skip
def test_setups_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(make_setup(**({"workload": TRAINED} | changes)))


def test_rows_ids_and_processes_have_to_fit() -> None:
    """On SSD: blocks of a page have 14 rows with state and 15 without, segments 15 of them and a page of index; of rows
    of dynamic ids 12 blocks of 127 and 3 pages. In training rows of two versions are there, with slack. In memory: each
    process has itself, its dense weights, and of the map of rows 4 bytes a row and 50 a segment."""
    ids = replace(SERVED, tables=tuple(replace(table, ids="dynamic", candidates=5) for table in SERVED.tables))
    for workload, workers, segments, id_rows in (
        (TRAINED, 1, 2.8 * 600_000 / 210, 0),
        (SERVED, 3, 600_000 / 225, 0),
        (ids, 1, 600_000 / 225, 600_012),
    ):
        id_segments, demand = id_rows / (12 * 127), Demand.analytic(workload)
        stored = 1.05 * 4096 * (16 * segments + 15 * id_segments)
        mapped = 4 * (600_000 + id_rows) + 50 * (math.ceil(segments) + math.ceil(id_segments))
        process = mapped + PROCESS_BYTES + 4 * 1e5 / 2
        taken = 8 * MIB + LIBRARY_BYTES + workers * process + (workers > 1) * PARENT_BYTES
        for spare, fits in ((1.0001, True), (0.9999, False)):
            drive = replace(DRIVE, capacity_bytes=stored * spare)
            memory = replace(DDR, capacity_bytes=taken * spare)
            for host in (make_host(storage=(drive,)), make_host(ddr=memory)):
                setup = make_setup(workload, host=host, ddr_bytes=8 * MIB, workers=workers)
                assert (not misfit(setup, demand)) == fits


ROUNDING = 1 + 1e-12


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    warm, cold = draw(st.floats(0, 20)), draw(st.floats(0, 20))
    costs = {name: each * (cold if name.startswith(("miss", "append")) else warm) for name, each in vars(COSTS).items()}
    workload = draw(st.sampled_from([TRAINED, SERVED]))
    host = make_host(drives=draw(st.integers(1, 4)), cores=draw(st.integers(1, 16)), costs=SoftwareCosts(**costs))
    return Setup(
        workload=workload, host=host, ddr_bytes=draw(st.floats(2, 400)) * MIB,
        page_cache_bytes=draw(st.floats(0, 400)) * MIB, hosts=draw(st.integers(1, 4)) if workload.is_training else 1,
        prefetch_depth=draw(st.integers(0, 2)), threads=draw(st.integers(1, 8)),
    )  # fmt: skip


def grown(host: Host, by: float) -> dict[str, Host]:
    drives, processor, cores = host.storage, host.processor, host.processor.cores
    return {
        "reads": times(host, by, "storage.reads_per_s", "storage.read_bytes_per_s"),
        "writes": times(host, by, "storage.write_bytes_per_s"),
        "drives": replace(host, storage=(*drives, drives[0])),
        "cores": replace(
            host, processor=replace(processor, cores=cores + 1, flops=processor.flops * (cores + 1) / cores)
        ),
        "flops": times(host, by, "processor.flops"),
        "memory speed": times(host, by, "ddr.row_bytes_per_s"),
        "network": times(host, by, "network.bytes_per_s"),
    }


@settings(max_examples=25)
@given(setups(), st.floats(1.01, 4.0))
def test_more_of_anything_never_slows_a_step_or_lowers_a_hit_rate(setup: Setup, by: float) -> None:
    """But for fetching a batch ahead, which is work of its own."""
    before = plan(setup)
    taken = seconds(before)
    assert before.bottleneck in taken
    assert all(each >= 0 and math.isfinite(each) for each in taken.values())
    assert max(taken.values()) <= before.step_s <= sum(taken.values())
    assert all(0 <= tier.hit_rate <= 1 for tier in before.tiers)
    for name, host in grown(setup.host, by).items():
        assert plan(replace(setup, host=host)).step_s <= before.step_s * ROUNDING, name
    memory = plan(replace(setup, ddr_bytes=by * setup.ddr_bytes))
    cached = plan(replace(setup, page_cache_bytes=setup.page_cache_bytes + by * MIB))
    work_ahead = 12e-6 * setup.host.costs.batch_us
    for tier, more in enumerate((memory, cached)):  # with more memory batches may begin to be fetched ahead
        begins = is_ahead(more) and not is_ahead(before)
        assert more.step_s <= (before.step_s + begins * work_ahead) * ROUNDING
        assert more.tiers[tier].hit_rate >= before.tiers[tier].hit_rate - 1e-12
    assert memory.tiers[0].rows >= before.tiers[0].rows
    assert plan(replace(setup, threads=setup.threads + 1)).step_s <= before.step_s * ROUNDING
    ahead = plan(replace(setup, prefetch_depth=setup.prefetch_depth + 1))
    assert ahead.step_s <= (before.step_s + work_ahead) * ROUNDING


def is_ahead(found: Prediction) -> bool:
    return any(lane.name == "fetching" for lane in found.lanes)


def test_each_is_what_that_much_more_brings() -> None:
    setup = make_setup(TRAINED, ddr_bytes=32 * MIB, page_cache_bytes=8 * MIB, hosts=2)
    before, found = plan(setup).samples_per_s, marginal_values(setup, DEMANDS[TRAINED])
    more = {each.resource: each.samples_per_s for each in found}
    assert list(more.values()) == sorted(more.values(), reverse=True)
    assert len(more) == len(found), "one line a resource"
    assert {"network", "page cache"} < set(more)
    assert "PCIe" not in more
    host = setup.host
    for name, by, part in (("SSD reads", 1.1, "reads"), ("SSD writes", 1.1, "writes"), ("flops", 1.1, "flops")):
        grown_host = grown(host, by)[part]
        assert more[name] == pytest.approx(plan(replace(setup, host=grown_host)).samples_per_s - before), name
    processor = replace(host.processor, cores=5, flops=host.processor.flops * 5 / 4)
    cores = plan(replace(setup, host=replace(host, processor=processor))).samples_per_s
    larger = plan(replace(setup, ddr_bytes=1.1 * setup.ddr_bytes)).samples_per_s
    assert (more["cores"], more["DDR"]) == pytest.approx((cores - before, larger - before))
    assert max(more.values()) > 0 <= min(more.values())


def test_a_budget_may_be_the_least_that_there_can_be() -> None:
    """A worker more brings its memory; more HBM, which takes some of DDR, is left out."""
    least = make_setup(SERVED, ddr_bytes=500 * 1024.0)
    (cores,) = [each for each in marginal_values(least, DEMANDS[SERVED]) if each.resource == "cores"]
    assert cores.samples_per_s > 0
    training = make_setup(TRAINED, host=make_host(gpus=1), hbm_bytes=16 * MIB, ddr_bytes=64 * 1024.0)
    with pytest.raises(ValueError, match=r"give at least \d+KiB") as error:
        plan(training)
    enough = 1024.0 * int(re.findall(r"(\d+)KiB$", str(error.value))[0])
    found = {each.resource for each in marginal_values(replace(training, ddr_bytes=enough), DEMANDS[TRAINED])}
    assert "HBM" not in found
    assert {"DDR", "HBM bandwidth"} < found


PRICING = Pricing(usd_per_kwh=0.1, pue=1.5, years=5.0)


def test_a_month_is_a_part_of_the_price_and_power_of_all_parts() -> None:
    found = price_of(make_host(drives=3, gpus=2), 4, PRICING)
    assert found.watts == 4 * (50 + 100 + 20 + 3 * 10 + 2 * 300)
    assert found.usd == 4 * (500 + 1000 + 640 + 3 * 100 + 2 * 10_000)
    hours = 24 * 365.25 / 12
    assert found.usd_a_month == pytest.approx(found.usd / 60 + found.watts / 1000 * 1.5 * hours * 0.1)


def test_drives_are_worn_by_what_is_written_to_them() -> None:
    small = replace(DRIVE, capacity_bytes=1e11)
    tough = replace(small, drive_writes_a_day=100.0)  # worn ten times as fast as the other, and rated for a hundred
    for drives, worn_bytes in (((DRIVE, DRIVE), 1e12), ((DRIVE, small), 1e11), ((tough, DRIVE), 1e12)):
        found = wear_of(make_host(storage=drives), 1e7)
        assert found.writes_a_day == pytest.approx(1e7 * 86_400 / 2 / worn_bytes)
        assert found.years == pytest.approx(5 * found.rated / found.writes_a_day), "of the warranty"
    setup, served = make_setup(), make_workload(training=False)
    predicted = predict(setup, flat_demand(setup.workload, unique=2000, miss_ratio=0.25))
    written = next(load for load in predicted.loads if load.resource == "ssd writes").amount
    assert predicted.wear == wear_of(setup.host, written / predicted.step_s)
    reading = predict(make_setup(served, ddr_bytes=GIB), flat_demand(served, unique=2000, miss_ratio=0.25))
    assert reading.wear == wear_of(make_host(drives=0), 0.0) == (0, 0, math.inf)


FEW = 2000
"""Queries, where kernels may run as plain Python."""


def by_events(queue: Queue, arrivals: list[float]) -> list[float]:
    """A worker takes what waits when it gets free, the first come first, as far as a batch may hold it."""
    events: list[tuple[float, int, int]] = [(time, 1, number) for number, time in enumerate(arrivals)]
    heapq.heapify(events)
    waiting, is_free, answered = list[int](), True, [math.nan] * len(arrivals)
    while events:
        now, kind, number = heapq.heappop(events)
        waiting += [number] * kind
        is_free |= not kind
        if is_free and waiting and not (events and events[0][0] == now):
            taken, waiting = waiting[: queue.batch_queries], waiting[queue.batch_queries :]
            done = now + queue.batch_s + queue.query_s * len(taken)
            for each in taken:
                answered[each] = done - arrivals[each]
            is_free = False
            heapq.heappush(events, (done, 0, -1))
    return answered


@pytest.mark.kernel
@pytest.mark.parametrize("together", [1, 3, 50])
def test_every_query_as_by_events(together: int) -> None:
    queue = Queue(batch_s=0.3, query_s=0.11, batch_queries=together)
    rate = 0.7 * queue.rate_max
    arrivals = np.cumsum(np.random.default_rng(0).standard_exponential(FEW)) / rate
    expected = by_events(queue, arrivals.tolist())
    assert latencies(queue, rate, num_queries=FEW) == pytest.approx(expected, rel=1e-9)
    told = latency_at(queue, rate, num_queries=FEW)
    settled = np.sort(expected[FEW // 10 :])
    for share, seconds in ((0.5, told.p50_s), (0.99, told.p99_s)):
        assert seconds == pytest.approx(settled[math.ceil(share * (len(settled) - 1))])
    assert latency_at(queue, queue.rate_max).p50_s == math.inf
    assert latency_at(queue, 1e-12, num_queries=FEW).p99_s == pytest.approx(queue.alone_s), "too few to meet"
    assert queue.rate_max == pytest.approx(FEW / max(by_events(queue, [0.0] * FEW)), rel=0.01)


LARGE = make_workload(rows=8_000_000, tables=2)
LARGE_SERVED = make_workload(rows=8_000_000, tables=2, training=False, batch_samples=100)
LARGE_DEMANDS = {workload: Demand.analytic(workload) for workload in (LARGE, LARGE_SERVED)}
DURABLE = replace(DRIVE, drive_writes_a_day=1000.0)
SMALL = Memory(capacity_bytes=8 * GIB, row_bytes_per_s=1e10, watts=20.0, usd=640.0)
HOST = make_host(storage=(DURABLE,) * 4, ddr=SMALL)
SPACE = SearchSpace(memory_shares=(0.25, 0.5, 1.0), hosts=(1, 2, 3, 4), dtypes=("float32", "float16"))


def find(target: Target, workload: Any = LARGE, hosts: tuple[Host, ...] = (HOST,), **options: Any) -> SearchResult:
    return search(workload, LARGE_DEMANDS[workload], hosts, target, **({"space": SPACE} | options))


@functools.cache
def everything() -> list[Prediction]:
    found, shares = [], itertools.product(SPACE.memory_shares, (0.5, 0.8))
    for (memory, rows), drives, hosts, dtype in itertools.product(
        shares, (1, 2, 4), SPACE.hosts, ("float32", "float16")
    ):
        size = memory * 8 * GIB
        ddr = replace(SMALL, capacity_bytes=size, watts=memory * 20.0, usd=memory * 640.0)
        setup = Setup(
            workload=replace(LARGE, dtype=dtype), host=replace(HOST, ddr=ddr, storage=HOST.storage[:drives]),
            ddr_bytes=rows * size, page_cache_bytes=(0.9 - rows) * size, hosts=hosts, threads=4,
        )  # fmt: skip
        demand = LARGE_DEMANDS[LARGE]
        rows_bytes = setup.ddr_bytes - processes_bytes(setup, demand)
        found.append(predict(replace(setup, ddr_bytes=rows_bytes), demand))
    return found


@settings(max_examples=20)
@given(st.builds(lambda rate: Target(samples_per_s=rate), st.floats(1e3, 3e5)))
def test_the_best_is_that_of_all(target: Target) -> None:
    enough = [each for each in everything() if each.samples_per_s >= target.samples_per_s]
    enough = [each for each in enough if each.wear.years >= 4]
    if not enough:
        with pytest.raises(ValueError, match="no setup meets the target; the nearest"):
            _ = find(target).best
        return
    found = find(target)
    assert found.best in enough
    assert found.best.price.usd_a_month == min(each.price.usd_a_month for each in enough)


def test_queries_within_a_bound_by_as_few_hosts_as_do() -> None:
    target = Target(queries_per_s=30_000.0, p99_ms=12.0)
    space = replace(SPACE, hosts=tuple(range(1, 41)), memory_shares=(0.5,), dtypes=("float32",))
    found = find(target, LARGE_SERVED, space=space).best
    assert found.setup.hosts > 1
    fewer = replace(found.setup, hosts=found.setup.hosts - 1)
    less = at_rate(predict(fewer, LARGE_DEMANDS[LARGE_SERVED]), 30_000.0)
    assert found.latency is not None
    assert less.latency is not None
    assert found.latency.p99_s <= 0.012 < less.latency.p99_s


def test_a_gpu_is_to_train_on_one_host() -> None:
    hosts = (replace(HOST, accelerators=make_host(gpus=2).accelerators),)
    for workload, space in ((LARGE, SPACE), (LARGE_SERVED, SPACE), (LARGE, replace(SPACE, hosts=(2, 3)))):
        is_usable = workload is LARGE and space is SPACE
        target = Target(samples_per_s=5e5 if is_usable else 1.0) if workload is LARGE else Target(queries_per_s=1.0)
        found = find(target, workload, hosts, space=space)
        setup = found.best.setup
        used = (setup.hbm_bytes, setup.hosts, len(setup.host.accelerators))
        assert used[0::2] == (0, 0) if not is_usable else used == (0.8 * 8 * GIB, 1, 1)


def test_searches_of_nothing_name_what_is_nearest_and_what_stops_it() -> None:
    rate, tiny = Target(samples_per_s=1.0), replace(HOST, storage=(replace(DRIVE, capacity_bytes=1e6),))
    fastest = f"{max(each.samples_per_s for each in everything()):,.0f}"
    bound, many = Target(queries_per_s=10.0, p99_ms=0.01), replace(SPACE, hosts=tuple(range(1, 4000)))
    for target, options, said in (
        (Target(samples_per_s=1e9), {}, f": {fastest} of 1,000,000,000 samples/s; what stops it is: "),
        (bound, {"workload": LARGE_SERVED}, r"99 % of queries that never wait within .* ms, not 0\.01 ms"),
        (rate, {"hosts": (tiny,)}, "does not fit: SSD"),
        (rate, {"hosts": (replace(HOST, storage=()),)}, "none of these hosts has a drive"),
        (rate, {"space": many}, r"the grid has [\d,]+ setups; at most 100,000"),
    ):
        with pytest.raises(ValueError, match=said):
            _ = find(target, **options).best
    for wrong in ({"hosts": (2, 1)}, {"hosts": (0,)}, {"hosts": (1 << 17,)}, {"memory_shares": (0.0,)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SearchSpace(**wrong)

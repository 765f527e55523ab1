"""Predictions: what they are made of, what they may not do, and that more of anything is never worse."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.hosts import COSTS, DRIVE, GIB, GPU, MIB, make_host, make_setup, make_workload
from tierstore.plan import Host, Prediction, Setup, SoftwareCosts
from tierstore.plan.demand import Demand
from tierstore.plan.loads import lanes_of
from tierstore.plan.model import misfit, predict
from tierstore.plan.queueing import latency_at
from tierstore.plan.what_if import marginal_values

TRAINED = make_workload(rows=300_000, tables=2)
SERVED = make_workload(rows=300_000, tables=2, training=False)
DEMANDS = {workload: Demand.analytic(workload) for workload in (TRAINED, SERVED)}


def plan(setup: Setup, **options: Any) -> Prediction:
    return predict(setup, DEMANDS[setup.workload], **options)


def seconds(found: Prediction) -> dict[str, float]:
    return {load.resource: load.seconds for load in found.loads}


def test_a_query_waits_for_everything_and_shares_the_host() -> None:
    found = plan(make_setup(SERVED), queries_per_s=5.0)
    assert found.step_s == lanes_of(seconds(found), is_ahead=False)[0].seconds
    queue = found.queue
    assert queue is not None
    assert queue.base_s + queue.sample_s * queue.sizes[0] == pytest.approx(found.step_s)
    assert queue.base_s == pytest.approx(100e-6 + 100e-6), "the batch, and one read"
    assert found.latency == latency_at(queue, 5.0)
    several = plan(make_setup(SERVED, workers=4))
    busy = max(several.step_s, 4 * (seconds(several)["ssd reads"]), 4 * seconds(several)["cores"])
    assert several.samples_per_s == pytest.approx(4 * 1000 / busy)
    assert several.queue is not None
    assert several.queue.executors == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ddr_bytes": 65 * GIB}, r"memory: 65.0 ?GiB of a host are wanted, 64.0 ?GiB are there"),
        ({"page_cache_bytes": 64 * GIB}, r"memory: 64.1 ?GiB"),
        ({"hbm_bytes": 9 * GIB, "host": make_host(gpus=1)}, "memory of an accelerator: 9.0"),
        ({"host": make_host(drives=0)}, r"SSD: .* are wanted, 0"),
        ({"ddr_bytes": math.nan}, "ddr_bytes=nan"),
        ({"policy": "lfu"}, "curves are of lru, the setup's policy is lfu"),
        ({"replicas": 2}, "for serving; training has hosts"),
    ],
)  # fmt: skip
def test_setups_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(make_setup(TRAINED, **changes))


def test_hosts_with_figures_of_zero() -> None:
    """As a file may describe them."""
    host = replace(make_host(), costs=SoftwareCosts(), ddr=replace(make_host().ddr, bytes_per_s=0, row_bytes_per_s=0))
    workload = replace(SERVED, dense_flops=0)
    with pytest.raises(ValueError, match=r"nothing takes time on host '.*': its costs are 0"):
        predict(make_setup(workload, host=host, ddr_bytes=GIB), Demand.analytic(workload))
    host = make_host(storage=(DRIVE, replace(DRIVE, capacity_bytes=0)))
    with pytest.raises(ValueError, match=r"a drive of host '.*' has a capacity of 0 bytes"):
        plan(make_setup(TRAINED, host=host))


def test_what_is_on_ssd_has_to_fit() -> None:
    """Blocks of a page have 14 rows with state and 15 without, segments 15 of them and a page of index. Of a training
    rows of two versions are there, with slack."""
    for workload, share, rows in ((TRAINED, 1.05 * 2.8, 14), (SERVED, 1.05, 15)):
        wanted = share * 600_000 / (15 * rows) * 16 * 4096
        for capacity, fits in ((wanted * 1.0001, True), (wanted * 0.9999, False)):
            drive = replace(DRIVE, capacity_bytes=capacity)
            assert (not misfit(make_setup(workload, host=make_host(storage=(drive,))), DEMANDS[workload])) == fits


def test_dynamic_ids_have_to_fit_on_ssd_and_in_the_map_of_rows() -> None:
    """A block has 127 of their rows, which are of 32 bytes; a segment has 12 blocks and 3 pages of index."""
    tables = tuple(replace(table, ids="dynamic", candidates=5) for table in SERVED.tables)
    workload, segments = replace(SERVED, tables=tables), (600_000 / 225, 600_012 / (12 * 127))
    stored = 1.05 * 4096 * (16 * segments[0] + 15 * segments[1])
    in_memory = 64 * MIB + 4 * (600_000 + 600_012) + 50 * sum(map(math.ceil, segments))
    for spare, fits in ((1.0001, True), (0.9999, False)):
        drive = replace(DRIVE, capacity_bytes=stored * spare)
        assert (not misfit(make_setup(workload, host=make_host(storage=(drive,))), DEMANDS[SERVED])) == fits
        memory = replace(make_host().ddr, capacity_bytes=in_memory * spare)
        assert (not misfit(make_setup(workload, host=make_host(ddr=memory)), DEMANDS[SERVED])) == fits


def test_the_map_of_rows_has_to_fit_beside_the_budget() -> None:
    """4 bytes a row and 50 a segment, in each process."""
    for workload, segments, workers in ((TRAINED, 2.8 * 600_000 / 210, 1), (SERVED, 600_000 / 225, 3)):
        wanted = 8 * MIB + workers * (4 * 600_000 + 50 * math.ceil(segments))
        for capacity, fits in ((wanted + 1, True), (wanted - 1, False)):
            host = make_host(ddr=replace(make_host().ddr, capacity_bytes=capacity))
            setup = make_setup(workload, host=host, ddr_bytes=8 * MIB, workers=workers)
            assert (not misfit(setup, DEMANDS[workload])) == fits


# More of anything

ROUNDING = 1 + 1e-12

hosts = st.builds(
    lambda drives, gpus, cores, costs: make_host(drives=drives, gpus=gpus, cores=cores, costs=costs),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 16),
    st.builds(
        lambda scale, cold: SoftwareCosts(
            **{
                name: value * (cold if name.startswith(("miss", "append")) else scale)
                for name, value in vars(COSTS).items()
            }
        ),
        st.floats(0, 20),
        st.floats(0, 20),
    ),
)
setups = st.builds(
    lambda workload, host, ddr, page_cache, count, depth, threads: Setup(
        workload=workload, host=host, ddr_bytes=ddr * MIB, page_cache_bytes=page_cache * MIB, hosts=count,
        prefetch_depth=depth, threads=threads,
    ),
    st.sampled_from([TRAINED, SERVED]),
    hosts,
    st.floats(2, 400),
    st.floats(0, 400),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 8),
)  # fmt: skip


def grown(host: Host, by: float) -> dict[str, Host]:
    """The host with one thing more, by its name."""
    drives = host.storage
    faster_reads = tuple(
        replace(each, reads_per_s=each.reads_per_s * by, read_bytes_per_s=each.read_bytes_per_s * by) for each in drives
    )
    faster_writes = tuple(replace(each, write_bytes_per_s=each.write_bytes_per_s * by) for each in drives)
    return {
        "reads": replace(host, storage=faster_reads),
        "writes": replace(host, storage=faster_writes),
        "drives": replace(host, storage=(*drives, drives[0])),
        "cores": replace(host, processor=replace(host.processor, cores=host.processor.cores + 1)),
        "flops": replace(host, processor=replace(host.processor, flops=host.processor.flops * by)),
        "memory speed": replace(host, ddr=replace(host.ddr, row_bytes_per_s=host.ddr.row_bytes_per_s * by)),
        "network": replace(host, network=replace(host.network, bytes_per_s=host.network.bytes_per_s * by)),
    }


@settings(max_examples=60, deadline=None)
@given(setups, st.floats(1.01, 4.0))
def test_more_of_any_part_never_slows_a_step(setup: Setup, by: float) -> None:
    before = plan(setup)
    for name, host in grown(setup.host, by).items():
        assert plan(replace(setup, host=host)).step_s <= before.step_s * ROUNDING, name
    for name in ("ddr_bytes", "page_cache_bytes"):
        more = plan(replace(setup, **{name: by * getattr(setup, name)}))
        assert more.step_s <= before.step_s * ROUNDING, name
    assert plan(replace(setup, threads=setup.threads + 1)).step_s <= before.step_s * ROUNDING
    assert plan(replace(setup, rows_per_read=by)).step_s <= before.step_s * ROUNDING


@settings(max_examples=60, deadline=None)
@given(setups)
def test_prefetching_costs_a_step_no_more_than_itself(setup: Setup) -> None:
    """Fetching a batch ahead is work of its own: where little is missing it may show."""
    before, ahead = plan(setup), plan(replace(setup, prefetch_depth=setup.prefetch_depth + 1))
    assert ahead.step_s <= (before.step_s + 1e-6 * setup.host.costs.ahead_us) * ROUNDING


@settings(max_examples=60, deadline=None)
@given(setups, st.floats(1.01, 4.0))
def test_more_memory_never_lowers_a_hit_rate(setup: Setup, by: float) -> None:
    before, more = plan(setup), plan(replace(setup, ddr_bytes=by * setup.ddr_bytes))
    assert more.tiers[0].rows >= before.tiers[0].rows
    assert more.tiers[0].hit_rate >= before.tiers[0].hit_rate
    cached = plan(replace(setup, page_cache_bytes=setup.page_cache_bytes + by * MIB))
    assert cached.tiers[1].hit_rate >= before.tiers[1].hit_rate - 1e-12


@settings(max_examples=60, deadline=None)
@given(setups, st.floats(2, 200), st.floats(1.01, 4.0))
def test_more_device_memory_never_lowers_its_hit_rate(setup: Setup, hbm: float, by: float) -> None:
    """Its staging is in host memory; where that holds every row, a step is no slower, but for what it takes to bring
    batches in ahead, if there is room for two of them now."""
    host = replace(setup.host, accelerators=(GPU,))
    fast = replace(setup, workload=TRAINED, host=host, hosts=1, hbm_bytes=hbm * MIB, ddr_bytes=2 * GIB)
    before, more = plan(fast), plan(replace(fast, hbm_bytes=by * fast.hbm_bytes))
    assert more.tiers[0].hit_rate >= before.tiers[0].hit_rate
    ahead_s = 1e-6 * setup.host.costs.ahead_us
    assert more.step_s <= (before.step_s + ahead_s) * ROUNDING


@settings(max_examples=60, deadline=None)
@given(setups)
def test_predictions_are_sane(setup: Setup) -> None:
    found = plan(setup)
    names = [load.resource for load in found.loads]
    assert found.bottleneck in names
    assert all(load.seconds >= 0 and math.isfinite(load.seconds) for load in found.loads)
    assert max(load.seconds for load in found.loads) <= found.step_s <= sum(load.seconds for load in found.loads)
    assert all(0 <= tier.hit_rate <= 1 for tier in found.tiers)
    assert found == plan(setup)


# Marginal values


def values(setup: Setup) -> dict[tuple[str, str], float]:
    found = marginal_values(setup, DEMANDS[setup.workload])
    assert [each.samples_per_s for each in found] == sorted((each.samples_per_s for each in found), reverse=True)
    return {(each.resource, each.change): each.samples_per_s for each in found}


def test_each_is_what_that_much_more_brings() -> None:
    setup = make_setup(TRAINED, ddr_bytes=32 * MIB, page_cache_bytes=8 * MIB, hosts=2)
    before, found, processor = plan(setup).samples_per_s, values(setup), setup.host.processor
    reads = replace(setup.host.storage[0], reads_per_s=1.1e5, read_bytes_per_s=2.2e9)
    for name, changed in {
        ("ddr", "+10 %"): replace(setup, ddr_bytes=1.1 * setup.ddr_bytes),
        ("ssd reads", "+10 %"): replace(setup, host=replace(setup.host, storage=(reads,))),
        ("cores", "+1"): replace(
            setup, host=replace(setup.host, processor=replace(processor, cores=5, flops=processor.flops * 5 / 4))
        ),
    }.items():
        assert found[name] == pytest.approx(plan(changed).samples_per_s - before)
    assert ("network", "+10 %") in found
    assert ("pcie", "+10 %") not in found
    assert len({resource for resource, _ in found}) == len(found), "one line a resource"


MORE_OF = {"ssd reads": "ssd reads", "ssd writes": "ssd writes", "network": "network", "model": "flops"}
"""What helps, where a load is the bottleneck."""


@settings(max_examples=60, deadline=None)
@given(setups)
def test_more_of_the_bottleneck_helps_and_of_what_is_idle_does_not(setup: Setup) -> None:
    found, before = values(setup), plan(setup)
    assert all(gain >= -1e-9 * before.samples_per_s for gain in found.values())
    for load in before.loads:
        gain = found.get((MORE_OF.get(load.resource, ""), "+10 %"), 0.0)
        assert load.seconds or not gain
        assert load.resource != before.bottleneck or load.resource not in MORE_OF or gain > 0

"""What a step keeps each resource busy: every term by hand, and how they make a step."""

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.placement.support import costs_of
from tests.plan.hosts import COSTS, DRIVE, GIB, MIB, flat_demand, make_host, make_setup, make_workload
from tierstore.plan import Setup, Storage
from tierstore.plan.demand import Demand
from tierstore.plan.loads import AHEAD, DRIVES, LINKS, SERIAL, SHARED, bottleneck_of, lanes_of, loads_of
from tierstore.plan.model import misfit
from tierstore.plan.prediction import ResourceLoad
from tierstore.plan.tiers import PoolLoad, pool_loads

IDS, UNIQUE, MISSES, BAGS = 4000, 2000, 500, 1000
WEIGHTS, ROW, SEGMENT, PAGE = 256, 264, 16 * 4096 / 210, 4096
"""Bytes of a row of 64 float32, without and with one accumulator; of a segment, a row of it; of a page."""


def loads(setup: Setup, *, miss_ratio: float = 0.25, is_ahead: bool = True) -> tuple[dict[str, ResourceLoad], PoolLoad]:
    demand = flat_demand(setup.workload, unique=UNIQUE, miss_ratio=miss_ratio)
    pools = pool_loads(setup, demand)
    return {load.resource: load for load in loads_of(setup, pools, is_ahead=is_ahead)}, pools[0]


def _pooling_ns(ids: float = IDS, rows: float = UNIQUE, bags: float = BAGS) -> float:
    return ids * (10 + 0.1 * WEIGHTS) + rows * (6 + 0.05 * WEIGHTS) + bags * (8 + 0.02 * WEIGHTS)


def _updating_ns(ids: float = IDS, rows: float = UNIQUE, bags: float = BAGS) -> float:
    return ids * (20 + 0.2 * WEIGHTS) + rows * (30 + 0.3 * ROW) + bags * (12 + 0.04 * WEIGHTS)


def test_every_resource_has_its_place() -> None:
    found, _ = loads(make_setup())
    assert sorted(found) == sorted((*SERIAL, *AHEAD, *LINKS, *DRIVES, *SHARED))


def test_training_in_host_memory() -> None:
    found, pool = loads(make_setup())
    assert found["batch"] == ("batch", pytest.approx(200e-6), 1.0, "batches")
    lookups = (_pooling_ns() + _updating_ns()) * 1e-9
    assert found["lookups"] == ("lookups", pytest.approx(lookups), IDS, "ids"), "too few for two threads"
    assert found["model"] == ("model", pytest.approx(3e5 * 1000 / 1e11), 3e8, "flops")
    cold = (90_000 + IDS * 40 + UNIQUE * 15 + MISSES * (200 + 0.5 * ROW) + pool.pages_read * 300) * 1e-9
    assert found["cold rows"] == ("cold rows", pytest.approx(cold), MISSES, "rows")
    moving_ns = pool.rows_moved * (600 + 2.0 * ROW)
    back = (MISSES * (800 + 1.0 * ROW) + moving_ns) * 1e-9 + pool.transactions * 400e-6
    assert pool.rows_moved > 100
    assert found["write-back"] == ("write-back", pytest.approx(back), MISSES, "rows")
    reads = pool.pages_read + pool.segments_cleaned
    assert found["ssd reads"] == ("ssd reads", pytest.approx(reads / 1e5 + 1e-4), reads, "reads")
    written = (MISSES + pool.rows_moved) * SEGMENT
    assert found["ssd writes"] == ("ssd writes", pytest.approx(written / 1e9), pytest.approx(written), "bytes")
    moved = (IDS + MISSES + 2 * UNIQUE) * ROW
    assert found["ddr"] == ("ddr", pytest.approx(moved / 1e10), moved, "bytes")
    computing = 200e-6 + lookups + 4 * 3e8 / 1e11
    busy = computing + cold + back
    assert found["cores"] == ("cores", pytest.approx(busy / 4), pytest.approx(busy), "core-seconds")
    assert found["wait for a core"].seconds == pytest.approx((cold + back) / 4)
    assert found["wait ahead"].seconds == pytest.approx(computing / 4)
    for idle in ("hbm", "network", "id exchange", "pcie"):
        assert found[idle].seconds == found[idle].amount == 0


def test_threads_share_the_lookups_of_large_batches() -> None:
    large = make_workload(batch_samples=3000)
    found, _ = loads(make_setup(large))
    work_s = 1e-9 * (_pooling_ns(3 * IDS, UNIQUE, 3 * BAGS) + _updating_ns(3 * IDS, UNIQUE, 3 * BAGS))
    assert found["lookups"].seconds == pytest.approx(work_s / 2 + 2 * 70e-6)
    three, _ = loads(make_setup(large, threads=4))
    assert three["lookups"].seconds == pytest.approx(work_s / 2 + 2 * 70e-6), "4,096 ids each"
    alone, _ = loads(make_setup(large, threads=1))
    assert alone["lookups"].seconds == pytest.approx(work_s)
    assert found["cores"].amount == pytest.approx(alone["cores"].amount + 2 * 70e-6), "on one core"


def test_a_dense_model_of_known_layers_takes_more_than_its_flops() -> None:
    work: dict[str, Any] = {"dense_products": 30.0, "dense_values": 200.0}
    found, _ = loads(make_setup(make_workload(**work)))
    plain, _ = loads(make_setup())
    started, values = 3 * 30 * (5 + 20) * 1e-6, 3 * 1000 * 200 * 0.5e-9
    assert found["model"].seconds == pytest.approx(plain["model"].seconds + started + values / 4)
    assert found["cores"].amount == pytest.approx(plain["cores"].amount + started + values), "others wait for the start"
    alone, _ = loads(make_setup(make_workload(**work), host=make_host(cores=1)))
    assert alone["model"].seconds == pytest.approx(3e8 / 1e11 + 3 * 30 * 5e-6 + values), "no thread to wake"
    served, _ = loads(make_setup(make_workload(training=False, **work)))
    assert served["model"].seconds == pytest.approx(1e8 / 1e11 + started / 3 + values / 12)
    device, _ = loads(make_setup(make_workload(**work), host=make_host(gpus=1), hbm_bytes=16 * MIB))
    assert device["model"].seconds == pytest.approx(3e8 / 1e13), "not on the cores"


def test_ranks_that_share_a_host_take_what_was_measured_of_ranks() -> None:
    costs = costs_of(4, reduce_us=400.0, reduce_busy_us=2400.0)
    setup = make_setup(rank_costs=costs).of_a_rank
    host = setup.host
    assert (setup.hosts, setup.threads, setup.ddr_bytes) == (4, 1, 16 * MIB)
    assert (host.processor.cores, host.processor.flops) == (1, 2.5e10)
    assert (host.ddr.row_bytes_per_s, host.storage[0].reads_per_s) == (2.5e9, 2.5e4)
    found, pool = loads(setup)
    assert pool.sent_rows == IDS / 4
    asker, owner = 3 + 0.1 + IDS / 4 * (0.01 + 0.02), IDS / 4 * (0.02 + 64 * 0.002)
    assert found["lookups"].seconds == pytest.approx(asker + owner), "rows cross"
    assert found["batch"].seconds == pytest.approx(40e-6), "of handing over; the rest is in what was measured"
    ahead = found["cold rows"].seconds + found["write-back"].seconds
    own = found["batch"].seconds + found["lookups"].seconds + found["model"].seconds
    assert found["network"].seconds == pytest.approx((400 + 2000 * ahead / (ahead + own)) * 1e-6)
    assert found["id exchange"].seconds == 0
    tables_alone, _ = loads(make_setup(make_workload(dense_flops=0.0), rank_costs=costs).of_a_rank)
    assert tables_alone["network"].seconds == 0


def test_costs_of_other_ranks() -> None:
    with pytest.raises(ValueError, match="rank_costs are of 4 ranks, 4 on a host, and hosts is 2; measure them again"):
        _ = make_setup(rank_costs=costs_of(4), hosts=2).of_a_rank
    with pytest.raises(ValueError, match="rank_costs are of training"):
        _ = make_setup(make_workload(training=False), rank_costs=costs_of(4)).of_a_rank
    assert make_setup().of_a_rank == make_setup()


def test_what_is_not_brought_in_ahead_is_not_handed_over_nor_waited_for() -> None:
    ahead, _ = loads(make_setup())
    found, _ = loads(make_setup(), is_ahead=False)
    assert found["batch"].seconds == pytest.approx(ahead["batch"].seconds - 40e-6)
    assert found["cold rows"].seconds == pytest.approx(ahead["cold rows"].seconds - 90e-6)
    assert found["wait ahead"].seconds == found["wait for a core"].seconds == 0


def test_serving_neither_updates_nor_writes() -> None:
    found, _ = loads(make_setup(make_workload(training=False)))
    row = 256
    assert found["lookups"].seconds == pytest.approx(_pooling_ns() * 1e-9)
    assert found["model"].amount == 1e5 * 1000
    assert found["ddr"].amount == (IDS + MISSES) * row
    assert found["write-back"].seconds == found["ssd writes"].seconds == 0


def test_where_all_rows_have_a_slot_no_id_is_looked_for() -> None:
    found, _ = loads(make_setup(ddr_bytes=GIB))
    assert found["cold rows"].seconds == pytest.approx(90e-6), "of the batch"
    for idle in ("write-back", "ssd reads", "ssd writes"):
        assert found[idle].seconds == 0


def test_drives_share_reads_and_slow_ones_are_told_by_bytes() -> None:
    one, _ = loads(make_setup())
    three, _ = loads(make_setup(host=make_host(drives=3)))
    latency = DRIVE.read_latency_us * 1e-6
    assert three["ssd reads"].seconds - latency == pytest.approx((one["ssd reads"].seconds - latency) / 3)
    assert three["ssd writes"].seconds == pytest.approx(one["ssd writes"].seconds / 3)
    narrow = Storage(
        capacity_bytes=1e12,
        read_latency_us=0.0,
        reads_per_s=1e9,
        read_bytes_per_s=1e6,
        write_bytes_per_s=1e6,
    )
    found, pool = loads(make_setup(host=make_host(storage=(narrow,))))
    assert found["ssd reads"].seconds == pytest.approx((pool.pages_read + 16 * pool.segments_cleaned) * PAGE / 1e6)
    assert found["ssd writes"].seconds == pytest.approx((MISSES + pool.rows_moved) * SEGMENT / 1e6)


def test_rows_in_device_memory() -> None:
    setup = make_setup(host=make_host(gpus=1), hbm_bytes=16 * MIB)
    found, pool = loads(setup)
    assert pool.hbm_misses == pool.misses == MISSES
    assert found["lookups"].seconds == 0, "the device does it"
    moved = (IDS + 2 * UNIQUE) * ROW
    assert found["hbm"] == ("hbm", pytest.approx(moved / 1e12), moved, "bytes")
    assert found["model"].seconds == pytest.approx(3e8 / 1e13)
    up = MISSES * ROW + IDS * 8
    assert found["pcie"] == ("pcie", pytest.approx(up / 1e10 + 10e-6), up, "bytes")
    copies = 2 * MISSES * (40 + 15 + 10 + 6 + (0.1 + 0.05) * ROW)
    bringing = MISSES * (200 + 0.5 * ROW) + pool.pages_read * 300
    assert found["cold rows"].seconds == pytest.approx((90_000 + copies + bringing) * 1e-9)
    assert found["ddr"].amount == (2 * MISSES + MISSES) * ROW


def test_hosts_that_train_send_each_distinct_row_once() -> None:
    setup = make_setup(hosts=4)
    found, pool = loads(setup)
    assert pool.sent_rows == IDS / 4, "at most"
    ids, values = 3 / 4 * 8 * (IDS / 4), 3 / 4 * 2 * (IDS / 4) * 256
    ring = 2 * 3 / 4 * (1e5 / 2) * 4
    seconds = (values + ring) / 1e9 + (3 + 2 * 3) * 20e-6
    assert found["network"] == ("network", pytest.approx(seconds), pytest.approx(values + ring), "bytes")
    assert found["id exchange"] == ("id exchange", pytest.approx(ids / 1e9 + 3 * 20e-6), pytest.approx(ids), "bytes")
    few, few_pool = sharded(rows=150.0)
    assert few_pool.sent_rows == 150
    assert few["network"].amount == pytest.approx(3 / 4 * 2 * 150 * 256 + ring)
    assert few["id exchange"].amount == pytest.approx(3 / 4 * 150 * 8)
    asker = _pooling_ns(IDS / 4, 150, BAGS / 4) + _updating_ns(IDS / 4, 150, BAGS / 4)
    owner = _pooling_ns(150, UNIQUE / 4, 150) + _updating_ns(150, UNIQUE / 4, 150)
    assert few["lookups"].seconds == pytest.approx((asker + owner) * 1e-9)
    admitting = (IDS / 4 + 150) * 40 + (150 + UNIQUE / 4) * 15
    alone = few["cold rows"].seconds - 1e-9 * (90_000 + few_pool.misses * (200 + 0.5 * ROW))
    assert alone == pytest.approx(1e-9 * (admitting + few_pool.pages_read * 300))


def sharded(rows: float, **changes: Any) -> tuple[dict[str, ResourceLoad], PoolLoad]:
    """Over four hosts, where a quarter of the batch has so many distinct rows."""
    setup = make_setup(hosts=4, **changes)
    demand = flat_demand(setup.workload, unique=UNIQUE, miss_ratio=0.25)
    demand = replace(demand, pools=(replace(demand.pools[0], rows_of=lambda parts: rows * 4 / parts),))
    pools = pool_loads(setup, demand)
    return {load.resource: load for load in loads_of(setup, pools, is_ahead=True)}, pools[0]


@pytest.mark.parametrize(("wire", "row_bytes"), [("fp32", 256), ("fp16", 128), ("bf16", 128), ("int8", 68)])
def test_rows_and_gradients_cross_in_the_bits_of_the_wire(wire: Any, row_bytes: int) -> None:
    found, _ = sharded(rows=150.0, wire=wire)
    ring = 2 * 3 / 4 * (1e5 / 2) * 4
    assert found["network"].amount == pytest.approx(3 / 4 * 2 * 150 * row_bytes + ring)
    assert found["id exchange"].amount == pytest.approx(3 / 4 * 150 * 8)


def test_hosts_that_serve_send_ids_and_pooled_rows() -> None:
    served, _ = loads(make_setup(make_workload(training=False), hosts=4))
    ids, pooled = 3 / 4 * 8 * (IDS / 4 + BAGS / 4), 3 / 4 * (BAGS / 4) * 256
    assert served["network"].seconds == pytest.approx((ids + pooled) / 1e9 + 2 * 20e-6)
    assert served["id exchange"].seconds == 0


def test_deferred_optimizers_copy_the_gradient_of_pooled_rows() -> None:
    fused, _ = loads(make_setup())
    found, _ = loads(make_setup(is_deferred=True))
    speed = make_setup().host.ddr.bytes_per_s
    copied = 2 * 1000 * 64 * 4 / speed
    assert found["lookups"].seconds - fused["lookups"].seconds == pytest.approx(copied)
    host = make_setup().host
    tight = replace(host, ddr=replace(host.ddr, capacity_bytes=68.6 * MIB))
    demand = flat_demand(make_workload(), unique=UNIQUE, miss_ratio=0.25)
    assert not misfit(make_setup(host=tight), demand)
    assert misfit(make_setup(host=tight, is_deferred=True), demand).startswith("memory: ")


SECONDS = {
    "batch": 0.25, "lookups": 0.75, "hbm": 2.0, "model": 3.0, "network": 4.0, "cold rows": 5.0, "write-back": 6.0,
    "id exchange": 0.0,
    "wait for a core": 0.0, "wait ahead": 0.0,
    "pcie": 7.0, "ssd reads": 8.0, "ssd writes": 9.0, "cores": 11.0, "ddr": 12.0,
}  # fmt: skip


def _step_seconds(seconds: dict[str, float], *, is_ahead: bool) -> float:
    return lanes_of(seconds, is_ahead=is_ahead)[0].seconds


def test_a_step_is_the_longest_of_what_goes_on_at_once() -> None:
    assert _step_seconds(SECONDS, is_ahead=True) == 17
    assert _step_seconds(SECONDS | {"ssd reads": 0.0}, is_ahead=True) == 12
    unshared = SECONDS | {"ssd reads": 0.0, "ddr": 0.0, "cores": 0.0}
    assert _step_seconds(unshared, is_ahead=True) == 11, "rows come in and go down on one thread"
    assert _step_seconds(unshared | {"write-back": 0.0}, is_ahead=True) == 10
    assert _step_seconds(unshared | {"pcie": 13.0}, is_ahead=True) == 13
    assert _step_seconds(unshared | {"wait ahead": 3.0}, is_ahead=True) == 14
    assert _step_seconds(unshared | {"wait for a core": 3.0}, is_ahead=True) == 13
    assert _step_seconds(SECONDS, is_ahead=False) == 45
    assert _step_seconds(SECONDS | {"cores": 50.0}, is_ahead=False) == 50


def test_the_bottleneck_is_the_longest_part_of_the_longest_lane() -> None:
    def named(seconds: dict[str, float], *, is_ahead: bool) -> str:
        return bottleneck_of(seconds, is_ahead=is_ahead)

    assert named(SECONDS, is_ahead=True) == "ssd writes"
    assert named(SECONDS | {"ddr": 100.0}, is_ahead=True) == "ddr"
    assert named(SECONDS | {"model": 100.0}, is_ahead=True) == "model"
    assert named(SECONDS, is_ahead=False) == "ssd writes"
    assert named(SECONDS | {"wait ahead": 30.0}, is_ahead=True) == "cores"
    idle = dict.fromkeys(SECONDS, 0.0)
    assert named(idle | {"lookups": 5.0, "cold rows": 5.0, "network": 1.0}, is_ahead=True) == "lookups"
    several = idle | {"model": 60.0, "lookups": 55.0, "cold rows": 100.0}
    assert named(several, is_ahead=True) == "model", "not what takes longest and is waited for by nobody"
    assert named(several, is_ahead=False) == "cold rows"


def test_costs_are_those_of_the_host() -> None:
    """Each of them shows somewhere."""
    setup = make_setup(make_workload(dense_products=9.0, dense_values=90.0), host=make_host(gpus=1))
    both = [setup, replace(setup, hbm_bytes=16 * MIB), make_setup(make_workload(batch_samples=3000))]
    for name in vars(COSTS):
        slower = replace(COSTS, **{name: 2 * getattr(COSTS, name)})
        changed = [replace(each, host=replace(each.host, costs=slower)) for each in both]
        assert any(loads(each)[0] != loads(other)[0] for each, other in zip(both, changed, strict=True)), name


def test_nothing_looked_up_takes_no_time_but_the_batch_and_its_empty_bags() -> None:
    still_s = BAGS * (8 + 12 + (0.02 + 0.04) * WEIGHTS) * 1e-9
    workload = make_workload()
    still = replace(workload, tables=(replace(workload.tables[0], pooling_factor=0.0),), dense_flops=0.0)
    setup = make_setup(still)
    found = loads_of(setup, pool_loads(setup, Demand.analytic(still)), is_ahead=True)
    assert {load.resource: load.seconds for load in found if load.seconds} == {
        "batch": pytest.approx(200e-6),
        "lookups": pytest.approx(still_s),
        "cold rows": pytest.approx(90e-6),
        "wait for a core": pytest.approx(90e-6 / 4),
        "wait ahead": pytest.approx((200e-6 + still_s) / 4),
        "cores": pytest.approx((290e-6 + still_s) / 4),
    }

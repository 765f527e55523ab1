"""What a step keeps each resource busy: every term by hand, and how they make a step."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dist.placement.support import costs_of
from tests.plan.hosts import MIB, flat_demand, make_host, make_setup, make_workload
from tierstore.plan import Setup
from tierstore.plan.loads import (
    AHEAD,
    DRIVES,
    LINKS,
    SERIAL,
    SHARED,
    WAITS,
    ResourceLoad,
    bottleneck_of,
    lanes_of,
    loads_of,
)
from tierstore.plan.tiers import PoolLoad, pool_loads

IDS, UNIQUE, MISSES, BAGS = 4000, 2000, 500, 1000
WEIGHTS, ROW, SEGMENT = 256, 264, 16 * 4096 / 210
"""Bytes of a row of 64 float32, without and with one accumulator; of a segment, a row of it."""


def loads(setup: Setup, sent_rows: float | None = None) -> tuple[dict[str, ResourceLoad], PoolLoad]:
    """``sent_rows``: distinct ones of a part of the batch, if its ids are more."""
    demand = flat_demand(setup.workload, unique=UNIQUE, miss_ratio=0.25)
    if sent_rows is not None:
        demand = replace(demand, pools=(replace(demand.pools[0], rows_of=lambda parts: sent_rows * 4 / parts),))
    pools = pool_loads(setup, demand)
    return {load.resource: load for load in loads_of(setup, pools, is_ahead=True)}, pools[0]


def _lookup_ns(ids: float = IDS, rows: float = UNIQUE, bags: float = BAGS) -> float:
    return 0.1 * (8 * ids + WEIGHTS * (rows + bags))


def _update_ns(ids: float = IDS, rows: float = UNIQUE, bags: float = BAGS) -> float:
    return 40 * (ids + rows) + 0.2 * (ROW * rows + WEIGHTS * bags)


def test_training_in_host_memory() -> None:
    found, pool = loads(make_setup())
    assert sorted(found) == sorted((*SERIAL, *AHEAD, *LINKS, *DRIVES, *SHARED))
    assert found["batch"] == ("batch", pytest.approx(800e-6), 1.0, "batches"), "a step, and a batch that is taken over"
    lookups = (_lookup_ns() + _update_ns()) * 1e-9
    assert found["lookups"] == ("lookups", pytest.approx(lookups), IDS, "ids"), "too few for two threads"
    assert found["model"] == ("model", pytest.approx(3e5 * 1000 / 1e11), 3e8, "flops")
    cold = (700_000 + 40 * (IDS + UNIQUE) + MISSES * (200 + 0.1 * ROW) + pool.pages_read * 300) * 1e-9
    assert found["cold rows"] == ("cold rows", pytest.approx(cold), MISSES, "rows")
    back = (MISSES + 3 * pool.rows_moved) * (800 + 1.0 * ROW) * 1e-9 + pool.transactions * 400e-6
    assert pool.rows_moved > 100
    assert found["write-back"] == ("write-back", pytest.approx(back), MISSES, "rows")
    reads = pool.pages_read + pool.segments_cleaned
    assert found["ssd reads"] == ("ssd reads", pytest.approx(reads / 1e5 + 1e-4), reads, "reads")
    written = (MISSES + pool.rows_moved) * SEGMENT
    assert found["ssd writes"] == ("ssd writes", pytest.approx(written / 1e9), pytest.approx(written), "bytes")
    moved = (IDS + MISSES + 2 * UNIQUE) * ROW
    assert found["ddr"] == ("ddr", pytest.approx(moved / 1e10), moved, "bytes")
    computing = 800e-6 + lookups + 4 * 3e8 / 1e11
    busy = computing + cold + back
    assert found["cores"] == ("cores", pytest.approx(busy / 4), pytest.approx(busy), "core-seconds")
    assert found["wait for a core"].seconds == pytest.approx((cold + back) / 4)
    assert found["wait ahead"].seconds == pytest.approx(computing / 4)
    for idle in ("hbm", "network", "id exchange", "pcie"):
        assert found[idle].seconds == found[idle].amount == 0


def test_a_dense_model_of_known_layers_takes_more_than_its_flops() -> None:
    work: dict[str, Any] = {"dense_products": 30.0, "dense_values": 200.0}
    (found, _), (plain, _) = loads(make_setup(make_workload(**work))), loads(make_setup())
    started, values = 3 * 30 * 25e-6, 3 * 1000 * 200 * 6 * 0.1e-9
    assert found["model"].seconds == pytest.approx(plain["model"].seconds + started + values / 4)
    assert found["cores"].amount == pytest.approx(plain["cores"].amount + started + values), "others wait for the start"
    served, _ = loads(make_setup(make_workload(training=False, **work)))
    assert served["model"].seconds == pytest.approx(1e8 / 1e11 + started / 3 + values / 12)
    device, _ = loads(make_setup(make_workload(**work), host=make_host(gpus=1), hbm_bytes=16 * MIB))
    assert device["model"].seconds == pytest.approx(3e8 / 1e13), "not on the cores"


def test_ranks_that_share_a_host_take_what_was_measured_of_ranks() -> None:
    setup = make_setup(rank_costs=costs_of(4, reduce_us=400.0, reduce_busy_us=2400.0)).of_a_rank
    host = setup.host
    assert (setup.hosts, setup.threads, setup.ddr_bytes) == (4, 1, 16 * MIB)
    assert (host.processor.cores, host.processor.flops) == (1, 2.5e10)
    assert (host.ddr.row_bytes_per_s, host.storage[0].reads_per_s) == (2.5e9, 2.5e4)
    found, pool = loads(setup)
    assert pool.sent_rows == IDS / 4
    asker, owner = 3 + 0.1 + IDS / 4 * (0.01 + 0.02), IDS / 4 * (0.02 + 64 * 0.002)
    assert found["lookups"].seconds == pytest.approx(asker + owner), "rows cross"
    assert found["batch"].seconds == pytest.approx(500e-6), "a step is in what was measured"
    ahead = found["cold rows"].seconds + found["write-back"].seconds
    own = found["lookups"].seconds + found["model"].seconds
    assert found["network"].seconds == pytest.approx((400 + 2000 * ahead / (ahead + own)) * 1e-6)
    assert found["id exchange"].seconds == 0
    with pytest.raises(ValueError, match="rank_costs are of 4 ranks"):
        _ = make_setup(rank_costs=costs_of(4), hosts=2).of_a_rank


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
    copies = 2 * MISSES * (40 + 40 + 0.2 * ROW)
    bringing = MISSES * (200 + 0.1 * ROW) + pool.pages_read * 300
    assert found["cold rows"].seconds == pytest.approx((700_000 + copies + bringing) * 1e-9)
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
    few, few_pool = loads(setup, sent_rows=150.0)
    assert few_pool.sent_rows == 150
    assert few["network"].amount == pytest.approx(3 / 4 * 2 * 150 * 256 + ring)
    assert few["id exchange"].amount == pytest.approx(3 / 4 * 150 * 8)
    asker = _lookup_ns(IDS / 4, 150, BAGS / 4) + _update_ns(IDS / 4, 150, BAGS / 4)
    owner = _lookup_ns(150, UNIQUE / 4, 150) + _update_ns(150, UNIQUE / 4, 150)
    assert few["lookups"].seconds == pytest.approx((asker + owner) * 1e-9)
    admitting = 40 * (IDS / 4 + 150 + 150 + UNIQUE / 4)
    alone = few["cold rows"].seconds - 1e-9 * (700_000 + few_pool.misses * (200 + 0.1 * ROW))
    assert alone == pytest.approx(1e-9 * (admitting + few_pool.pages_read * 300))


@given(st.fixed_dictionaries({name: st.floats(0, 1000) for name in (*SERIAL, *AHEAD, *LINKS, *DRIVES, *SHARED)}))
def test_a_step_and_its_bottleneck_are_the_longest_of_what_goes_on_at_once(seconds: dict[str, float]) -> None:
    groups = [SERIAL, AHEAD, LINKS, DRIVES, *((name,) for name in SHARED)]
    sums = [sum(seconds[name] for name in names) for names in groups]
    lanes = lanes_of(seconds, is_ahead=True)
    assert lanes[0].seconds == max(sums)
    longest = max(seconds[name] for name in groups[sums.index(max(sums))])
    found = bottleneck_of(lanes, seconds)
    assert found not in WAITS
    assert longest in ([seconds[found]] if found != "cores" else [seconds[name] for name in (*WAITS, "cores")])
    turns = sum(seconds[name] for names in groups[:4] for name in names)
    assert lanes_of(seconds, is_ahead=False)[0].seconds == pytest.approx(
        max(turns, *(seconds[name] for name in SHARED))
    )

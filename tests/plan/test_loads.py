"""What a step keeps each resource busy, by hand; rows of budgets and hits of tiers, against stores that are trained."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.dist.placement.support import costs_of
from tests.plan.hosts import GIB, MIB, flat_demand, make_host, make_setup, make_workload
from tierstore.cache.full import FullCache
from tierstore.plan import Setup, TableShape, Workload
from tierstore.plan.demand import Demand, PoolLoad, pool_loads
from tierstore.plan.host import LIBRARY_BYTES, REQUEST_BATCHES
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
from tierstore.plan.measure import transactions_in
from tierstore.plan.model import processes_bytes
from tierstore.plan.traces import Accesses

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
    assert found["requests"].seconds == 0
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
    for threads, workers in ((2, 1), (1, 3)):
        served, _ = loads(make_setup(make_workload(training=False, **work), threads=threads, workers=workers))
        own = (1e8 / 1e11 + values / 12) * 4 / threads + (started / 3 if threads > 1 else 0)
        assert served["model"].seconds == pytest.approx(own), "a worker computes on its own threads"
        assert served["requests"].seconds == pytest.approx(REQUEST_BATCHES * 100e-6)
    wide = make_setup(make_workload(training=False, dense_flops=1e8), workers=3)
    narrow = replace(wide, workers=1)
    read = [loads(each)[0]["model"].seconds - 1e11 / 1e11 * 2 for each in (wide, narrow)]
    assert read == pytest.approx([(4 * 1e8 / 2 - 2 * 4 * MIB) / 5e10] * 2), "half of the cores read as fast"
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
    demand = flat_demand(setup.workload, unique=UNIQUE, miss_ratio=0.25)
    own, alone = (processes_bytes(each, demand) for each in (setup, replace(setup, rank_costs=None)))
    assert alone - own == pytest.approx(LIBRARY_BYTES * 3 / 4), "four ranks share the libraries"
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


TABLES = (
    TableShape(name="a", num_embeddings=30_000, embedding_dim=64, pooling_factor=2.0, exponent=1.05),
    TableShape(name="b", num_embeddings=50_000, embedding_dim=16, pooling_factor=1.0, exponent=0.9),
    TableShape(name="c", num_embeddings=20_000, embedding_dim=64, pooling_factor=1.0, exponent=0.8),
)
WORKLOAD = Workload(name="w", tables=TABLES, batch_samples=200, optimizer="rowwise_adagrad")


def make_store(folder: Path, workload: Workload, *, ddr: int, policy: str, hbm: int = 0) -> tierstore.Store:
    store = tierstore.open(folder, ddr=ddr, hbm=hbm, policy=policy, threads=1)
    for table in workload.tables:
        rule = tierstore.ids.Frequency(2, candidates=table.candidates) if table.candidates else None
        ids = tierstore.DynamicIds(admission=rule) if table.ids == "dynamic" else None
        fields = {"num_embeddings": table.num_embeddings, "embedding_dim": table.embedding_dim, "pooling": "sum"}
        optimizer = tierstore.optim.RowWiseAdagrad()
        store.create_table(tierstore.TableConfig(name=table.name, ids=ids, optimizer=optimizer, **fields))
    return store


@pytest.mark.parametrize(
    ("policy", "ddr", "hbm"),
    [("lru", 1 << 20, 0), ("lfu", 5_000_000, 0), ("tinylfu", 15_000_000, 0), ("lru", 60_000_000, 0),
     *((policy, 12_000_000, 3_000_000) for policy in ("lru", "lfu", "tinylfu"))],
)  # fmt: skip
def test_a_budget_is_as_many_rows_as_the_store_makes_of_it(store_dir: Path, policy: str, ddr: int, hbm: int) -> None:
    setup = make_setup(WORKLOAD, ddr_bytes=float(ddr), hbm_bytes=float(hbm), policy=policy, host=make_host(gpus=1))
    loads = pool_loads(setup, Demand.analytic(WORKLOAD))
    with make_store(store_dir, WORKLOAD, ddr=ddr, policy=policy, hbm=hbm) as store:
        pools = [store["a"].pool, store["b"].pool]
        assert [load.ddr_rows for load in loads] == [pool.cache.capacity for pool in pools]
        assert [load.is_full for load in loads] == [isinstance(pool.cache, FullCache) for pool in pools]
        on_device = [pool.tier.cache.capacity for pool in pools if pool.tier.on_device]
        assert [load.hbm_rows for load in loads if load.hbm_rows] == on_device


@pytest.mark.parametrize("ddr", [5_000_000, 15_000_000])
def test_dynamic_ids_take_of_a_budget_what_they_take_in_the_store(store_dir: Path, ddr: int) -> None:
    kept = [replace(TABLES[0], ids="dynamic"), replace(TABLES[1], ids="dynamic", candidates=70_000), TABLES[2]]
    workload = replace(WORKLOAD, tables=tuple(kept))
    loads = pool_loads(make_setup(workload, ddr_bytes=float(ddr)), Demand.analytic(workload))
    with make_store(store_dir, workload, ddr=ddr, policy="lru") as store:
        assert [load.ddr_rows for load in loads] == [store[name].pool.cache.capacity for name in ("a", "b")]
        assert workload.id_bytes == store["a"].id_stats().bytes + store["b"].id_stats().bytes
        assert workload.id_bytes // 150_000 == 20, "as docs/planning/traces.md says"
    with pytest.raises(ValueError, match="dynamic ids; give at least"):
        pool_loads(make_setup(workload, ddr_bytes=2_500_000.0), Demand.analytic(workload))
    half = make_setup(workload, ddr_bytes=2_500_000.0, hosts=2)
    assert all(load.ddr_rows for load in pool_loads(half, Demand.analytic(workload))), "each host has half of the ids"


class Counted(NamedTuple):
    """What a store counted, a step; names as of ``PoolLoad``."""

    unique: float
    misses: float
    rows_written: float
    rows_moved: float
    pages_read: float
    transactions: float


def train(store_dir: Path, policy: str, *, steps: int) -> tuple[Setup, Accesses, Counted]:
    workload = replace(WORKLOAD, tables=(replace(TABLES[0], num_embeddings=12_000, exponent=0.9),), batch_samples=250)
    setup = make_setup(workload, ddr_bytes=1_300_000.0, policy=policy, prefetch_depth=0)
    generator = np.random.default_rng(0)
    weights = np.arange(1, 12_001) ** -0.9
    rows = generator.permutation(12_000)
    drawn = [rows[generator.choice(12_000, 500, p=weights / weights.sum())] for _ in range(steps)]
    with make_store(store_dir, workload, ddr=int(setup.ddr_bytes), policy=policy) as store:
        store["a"].write(torch.arange(12_000), torch.zeros(12_000, 64))
        store.commit()
        module = tierstore.TieredEmbeddingBagCollection(store)
        counts = []
        for ids in np.split(np.stack(drawn), 2):
            for batch in torch.from_numpy(ids):
                features = tierstore.KeyedJaggedTensor(["a"], batch, offsets=torch.arange(0, 501, 2))
                module(features).values().sum().backward()
            ddr, ssd = store.stats().ddr, store.stats().ssd
            found = (ddr.unique, ddr.misses, ssd.rows_written, ssd.rows_moved, ssd.bytes_read / 4096)
            counts.append(np.array([*found, transactions_in(store_dir / "rows.lmdb", store["a"].layout.page_bytes)]))
    accesses = Accesses(np.concatenate(drawn), np.arange(steps + 1) * 500, ("a",))
    return setup, accesses, Counted(*((counts[1] - counts[0]) / (steps // 2)).tolist())


def test_a_training_misses_and_writes_as_predicted(store_dir: Path) -> None:
    """A store that is trained on drawn ids. By a trace of these ids pages read are within 2 %, by formula 5 %."""
    setup, drawn, found = train(store_dir, "lru", steps=360)
    (load,) = pool_loads(setup, Demand.analytic(setup.workload))
    for name, value, most in zip(Counted._fields, found, (0.02, 0.04, 0.04, 0.25, 0.05, 0.04), strict=True):
        assert getattr(load, name) == pytest.approx(value, rel=most), name
    (load,) = pool_loads(setup, Demand.from_accesses(setup.workload, drawn))
    assert load.pages_read / load.misses == pytest.approx(found.pages_read / found.misses, rel=0.02)


def test_by_count_rows_are_written_as_they_leave(store_dir: Path) -> None:
    """The next victims are the rows of the batch before, and behind them are clean ones; rows that leave the window
    together are written together. Some are used once more before they leave and written twice, which the model leaves
    out."""
    setup, _, found = train(store_dir, "tinylfu", steps=160)
    (load,) = pool_loads(setup, Demand.analytic(setup.workload, "tinylfu"))
    assert load.misses == pytest.approx(found.misses, rel=0.12), "the curve is of single accesses"
    assert load.rows_written / load.misses == pytest.approx(found.rows_written / found.misses, rel=0.06)
    assert load.transactions == found.transactions == 1


def load_of(*, unique: float = 2000.0, miss_ratio: float = 0.25, **changes: Any) -> PoolLoad:
    setup = make_setup(**changes)
    (load,) = pool_loads(setup, flat_demand(setup.workload, unique=unique, miss_ratio=miss_ratio))
    return load


def test_one_pool_by_hand() -> None:
    load = load_of()
    assert load.lookups == 4000
    assert load.asked == load.hbm_misses == load.unique == 2000
    assert load.misses == load.device_misses == load.rows_written == 500
    assert (load.layout.rows_per_block, load.layout.rows_per_segment) == (14, 210)
    pages = 1_000_000 / 14
    assert load.pages_read == pytest.approx(pages * (1 - (1 - 1 / pages) ** 500), rel=1e-4)
    live, cached = load.rows_moved / (load.rows_moved + 500), load.ddr_rows / 1e6
    assert -math.log(live) / (1 - live) == pytest.approx((1.8 - cached) / (1 - cached), rel=1e-4)
    assert load.segments_cleaned == pytest.approx(load.rows_moved / (210 * live), rel=1e-3)
    assert load.pages_written == pytest.approx((500 + load.rows_moved) / 210 * 16)
    four = load_of(hosts=4)
    assert (four.num_rows, four.lookups, four.unique, four.misses) == (250_000, 1000, 500, 125)


def test_extremes() -> None:
    rows = load_of(ddr_bytes=MIB).ddr_rows
    for unique, asked in ((rows, rows), (rows + 1, 2 * (rows + 1))):
        assert load_of(ddr_bytes=MIB, unique=float(unique)).asked == asked
    assert load_of(ddr_bytes=MIB, unique=0.375 * rows).keeps_two
    assert not load_of(ddr_bytes=MIB, unique=0.375 * rows + 1).keeps_two
    everything = load_of(ddr_bytes=GIB)
    assert everything.is_full
    assert everything.misses == everything.pages_read == everything.pages_written == 0
    least = load_of(ddr_bytes=500 * 1024.0, miss_ratio=0.0)
    assert least.ddr_rows < least.unique
    assert least.asked == 2 * least.unique, "backward has to bring the rows in again"
    assert least.misses == least.unique - least.ddr_rows
    assert least.rows_written == least.misses
    twice = load_of(ddr_bytes=500 * 1024.0, miss_ratio=1.0)
    assert twice.misses == 2 * twice.unique - twice.ddr_rows
    assert twice.rows_written == twice.unique, "a row that is read twice has changed once"
    cached = load_of(page_cache_bytes=GIB)
    assert cached.misses == cached.rows_written == 500
    assert cached.device_misses == cached.pages_read == cached.segments_cleaned == 0
    for little in ({"ddr_bytes": 1000.0}, {"hbm_bytes": 1000.0, "host": make_host(gpus=1)}):
        with pytest.raises(ValueError, match=r"too little for 64 rows of each row layout.*give at least \d+KiB"):
            load_of(**little)


def test_a_tier_in_device_memory_takes_what_the_curve_gives_it() -> None:
    workload = make_workload(rows=1_000_000)
    setup = make_setup(workload, host=make_host(gpus=1), hbm_bytes=16 * MIB, ddr_bytes=64 * MIB)
    demand = Demand.analytic(workload)
    (load,) = pool_loads(setup, demand)
    curve = demand.pools[0].curve
    assert load.hbm_misses == pytest.approx(load.unique * curve.miss_ratio(load.hbm_rows))
    together = max(load.hbm_rows + load.ddr_rows / 2, load.ddr_rows)
    assert load.misses == pytest.approx(load.unique * curve.miss_ratio(together))
    (whole,) = pool_loads(replace(setup, hbm_bytes=2 * GIB), demand)
    assert whole.hbm_misses == whole.misses == 0
    assert whole.hbm_rows == whole.num_rows, "a GPU has no more slots than there are rows"

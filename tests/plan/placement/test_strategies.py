"""Placement: what is where, whether it fits, and how strategies compare."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.plan.placement.support import ALL, demand_of, drive, host_of, workload_of
from tierstore.plan import Accesses, Host, Memory, Prediction, Setup, TableShape, Workload
from tierstore.plan.json_file import plain
from tierstore.plan.placement import (
    STRATEGIES,
    PlacementPlan,
    Room,
    TableDemand,
    compare,
    describe_comparison,
    describe_placement,
    measured_demand,
    place,
)
from tierstore.plan.placement.plan import stored_bytes
from tierstore.plan.prediction import Price, ResourceLoad

ROWS = 1600
"""Bytes of a table of ``workload_of``."""


class Asked(list[tuple[float, float]]):
    """A store model that notes what it is asked, and says a step of 2 s."""

    def __call__(self, ddr_bytes: float, hbm_bytes: float) -> Prediction:
        self.append((ddr_bytes, hbm_bytes))
        return Prediction(
            setup=Setup(workload=workload_of(), host=host_of(0), ddr_bytes=ddr_bytes),
            step_s=2.0,
            samples_per_s=4.0,
            tiers=(),
            loads=(ResourceLoad("ssd reads", 1.5, 12.0, "reads"), ResourceLoad("lookups", 0.5, 1.0, "lookups")),
            bottleneck="ssd reads",
            drive_writes_a_day=0.0,
            price=Price(0.0, 0.0, 0.0),
        )


def placed(strategy: str, workload: Workload, host: Host, **settings: Any) -> PlacementPlan:
    given = {"room": ALL, "demand": demand_of(workload)} | settings
    return place(workload, host, strategy=strategy, **given)  # type: ignore[arg-type]


def assert_whole(plan: PlacementPlan, workload: Workload) -> None:
    for table in workload.tables:
        own = [part for part in plan.parts if part.table == table.name]
        area = sum(part.num_rows * part.num_columns for part in own)
        assert area == table.num_embeddings * table.embedding_dim
        cells = {
            (row, part.first_column) for part in own for row in range(part.first_row, part.first_row + part.num_rows)
        }
        assert len(cells) == sum(part.num_rows for part in own)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("tables", [1, 2, 7])
def test_every_row_is_placed_once_and_bytes_add_up(strategy: str, hosts: int, tables: int) -> None:
    workload, host = workload_of(tables), host_of(2, storage=(drive(),))
    plan = placed(strategy, workload, host, hosts=hosts, store_model=Asked())
    assert_whole(plan, workload)
    assert sum(part.size_bytes for part in plan.parts) == workload.table_bytes
    if strategy != "ssd":
        for tier in plan.tiers:
            assert tier.used_bytes == sum(part.size_bytes for part in plan.parts if part.tier == tier.tier)
            assert tier.free_bytes == tier.capacity_bytes - tier.used_bytes
    assert plan.fits == (plan.missing_bytes == 0)
    assert json.loads(json.dumps(plain(plan), allow_nan=False))["strategy"] == strategy


@pytest.mark.parametrize(
    ("strategy", "tables", "capacity", "needed"),
    [("gpu", 5, 2 * 1600, 3), ("host", 5, 4000, 2), ("hybrid", 9, 2 * 1600 + 4000, 2)],
)
def test_what_does_not_fit_says_how_much_would(strategy: str, tables: int, capacity: int, needed: int) -> None:
    workload, host = workload_of(tables), host_of(2)
    plan = placed(strategy, workload, host)
    assert not plan.fits
    assert plan.missing_bytes == pytest.approx(tables * ROWS - capacity, abs=ROWS)
    assert plan.hosts_needed == needed
    assert plan.step is not None
    assert placed(strategy, workload, host, hosts=needed).fits
    assert not placed(strategy, workload, host, hosts=needed - 1).fits
    assert "no room" in plan.why


def test_servers_are_as_few_as_do() -> None:
    workload = workload_of(6)
    plan = placed("remote", workload, host_of(0))
    assert (plan.hosts, plan.servers, plan.hosts_needed) == (1, 3, 3)
    assert plan.fits
    few = placed("remote", workload, host_of(0), servers=2)
    assert not few.fits
    assert few.missing_bytes == 6 * ROWS - 2 * 4000


def test_room_is_a_share_of_memory() -> None:
    workload = workload_of(2)
    assert placed("host", workload, host_of(0), room=Room(ddr_share=0.8)).fits
    plan = placed("host", workload, host_of(0), room=Room(ddr_share=0.7))
    assert (plan.fits, plan.missing_bytes) == (False, 400)


def test_the_hottest_a_byte_go_to_the_accelerator() -> None:
    tables = tuple(
        TableShape(name=name, num_embeddings=rows, embedding_dim=4, pooling_factor=ids)
        for name, rows, ids in (("cold", 50, 1.0), ("large", 90, 9.0), ("hot", 10, 2.0), ("warm", 40, 3.0))
    )
    workload = Workload(name="w", tables=tables, batch_samples=8)
    # Ids a byte: hot 2/10, large 9/90, warm 3/40, cold 1/50, over 16 bytes a row.
    for room, hot in ((100 * 16, {"large", "hot"}), (99 * 16, {"hot", "warm"}), (1, set())):
        gpu = replace(host_of(1).accelerators[0], hbm=Memory(capacity_bytes=room, row_bytes_per_s=1.0))
        plan = place(workload, replace(host_of(0), accelerators=(gpu,)), strategy="hybrid", room=ALL)
        assert {part.table for part in plan.parts if part.tier == "hbm"} == hot
    plan = place(workload, host_of(1), strategy="hybrid", room=ALL)
    assert {part.table: part.tier for part in plan.parts} == {
        "cold": "ddr", "large": "hbm", "hot": "hbm", "warm": "ddr",
    }  # fmt: skip


def test_demand_is_measured_from_accesses() -> None:
    """Two batches: table b is asked for rows 1 1 2, then for 3; half of the rows are in the sample."""
    keys = np.array([5, 1 << 40 | 1, 1 << 40 | 1, 1 << 40 | 2, 1 << 40 | 3], np.int64)
    accesses = Accesses(keys, np.array([0, 4, 5]), ("a", "b"), 0.5)
    tables = tuple(TableShape(name=name, num_embeddings=10, embedding_dim=4) for name in "ba")
    workload = Workload(name="w", tables=tables)
    assert measured_demand(workload, accesses) == {"a": TableDemand(1.0, 1.0), "b": TableDemand(4.0, 3.0)}
    others = measured_demand(workload, accesses._replace(tables=("x", "b")))
    assert others == {"a": TableDemand(0.0, 0.0), "b": TableDemand(4.0, 3.0)}


def test_without_an_accelerator_nothing_is_placed_on_one() -> None:
    for strategy in ("gpu", "hybrid"):
        plan = placed(strategy, workload_of(), host_of(0))
        assert (plan.fits, plan.step, plan.hosts_needed, plan.parts) == (False, None, None, ())
        assert "no accelerator" in plan.why


def test_comparison_is_fastest_first_and_what_fits_before_what_does_not() -> None:
    workload, host = workload_of(3), host_of(1, storage=(drive(),))
    plans = compare(workload, host, room=ALL, store_model=Asked())
    assert {plan.strategy for plan in plans} == set(STRATEGIES)
    assert [plan.fits for plan in plans] == sorted((plan.fits for plan in plans), reverse=True)
    rates = [plan.step.samples_per_s for plan in plans if plan.fits and plan.step is not None]
    assert rates == sorted(rates, reverse=True)
    without = compare(workload, host_of(0), room=ALL)
    assert [plan.strategy for plan in without][-3:] == ["gpu", "hybrid", "ssd"]


def test_ssd_is_what_the_store_model_says() -> None:
    workload, model = workload_of(3), Asked()
    host = host_of(2, storage=(drive(), drive()))
    plan = place(workload, host, hosts=2, strategy="ssd", room=Room(hbm_share=0.5, ddr_share=0.25), store_model=model)
    assert model == [(1000.0, 800.0)]
    assert plan.step is not None
    assert (plan.step.step_s, plan.step.overlapped_s, plan.step.samples_per_s) == (2.0, 1.5, 4.0)
    assert plan.step.bottleneck == "ssd reads"
    assert plan.fits
    used = 2.0 * stored_bytes(workload, 2)
    assert [(tier.tier, tier.capacity_bytes, tier.used_bytes) for tier in plan.tiers] == [
        ("hbm", 3200.0, 3200.0), ("ddr", 2000.0, 2000.0), ("ssd", 4e6 * 0.95, used),
    ]  # fmt: skip


def test_ssd_that_is_too_small_or_not_there() -> None:
    workload, model = workload_of(3), Asked()
    wanted = stored_bytes(workload, 1)
    small = replace(drive(), capacity_bytes=0.4 * wanted)
    plan = placed("ssd", workload, host_of(0, storage=(small,)), store_model=model)
    assert (plan.fits, plan.missing_bytes, plan.hosts_needed) == (False, pytest.approx(0.6 * wanted), 3)
    assert plan.why == "no room in ssd"
    plan = placed("ssd", workload, host_of(0), store_model=model)
    assert (plan.fits, plan.hosts_needed, plan.why) == (False, None, "the host has no drive")
    assert not model


def test_hosts_share_the_segments() -> None:
    """1,524 rows of 32 bytes, with key and checksum, fill 12 pages behind 3 of index; in training all rows may be there
    in two versions, with slack."""
    table = TableShape(name="t", num_embeddings=1524 * 6, embedding_dim=4)
    for optimizer, share in (("none", 1.05), ("sgd", 1.05 * 2.8)):
        workload = Workload(name="w", tables=(table,), optimizer=optimizer)
        for hosts in (1, 2, 3):
            assert stored_bytes(workload, hosts) == pytest.approx(share * 6 / hosts * 15 * 4096, abs=1)


def test_ssd_that_the_store_model_refuses() -> None:
    def model(*_: object, **__: object) -> Prediction:
        raise ValueError("too little for a row")

    plan = placed("ssd", workload_of(), host_of(0, storage=(drive(),)), store_model=model)
    assert (plan.fits, plan.step, plan.why) == (False, None, "too little for a row")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"strategy": "gpus"}, "gpu, host, remote, hybrid, ssd"),
        ({"hosts": 0}, "hosts"),
        ({"servers": 0}, "servers"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        place(workload_of(), host_of(1), **({"strategy": "host"} | change))


def test_a_host_that_does_not_say_its_rate() -> None:
    with pytest.raises(ValueError, match="ddr has no row_bytes_per_s"):
        placed("host", workload_of(), host_of(0, ddr=Memory(capacity_bytes=1e6)))
    known = placed("host", workload_of(), host_of(0, ddr=Memory(capacity_bytes=1e6, bytes_per_s=960.0)))
    assert known.step is not None
    assert known.step.step_s == 2.0


def test_texts_tell_what_there_is_in_100_columns() -> None:
    workload, host = workload_of(9), host_of(2, storage=(drive(),))
    plans = compare(workload, host, room=ALL, store_model=Asked())
    comparison = describe_comparison(plans)
    assert len(comparison.splitlines()) == 6
    assert "hosts would do" in comparison
    for plan in plans:
        text = describe_placement(plan)
        assert text.startswith(f"{plan.strategy}: toy on 1 x toy")
        if plan.step is not None:
            assert text.count("<- bottleneck") == 1
        assert ("does not fit" in text) == (not plan.fits)
        assert max(map(len, text.splitlines())) <= 100
    assert "\n" not in describe_comparison(plans[:1]).splitlines()[1]


def test_texts_do_not_obey_names() -> None:
    tables = (TableShape(name="a\x1b[2Jb", num_embeddings=10, embedding_dim=4),)
    workload = Workload(name="\x1b]0;x\x07", tables=tables)
    assert "\x1b" not in describe_placement(place(workload, host_of(0), strategy="host", room=ALL))

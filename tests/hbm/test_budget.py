"""A budget of device memory is kept, whatever the tables; one too small names what is enough."""

import gc
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tierstore
from tierstore import optim
from tierstore.errors import BudgetError
from tierstore.hbm.base import DeviceRows
from tierstore.hbm.streams import staging_bytes
from tierstore.system.sizes import parse_size

POLICIES = ["lru", "lfu", "tinylfu"]
OPTIMIZERS = [optim.SGD(), optim.RowWiseAdagrad(), optim.Adagrad(), optim.Adam()]
FEWEST_ROWS = 22
shapes = st.fixed_dictionaries(
    {
        "num_embeddings": st.one_of(st.integers(FEWEST_ROWS, 500), st.integers(FEWEST_ROWS, 10**7)),
        "embedding_dim": st.sampled_from([1, 3, 4, 16, 64, 200]),
        "dtype": st.sampled_from(["float32", "float16"]),
        "optimizer": st.sampled_from(OPTIMIZERS),
    }
)


def make(directory: Path, shapes: list[dict[str, Any]], **arguments: Any) -> tierstore.Store:
    store = tierstore.open(directory, threads=1, **arguments)
    for number, shape in enumerate(shapes):
        store.create_table(tierstore.TableConfig(name=f"table {number}", **shape))
    return store


def use(store: tierstore.Store) -> list[DeviceRows]:
    """The tiers on the device, after every table was read."""
    for table in store.tables.values():
        table.read(torch.arange(20))
    return [tier for tier in {table.pool.tier for table in store.tables.values()} if isinstance(tier, DeviceRows)]


def refused(store: tierstore.Store) -> str | None:
    """What it says is enough, if the budget of device memory is too small."""
    try:
        use(store)
    except BudgetError as error:
        (enough,) = re.findall(r"^hbm=.*too little.*; give at least (\d+KiB)$", str(error), re.DOTALL)
        return str(enough)
    return None


@settings(max_examples=12)
@given(
    tables=st.lists(shapes, min_size=1, max_size=3),
    hbm=st.one_of(st.integers(1, 300_000), st.integers(1, 8_000_000)),
    policy=st.sampled_from(POLICIES),
)
def test_budgets_are_kept_and_what_is_named_as_enough_is(tables: list[dict[str, Any]], hbm: int, policy: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        given: dict[str, Any] = {"ddr": "64MiB", "policy": policy}
        with make(Path(directory) / "store", tables, hbm=hbm, **given) as store:
            enough = refused(store)
            budget = hbm
        if enough is not None:
            budget = parse_size(enough, name="hbm")
            assert budget > hbm
            assume(budget <= 64_000_000)
        with make(Path(directory) / "store", tables, hbm=budget, **given) as store:
            pools = use(store)
            stats = store.stats()
            assert 0 < stats.hbm.bytes <= budget
            assert stats.hbm.bytes == sum(pool.size_bytes for pool in pools)
            assert stats.ddr.bytes <= 64 * 2**20
            assert stats.hbm.capacity_rows >= min(64, *(table["num_embeddings"] for table in tables)) * len(pools)
            assert stats.hbm.hits + stats.hbm.misses == stats.hbm.unique == 20 * len(tables)


def tensor_bytes() -> int:
    """Of all tensors' memory that Python knows of, each counted once."""
    gc.collect()
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    ("hbm", "dim", "dtype", "policy"), [("80KiB", 64, "float32", "lru"), ("1MiB", 3, "float16", "lfu")]
)
def test_no_tensor_escapes_the_accounts(store_dir: Path, hbm: str, dim: int, dtype: str, policy: str) -> None:
    table: dict[str, Any] = {"num_embeddings": 50_000, "embedding_dim": dim, "dtype": dtype}
    before = tensor_bytes()
    with make(store_dir, [table], ddr="4MiB", hbm=hbm, policy=policy) as store:
        (pool,) = use(store)
        taken = tensor_bytes() - before - staging_bytes(pool.layout, pool._staging.rows)
        assert pool.size_bytes <= parse_size(hbm, name="hbm")
        slack = 4000  # of the batch of 20 ids, kept until rows are next brought in
        assert 0.9 * pool.size_bytes < taken <= pool.size_bytes + slack


@pytest.mark.parametrize("ddr", ["800KiB", "2MiB"])
def test_staging_in_host_memory_is_part_of_ddr(store_dir: Path, ddr: str) -> None:
    found, staging = [], 0
    for hbm in (0, "2MiB"):
        with make(store_dir, [{"num_embeddings": 50_000, "embedding_dim": 64}], ddr=ddr, hbm=hbm) as store:
            staging = sum(pool.host_bytes for pool in use(store))
            found.append(store.stats().ddr)
            assert found[-1].bytes <= parse_size(ddr, name="ddr")
    assert staging > 100_000
    row_bytes = 64 * 4 + 44
    assert found[0].capacity_rows - found[1].capacity_rows > 0.9 * staging / (row_bytes * 17 / 16)


@pytest.mark.parametrize("hbm", [0, "1% of tables", "0.0000001% of tables"])
def test_a_share_of_small_tables_is_as_little_as_a_store_needs(tmp_path: Path, hbm: str | int) -> None:
    shape = {"num_embeddings": 1000, "embedding_dim": 8, "optimizer": optim.Adagrad}
    with make(tmp_path / "store", [shape, shape | {"embedding_dim": 4}], ddr="1% of tables", hbm=hbm) as store:
        use(store)
        assert store.stats().ddr.bytes < 1 << 20
        assert 0 < store.stats().ddr.capacity_rows < 2000
        rows = torch.arange(1000)
        for table in store.tables.values():
            assert table.pooled(rows, torch.arange(1001), mode="max").equal(table.read(rows))
        assert {table.config.optimizer for table in store.tables.values()} == {optim.Adagrad()}
    with make(tmp_path / "other", [shape], ddr="1KiB") as store, pytest.raises(BudgetError, match="too little"):
        use(store)

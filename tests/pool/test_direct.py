"""The short ways of ``Table.pooled``, by compiled calls: the same bits, counts and errors as by ``Lookup``."""

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tierstore
from tests.io.support import flip, place_of
from tierstore.errors import ChecksumError, ClosedError, TableError
from tierstore.kernels import jit as _jit
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.kernels.threads import Workers
from tierstore.pool import direct

ROWS = 500

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="plain Python has no addresses to call by")


def _open(path: Path, *, dim: int = 20, dtype: Any = "float32", **settings: Any) -> tierstore.Store:
    store = tierstore.open(path / "store", mode="w", ddr="64MiB", **settings)
    for name in ("a", "b"):
        store.create_table(
            tierstore.TableConfig(
                name=name, num_embeddings=ROWS, embedding_dim=dim, dtype=dtype,
                init=tierstore.init.Uniform(-1, 1, seed=3),
            )
        )  # fmt: skip
    return store


def _bags(generator: np.random.Generator, bags: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = generator.integers(0, longest + 1, bags)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return torch.from_numpy(generator.integers(0, ROWS, offsets[-1])), torch.from_numpy(offsets)


def _by_lookup(table: tierstore.Table, ids: torch.Tensor, offsets: torch.Tensor, mode: str) -> torch.Tensor:
    out = torch.empty((len(offsets) - 1, table.layout.dim))
    table.lookup(table.jagged(ids, offsets, mode=mode), mode=mode).forward(out, keep=False)
    return out


@pytest.mark.parametrize(
    ("mode", "dim", "dtype", "bags", "longest"),
    [
        ("sum", 1, "float32", 0, 0), ("mean", 20, "float32", 1, 0), ("sum", 64, "bfloat16", 1, 20),
        ("mean", 83, "float16", 70, 3), ("sum", 20, "float32", 300, 40), ("mean", 1, "float32", 3, 9000),
        ("sum", 83, "float16", 300, 40), ("mean", 64, "bfloat16", 3, 9000),
    ],
)  # fmt: skip
def test_the_bits_of_lookup(tmp_path: Path, mode: str, dim: int, dtype: str, bags: int, longest: int) -> None:
    with _open(tmp_path, dim=dim, dtype=dtype, threads=3) as store:
        table = store["b"]
        table.read(torch.arange(ROWS))
        ids, offsets = _bags(np.random.default_rng(bags), bags, longest)
        expected = _by_lookup(table, ids, offsets, mode)
        memory = table.pool.tier.one_table(table.index, ROWS)
        hits = table.pool.arena.cache.counters().hits
        for given in (ids, ids.to(torch.int32)):
            for some, is_last_given in ((offsets, True), (offsets[:-1], False)):
                pooled = memory.pooled(given, some, {"sum": 0, "mean": 1}[mode], is_last_given)
                assert (pooled is None) == (not len(some))
                hits += 0 if pooled is None else len(given)
                assert pooled is None or torch.equal(pooled.view(torch.int32), expected.view(torch.int32))
            assert torch.equal(table.pooled(given, offsets, mode=mode), expected)
            hits += len(given)
        for weights in (None, torch.ones(len(ids))) if mode == "sum" else (None,):
            options: dict[str, Any] = {"mode": mode, "per_sample_weights": weights, "include_last_offset": False}
            assert torch.equal(table.pooled(ids, offsets[:-1], **options), expected)
            hits += len(ids)
        assert table.pool.arena.cache.counters().hits == hits


def test_a_large_lookup_is_split_over_torchs_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Workers(2).native_team():
        pytest.skip("torch does not compute with GNU's OpenMP here")
    with _open(tmp_path, threads=2) as store:
        table = store["a"]
        table.read(torch.arange(ROWS))
        ids, offsets = _bags(np.random.default_rng(1), 900, 40)
        noted = {name: Mock(wraps=getattr(direct, name)) for name in ("pool_at", "look_up_at")}
        for name, spy in noted.items():
            monkeypatch.setattr(direct, name, spy)
        found = [table.pooled(ids, offsets), _by_lookup(table, ids, offsets, "sum")]
        assert noted["pool_at"].call_args.args[-1], "the team of threads"
        assert noted["look_up_at"].call_args.args[-1]
        monkeypatch.setattr(Workers, "native_team", lambda _: 0)
        assert all(torch.equal(each, table.pooled(ids, offsets)) for each in found)


def test_a_wrong_id_is_named(tmp_path: Path) -> None:
    with _open(tmp_path) as store:
        table = store["a"]
        table.read(torch.arange(ROWS))
        ids = torch.zeros(9000, dtype=torch.int64)
        for place, wrong in ((0, -1), (40, ROWS), (40, 2**40), (8999, -(2**63))):
            for count in (place + 1, 9000):
                ids[place] = wrong
                with pytest.raises(ValueError, match=f"id {wrong} is not a row of table 'a'"):
                    table.pooled(ids[:count], torch.arange(0, count + 1))
                ids[place] = 0
                table.pooled(ids[:count], torch.arange(0, count + 1))


def test_other_arguments_take_the_long_way(tmp_path: Path) -> None:
    with _open(tmp_path) as store:
        table = store["a"]
        ids, offsets = torch.arange(8), torch.tensor([0, 2, 4])
        expected = table.pooled(ids[::2].contiguous(), offsets)
        assert torch.equal(table.pooled(ids[::2], offsets), expected)
        assert torch.equal(table.pooled(ids[::2], offsets.to(torch.int32)), expected)
        for wrong in (ids.float(), torch.zeros(20_000, dtype=torch.int16)):
            with pytest.raises(TypeError, match="ids must be int64 or int32"):
                table.pooled(wrong, offsets)
        with pytest.raises(TypeError, match="offsets must be a Tensor"):
            table.pooled(ids, [0, 8])  # type: ignore[arg-type]


def test_a_new_table_or_a_closed_store_is_noticed_and_its_pool_goes(tmp_path: Path) -> None:
    store = _open(tmp_path)
    table = store["b"]
    ids, offsets = torch.arange(9), torch.tensor([0, 9])
    expected, pools = table.pooled(ids, offsets), [weakref.ref(table.pool)]
    store.create_table(tierstore.TableConfig(name="c", num_embeddings=70, embedding_dim=20))
    pools.append(weakref.ref(table.pool))
    assert torch.equal(table.pooled(ids, offsets), expected)
    table.write(ids, torch.ones(9, 20))
    assert torch.equal(table.pooled(ids, offsets), torch.full((1, 20), 9.0))
    store.close()
    with pytest.raises(ClosedError):
        table.pooled(ids, offsets)
    gc.collect()
    assert [pool() for pool in pools] == [None, None]


@pytest.mark.parametrize("count", [8, 9000])
def test_a_tensor_without_memory_is_refused(tmp_path: Path, count: int) -> None:
    with _open(tmp_path) as store:
        table, freed = store["a"], torch.zeros(count, dtype=torch.int64)
        ids, offsets = freed.clone(), torch.tensor([0, count])
        table.pooled(ids, offsets)
        freed.untyped_storage().resize_(0)
        for look_up, name in (
            (lambda: table.pooled(freed, offsets), "ids"), (lambda: table.pooled(ids, freed), "offsets"),
            (lambda: table.read(freed), "ids"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"{name} has no elements in memory"):
                look_up()


def test_what_is_compiled_for_c_is_compiled_again_when_any_source_changed() -> None:
    assert direct._body(np.int64, np.float32)._cache._cache_file._source_stamp == _jit._STAMP


def test_lookups_and_writes_beside_new_tables(tmp_path: Path) -> None:
    """A new table brings a new pool: whoever works in the old one goes on in the new one, and loses nothing."""
    with _open(tmp_path) as store, ThreadPoolExecutor(1) as threads:
        table, ids, offsets = store["a"], torch.arange(4), torch.tensor([0, 4])
        done, made = threading.Event(), 0

        def work() -> float:
            written = 0.0
            while not done.is_set():
                written += 1
                table.write(ids, torch.full((4, 20), written))
                assert table.pooled(ids, offsets)[0, 0] == 4 * written
            return written

        working = threads.submit(work)
        for number in range(2000):
            with contextlib.suppress(TableError):  # rows are in use
                store.create_table(tierstore.TableConfig(name=f"c{number}", num_embeddings=9, embedding_dim=8))
                made += 1
            if made == 10 or working.done():
                break
        done.set()
        written = working.result()
        assert made
        assert table.read(ids)[0, 0] == written


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_as_they_are_if_all_are_in_memory(tmp_path: Path, dtype: Any) -> None:
    ids = np.array([3, ROWS - 1, 3, 0])
    with _open(tmp_path, dtype=dtype) as store:
        other, table = store["a"], store["b"]
        assert table.rows_in_memory(ids) is None
        other.read(torch.from_numpy(ids))
        table.write(torch.tensor([3]), torch.full((1, 20), -0.0, dtype=table.layout.torch_dtype))
        want = table.read(torch.from_numpy(ids)).float().numpy()
        before = store.stats().ddr
        found = table.rows_in_memory(ids)
        assert found.dtype == np.float32
        assert found.tobytes() == want.tobytes()
        after = store.stats().ddr
        assert (after.lookups - before.lookups, after.hits - before.hits) == (4, 3)
        for absent in (4, -1, ROWS):
            assert table.rows_in_memory(np.array([3, absent])) is None
        assert table.rows_in_memory(ids[:0]).shape == (0, 20)  # type: ignore[union-attr]
    with pytest.raises(ClosedError):
        table.rows_in_memory(ids)


MANY = 20_000


@pytest.fixture
def evicting(tmp_path: Path) -> Path:
    with tierstore.open(tmp_path / "store", ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=MANY, embedding_dim=16))
        table.write(torch.arange(MANY), torch.randn(MANY, 16, generator=torch.Generator().manual_seed(1)))
        store.commit()
        flip(tmp_path / "store", place_of(store._cold, 0, 7).row)
    return tmp_path / "store"


def _counts(store: tierstore.Store) -> tuple[int, int, int, int]:
    ddr = store.stats().ddr
    return ddr.lookups, ddr.hits, ddr.misses, ddr.evictions


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bits_and_counts_where_rows_may_be_evicted(evicting: Path, mode: str) -> None:
    generator = np.random.default_rng(2)
    options: Any = {"mode": "r", "ddr": "700KiB", "threads": 1}
    with tierstore.open(evicting, **options) as short, tierstore.open(evicting, **options) as long:
        for _ in range(300):
            lengths = generator.integers(0, 9, generator.integers(1, 20))
            offsets = torch.from_numpy(np.append(0, np.cumsum(lengths)))
            ids = torch.from_numpy(8 + generator.zipf(1.1, lengths.sum()) % (MANY - 8))
            assert torch.equal(short["t"].pooled(ids, offsets, mode=mode), _by_lookup(long["t"], ids, offsets, mode))
            assert _counts(short) == _counts(long)
        assert short.stats().ddr.evictions > 100


@pytest.mark.parametrize("offsets_type", [torch.int64, torch.int32], ids=["short", "long"])
def test_a_damaged_row_is_told_and_counted_once(evicting: Path, offsets_type: torch.dtype) -> None:
    with tierstore.open(evicting, mode="r", ddr="700KiB") as store:
        with pytest.raises(ChecksumError, match="row 7"):
            store["t"].pooled(torch.tensor([7]), torch.tensor([0, 1], dtype=offsets_type))
        assert _counts(store)[:3] == (1, 0, 1)
        assert torch.isfinite(store["t"].pooled(torch.tensor([8]), torch.tensor([0, 1]))).all()

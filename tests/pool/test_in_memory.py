"""``Table.pooled`` where all rows are in memory: the same bits and errors as by ``Lookup``, by one compiled call."""

import contextlib
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tierstore.errors import ClosedError, TableError
from tierstore.kernels import jit as _jit
from tierstore.kernels import threads
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.pool import direct

ROWS = 500

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="plain Python has no addresses to call by")


def _open(path: Path, *, dim: int = 20, dtype: Any = "float32", rows: int = ROWS, **settings: Any) -> tierstore.Store:
    store = tierstore.open(path / "store", mode="w", ddr="64MiB", **settings)
    for name in ("a", "b"):
        store.create_table(
            tierstore.TableConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                dtype=dtype,
                init=tierstore.init.Uniform(-1, 1, seed=3),
            )
        )
    return store


def _bags(generator: np.random.Generator, bags: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = generator.integers(0, longest + 1, bags)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return torch.from_numpy(generator.integers(0, ROWS, offsets[-1])), torch.from_numpy(offsets)


def _by_lookup(table: tierstore.Table, ids: torch.Tensor, offsets: torch.Tensor, mode: str) -> torch.Tensor:
    out = torch.empty((len(offsets) - 1, table.layout.dim))
    table.lookup(table.jagged(ids, offsets, mode=mode), mode=mode).forward(out, keep=True)
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
        assert memory is not None
        hits = table.pool.arena.cache.counters().hits
        for given in (ids, ids.to(torch.int32)):
            for some, is_last_given in ((offsets, True), (offsets[:-1], False)):
                pooled = memory.pooled(given, some, {"sum": 0, "mean": 1}[mode], is_last_given)
                assert (pooled is None) == (not len(some))
                hits += 0 if pooled is None else len(given)
                assert pooled is None or torch.equal(pooled.view(torch.int32), expected.view(torch.int32))
            assert torch.equal(table.pooled(given, offsets, mode=mode), expected)
            hits += len(given)
        assert table.pool.arena.cache.counters().hits == hits


def test_a_large_lookup_is_split_over_torchs_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not threads.Workers(2).native_team():
        pytest.skip("torch does not compute with GNU's OpenMP here")
    with _open(tmp_path, threads=2) as store:
        table = store["a"]
        ids, offsets = _bags(np.random.default_rng(1), 900, 40)
        expected = table.pooled(ids, offsets)
        assert len(ids) >= direct.few(table.pool.arena.workers, 20)
        used: list[tuple[int, int]] = []
        look_up_at = direct.look_up_at

        def note(*given: Any) -> Any:
            used.append(given[4:6])
            return look_up_at(*given)

        with monkeypatch.context() as patch:
            patch.setattr(direct, "look_up_at", note)
            assert torch.equal(_by_lookup(table, ids, offsets, "sum"), expected)
        ((team, num_threads),) = used
        assert team
        assert num_threads == 2
        assert torch.equal(table.pooled(ids, offsets), expected)
        monkeypatch.setattr(threads.Workers, "native_team", lambda _: 0)
        assert torch.equal(table.pooled(ids, offsets), expected)


@pytest.mark.parametrize("wrong", [-1, ROWS, 2**40, -(2**63)])
@pytest.mark.parametrize("place", [0, 40, 8999])
def test_a_wrong_id_is_named(tmp_path: Path, wrong: int, place: int) -> None:
    with _open(tmp_path) as store:
        table = store["a"]
        table.read(torch.arange(ROWS))
        ids = torch.zeros(9000, dtype=torch.int64)
        for count in (place + 1, 9000):
            offsets = torch.arange(0, count + 1)
            table.pooled(ids[:count], offsets)
            ids[place] = wrong
            with pytest.raises(ValueError, match=f"id {wrong} is not a row of table 'a'"):
                table.pooled(ids[:count], offsets)
            ids[place] = 0


def test_other_arguments_take_the_long_way(tmp_path: Path) -> None:
    with _open(tmp_path) as store:
        table = store["a"]
        ids, offsets = torch.arange(8), torch.tensor([0, 2, 4])
        expected = table.pooled(ids[::2].contiguous(), offsets)
        assert torch.equal(table.pooled(ids[::2], offsets), expected)
        assert torch.equal(table.pooled(ids[::2], offsets.to(torch.int32)), expected)
        for dtype in (torch.float32, torch.int16):
            for wrong in (ids.to(dtype), torch.zeros(20_000, dtype=dtype)):
                with pytest.raises(TypeError, match="ids must be int64 or int32"):
                    table.pooled(wrong, offsets)
        with pytest.raises(TypeError, match="offsets must be a Tensor"):
            table.pooled(ids, [0, 8])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="mode"):
            table.pooled(ids, offsets, mode="median")


def test_a_new_table_or_a_closed_store_is_noticed(tmp_path: Path) -> None:
    store = _open(tmp_path)
    table = store["b"]
    ids, offsets = torch.arange(9), torch.tensor([0, 9])
    expected = table.pooled(ids, offsets)
    store.create_table(tierstore.TableConfig(name="c", num_embeddings=70, embedding_dim=20))
    assert torch.equal(table.pooled(ids, offsets), expected)
    table.write(ids, torch.ones(9, 20))
    assert torch.equal(table.pooled(ids, offsets), torch.full((1, 20), 9.0))
    store.close()
    with pytest.raises(ClosedError):
        table.pooled(ids, offsets)


@pytest.mark.parametrize("count", [8, 9000])
def test_a_tensor_without_memory_is_refused(tmp_path: Path, count: int) -> None:
    with _open(tmp_path) as store:
        table = store["a"]
        ids, offsets = torch.zeros(count, dtype=torch.int64), torch.tensor([0, count])
        table.pooled(ids, offsets)
        for name in ("ids", "offsets"):
            given = {"ids": ids.clone(), "offsets": offsets.clone()}
            given[name].untyped_storage().resize_(0)
            with pytest.raises(ValueError, match=f"{name} has no elements in memory"):
                table.pooled(**given)
        freed = ids.clone()
        freed.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="ids has no elements in memory"):
            table.read(freed)


def test_a_table_keeps_no_pool_alive(tmp_path: Path) -> None:
    store = _open(tmp_path)
    table = store["b"]
    table.pooled(torch.arange(9), torch.tensor([0, 9]))
    pools = [weakref.ref(table.pool)]
    store.create_table(tierstore.TableConfig(name="c", num_embeddings=70, embedding_dim=20))
    pools.append(weakref.ref(table.pool))
    store.close()
    gc.collect()
    assert [pool() for pool in pools] == [None, None]


def test_what_is_compiled_for_c_is_compiled_again_when_any_source_changed() -> None:
    made = direct._body(np.int64, np.float32)
    assert made._cache._cache_file._source_stamp == _jit._STAMP


def test_lookups_and_writes_beside_new_tables(tmp_path: Path) -> None:
    """A new table brings a new pool: whoever works in the old one goes on in the new one, and loses nothing."""
    with _open(tmp_path) as store:
        table = store["a"]
        ids, offsets, done = torch.arange(4), torch.tensor([0, 4]), threading.Event()
        written, errors = [0.0], []

        def work() -> None:
            try:
                while not done.is_set():
                    table.write(ids, torch.full((4, 20), written[0] + 1))
                    written[0] += 1
                    assert table.pooled(ids, offsets)[0, 0] == 4 * written[0]
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        made = 0
        for number in range(2000):
            with contextlib.suppress(TableError):  # rows are in use
                store.create_table(tierstore.TableConfig(name=f"c{number}", num_embeddings=9, embedding_dim=8))
                made += 1
            if made == 20 or errors:
                break
        done.set()
        thread.join()
        assert not errors
        assert made
        assert table.read(ids)[0, 0] == written[0]


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
        assert found is not None
        assert found.dtype == np.float32
        assert found.tobytes() == want.tobytes()
        after = store.stats().ddr
        assert (after.lookups - before.lookups, after.hits - before.hits) == (4, 4)
        for absent in (4, -1, ROWS):
            assert table.rows_in_memory(np.array([3, absent])) is None
        assert table.rows_in_memory(ids[:0]).shape == (0, 20)  # type: ignore[union-attr]
    with pytest.raises(ClosedError):
        table.rows_in_memory(ids)

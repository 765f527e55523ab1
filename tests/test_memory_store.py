"""A store whose cold rows are in memory: the same rows, versions and counts as one on files, and no file."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore.errors import ClosedError, TableError, TierstoreError

ROWS, DIM = 2000, 16
EVERY = torch.arange(ROWS)


def config(name: str, **changes: Any) -> tierstore.TableConfig:
    settings = {"num_embeddings": ROWS, "embedding_dim": DIM, "optimizer": tierstore.optim.Adam(lr=0.1)} | changes
    return tierstore.TableConfig(name=name, **settings)


def steps(store: tierstore.Store, first: int, last: int) -> None:
    """Training steps over two tables, in a cache of fewer rows than there are."""
    generator = torch.Generator().manual_seed(first)
    for name, module in [(name, tierstore.TieredEmbeddingBag(table)) for name, table in store.tables.items()]:
        for _ in range(first, last):
            ids = torch.randint(0, ROWS, (300,), generator=generator)
            module(ids, torch.arange(0, 300, 3)).square().sum().backward()
        assert not store[name].pool.in_use


def rows(store: tierstore.Store) -> torch.Tensor:
    return torch.stack([table.read(EVERY) for table in store.tables.values()])


def lived(store: tierstore.Store) -> list[Any]:
    """What a store says in the course of trainings, commits and going back."""
    said: list[Any] = []
    for name in "ab":
        store.create_table(config(name))
    for version in range(1, 5):
        steps(store, version, version + 3)
        number = store.commit_async(extra={"step": version}, tensors={"w": torch.full((3,), float(version))}).result()
        said += [number, store.versions, rows(store)]
    steps(store, 9, 11)
    store.rollback(3)
    said += [store.version, store.extra, store.tensors()["w"], rows(store)]
    store.create_table(config("c", dtype="bfloat16"))
    steps(store, 20, 22)
    said += [store.commit(), store.versions, rows(store), store.refresh(), store.verify().rows]
    stats = store.stats()
    return [*said, stats.ddr.lookups, stats.ddr.misses, stats.ssd.lookups, stats.ssd.hits, stats.ssd.rows_written]


def test_it_is_as_one_on_files(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ddr": "640KiB", "policy": "lru", "keep": 2, "threads": 1}
    with tierstore.open(tmp_path / "store", **settings) as files, tierstore.open(cold="memory", **settings) as memory:
        for one, other in zip(lived(files), lived(memory), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert memory.stats().ssd.rows_written > ROWS
        with pytest.raises(TableError, match="no table 'd' in :memory:"):
            memory["d"]
    with pytest.raises(ClosedError, match=":memory: is closed"):
        memory.commit()


def test_versions_that_are_dropped_take_no_memory() -> None:
    with tierstore.open(cold="memory", keep=3, ddr="1MiB", threads=1) as store:
        store.create_table(config("a"))
        for step in range(6):
            store["a"].write(EVERY, torch.full((ROWS, DIM), float(step)))
            store.commit()
            row_bytes = store["a"].pool.layout.row_bytes
            assert store.verify().bytes <= min(step + 1, 3) * ROWS * row_bytes + ROWS * row_bytes
        assert store.versions == (4, 5, 6)


def test_what_takes_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'directory=.*cold="memory".*leave it out'):
        tierstore.open(tmp_path / "store", cold="memory")
    with pytest.raises(ValueError, match=r'mode="r" does not go with cold="memory"'):
        tierstore.open(cold="memory", mode="r")
    with pytest.raises(ValueError, match=r'needs a directory.*cold="memory"'):
        tierstore.open()
    with pytest.raises(ValueError, match="cold="):
        tierstore.open(cold="disk")  # type: ignore[arg-type]
    with tierstore.open(cold="memory", ddr="1MiB", threads=1) as store:
        store.create_table(config("a"))
        store.commit()
        with pytest.raises(TierstoreError, match=r"no files to copy; give it a directory"):
            store.backup(tmp_path / "backup")
        assert store.find_newer() is None
    assert list(tmp_path.iterdir()) == []

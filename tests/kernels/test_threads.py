"""Many readers beside one trainer: no torn row, no stale row, no error, whatever is evicted meanwhile."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore import optim
from tierstore.pool.pool import Pool
from tierstore.store.pools import Pools

ROWS, DIM, STEPS = 2000, 8, 40
CONFIG = tierstore.TableConfig(
    name="t", num_embeddings=ROWS, embedding_dim=DIM, init=tierstore.init.Constant(0.0), optimizer=optim.SGD(lr=1.0)
)


@pytest.mark.parametrize("tiers", [{"policy": "lru"}, {"hbm": "36KiB"}, {"hbm": "1MiB"}], ids=str)
def test_readers_see_whole_rows_that_never_go_back(store_dir: Path, tiers: dict[str, Any]) -> None:
    """Every step subtracts 1 from every column of the rows it touches, so a row's columns are equal at all times."""
    with tierstore.open(store_dir, ddr="480KiB", threads=2, **tiers) as store:
        table = store.create_table(CONFIG)
        collection = tierstore.TieredEmbeddingBagCollection(store)
        done = threading.Event()
        failures: list[str] = []
        checked = [0, 0, 0]

        def read(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            lowest = torch.zeros(ROWS)
            try:
                while not done.is_set() or not checked[number]:
                    ids = torch.randint(0, ROWS, (40,), generator=generator).unique()
                    rows = table.read(ids)
                    if not torch.equal(rows, rows[:, :1].expand(-1, DIM)):
                        failures.append(f"torn row: {rows}")
                    if (rows[:, 0] > lowest[ids]).any():
                        failures.append("a row went back to an older value")
                    lowest[ids] = rows[:, 0]
                    checked[number] += 1
            except Exception as error:
                failures.append(repr(error))

        readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for reader in readers:
            reader.start()
        generator = torch.Generator().manual_seed(99)
        counts = torch.zeros(ROWS)
        batches = []
        for _ in range(STEPS):
            ids = torch.randint(0, ROWS, (300,), generator=generator)
            counts += torch.bincount(ids, minlength=ROWS)
            batches.append(tierstore.KeyedJaggedTensor(["t"], ids, lengths=torch.ones(300, dtype=torch.int64)))
        for step, features in enumerate(tierstore.prefetch(batches, collection, depth=2)):
            collection(features).values().sum().backward()
            if step % 20 == 19:
                store.commit()
        done.set()
        for reader in readers:
            reader.join()
        assert not failures, failures[0]
        assert min(checked) > 0
        assert torch.equal(table.read(torch.arange(ROWS)), -counts[:, None].expand(-1, DIM))


def test_a_commit_and_a_first_lookup_agree_on_the_version(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that another thread makes while a commit begins belong to the next version."""
    with tierstore.open(store_dir, ddr="440KiB") as store:
        table = store.create_table(CONFIG)
        begun, has_read = threading.Event(), threading.Event()

        def read() -> None:
            begun.wait(60)
            table.read(torch.arange(5))
            has_read.set()

        thread = threading.Thread(target=read)
        thread.start()

        choose = Pools.__iter__

        def choose_slowly(pools: Pools) -> Iterator[Pool]:
            chosen = choose(pools)
            begun.set()
            has_read.wait(0.2)  # in vain, if the lookup waits for the commit to have begun
            return chosen

        with monkeypatch.context() as patch:
            patch.setattr(Pools, "__iter__", choose_slowly)
            store.commit()
        thread.join()
        for value in range(1, 4):
            table.write(torch.arange(ROWS), torch.full((ROWS, DIM), float(value)))
            assert store.commit() == value + 1

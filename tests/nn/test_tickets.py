"""What a pipeline prepared is taken by the forward call that it is for, once, whoever else ends the pipeline."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tierstore
from tierstore.nn.function import PreparedLookups
from tierstore.pool import Pool


class Counted:
    """Stands for ``Prepared``."""

    features: object = None
    num_released = 0

    def release(self) -> None:
        self.num_released += 1

    def is_current(self, _: object) -> bool:
        return True


def test_a_batch_is_taken_or_dropped_by_one_thread() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as thread:
            for _ in range(1500):
                waiting: Any = PreparedLookups()
                objects, batches = [object() for _ in range(3)], [Counted() for _ in range(3)]
                for each, prepared in zip(objects, batches, strict=True):
                    waiting.put(each, prepared)
                taken = thread.submit(waiting.take, objects[2], [])
                waiting.drop(batches[2])
                assert batches[2].num_released == (taken.result() is None)
    finally:
        sys.setswitchinterval(interval)


def test_an_object_that_comes_again_has_a_batch_of_its_own() -> None:
    waiting: Any = PreparedLookups()
    one, batches = object(), [Counted() for _ in range(3)]
    for each in batches:
        waiting.put(one, each)
    assert [waiting.take(one, []) for _ in range(4)] == [*batches, None]
    assert not any(each.num_released for each in batches)


@pytest.mark.parametrize(("ddr", "hbm"), [("1MiB", 0), ("64MiB", 0), ("64MiB", "256KiB"), ("64MiB", "64MiB")])
def test_one_object_given_again_holds_no_rows_once_it_was_used(ddr: str, hbm: int | str) -> None:
    """Its graph is alive: that keeps what a lookup holds."""
    with tierstore.open(cold="memory", ddr=ddr, hbm=hbm) as store:
        table = store.create_table(tierstore.TableConfig(name="a", num_embeddings=20_000, embedding_dim=16))
        bag, ids = tierstore.TieredEmbeddingBag(table), torch.arange(40).view(-1, 4)
        first, second = bag.prepare(ids), bag.prepare(ids)
        assert bag.bring_in(first)
        out = bag(ids)
        out.sum().backward()
        assert bag.bring_in(second)
        bag.forget(first)
        bag.forget(second)
        assert table.pool.pins.num_held == table.pool.pins.num_pinned == table.pool.tier.num_leased == 0


def test_a_wrong_id_in_one_of_several_modules_leaves_nothing_announced() -> None:
    with tierstore.open(cold="memory", ddr="1MiB", policy="lookahead") as store:
        configs = [tierstore.TableConfig(name=name, num_embeddings=100_000, embedding_dim=8) for name in "ab"]
        bags = [tierstore.TieredEmbeddingBag(store.create_table(config)) for config in configs]
        right, wrong = torch.arange(500).view(-1, 5), torch.full((100, 5), 100_000)
        for _ in range(80):
            with pytest.raises(ValueError, match="is not a row of table 'b'"):
                next(tierstore.prefetch([[right, wrong]], bags, depth=0, lookahead=2, features=lambda each: each))
        assert store["a"].pool.can_announce(500)


def test_ctrl_c_right_after_an_announcement_leaves_nothing_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = Pool.announce

    def interrupted(pool: Pool, keys: Any) -> int:
        number = announce(pool, keys)
        signal.raise_signal(signal.SIGINT)
        return number

    monkeypatch.setattr(Pool, "announce", interrupted)
    with tierstore.open(cold="memory", ddr="1MiB", policy="lookahead") as store:
        config = tierstore.TableConfig(name="a", num_embeddings=100_000, embedding_dim=8)
        bag = tierstore.TieredEmbeddingBag(store.create_table(config))
        for _ in range(80):
            with pytest.raises(KeyboardInterrupt):
                list(tierstore.prefetch([torch.arange(500).view(-1, 5)], bag, depth=0, lookahead=2))
        assert store["a"].pool.can_announce(500)

"""A step that fails changes no row, and can be repeated; or it was part done, and nothing goes on until the store goes
back."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tierstore
from tierstore import errors
from tierstore.io.base import MemoryColdTier
from tierstore.pool.leases import Pins
from tierstore.store import Store

ROWS, STEPS = 1500, 8
TABLES: dict[str, Any] = {"a": (24, "sum"), "b": (24, "mean"), "c": (40, "sum")}
"""Two pools, of which one has two updates in a step: dim and pooling."""
SHARES = {"small": 0.2, "near": 0.45, "over": 1.6}
"""Rows of a batch, of all slots of the smallest cache; two tables share one."""
PLACES: dict[str, Any] = {"ddr": {"ddr": "520KiB"}, "hbm": {"ddr": "700KiB", "hbm": "110KiB"}}
ERRORS = (errors.DiskFullError, errors.DamagedError, errors.BudgetError, MemoryError)


class Faults:
    """Fails a read or write of the cold tier now and then.

    Attributes:
        left: calls until the next one fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.random, self.left = random.Random(seed), -1
        for name in ("read", "write"):
            monkeypatch.setattr(MemoryColdTier, name, self._failing(getattr(MemoryColdTier, name)))

    def _failing(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise self.random.choice(ERRORS)("drawn")
            return work(*arguments, **named)

        return call


def _open(**where: Any) -> Store:
    store = tierstore.open(cold="memory", policy="lru", **where)
    for name, (dim, pooling) in TABLES.items():
        config = tierstore.TableConfig(
            name=name, num_embeddings=ROWS, embedding_dim=dim, pooling=pooling,
            optimizer=tierstore.optim.Adam(lr=0.1), init=tierstore.init.Uniform(-1, 1),
        )  # fmt: skip
        store.create_table(config)
    return store


def _loss(store: Store, ids: torch.Tensor) -> torch.Tensor:
    losses = [tierstore.TieredEmbeddingBag(table)(ids).square().sum() for table in store.tables.values()]
    return torch.stack(losses).sum()


def _train(
    store: Store, batches: list[torch.Tensor], *, has_optimizer: bool, faults: Faults | None = None
) -> tuple[int, int]:
    """Repeat steps, and go back where that is asked for: how often it did either."""
    optimizer = store.optimizer() if has_optimizer else None
    repeated = gone_back = committed = done = 0

    def until_done(work: Callable[[], Any]) -> None:
        """Twice a fault may be drawn."""
        nonlocal repeated
        for turn in range(3):
            if faults is not None and turn < 2 and faults.random.random() < 0.6:
                faults.left = faults.random.randrange(1, 16)
            try:
                work()
                return
            except ERRORS as error:
                assert str(error) == "drawn"  # noqa: PT017 - others are faults of ours
                repeated += 1
            finally:
                if faults is not None:
                    faults.left = -1

    def step(ids: torch.Tensor) -> None:
        if optimizer is None:
            until_done(lambda: _loss(store, ids).backward())  # type: ignore[no-untyped-call]
        else:
            optimizer.zero_grad()
            _loss(store, ids).backward()  # type: ignore[no-untyped-call]
            until_done(optimizer.step)

    store.commit()
    while done < len(batches):
        try:
            step(batches[done])
        except errors.PartlyTrainedError:
            for forbidden in (store.commit, lambda: step(batches[0])):
                with pytest.raises(errors.PartlyTrainedError, match=rf"rollback\({store.version}\)"):
                    forbidden()
            if optimizer is not None:
                optimizer.zero_grad()
            store.rollback(store.version)
            done, gone_back = committed, gone_back + 1
            continue
        done += 1
        if done % 2 == 0:
            store.commit()
            committed = done
    return repeated, gone_back


@pytest.mark.parametrize(
    ("has_optimizer", "place", "share"),
    [
        (False, "ddr", "small"), (False, "ddr", "over"), (False, "hbm", "near"), (True, "ddr", "small"),
        (True, "ddr", "over"), (True, "hbm", "small"),
    ],
)  # fmt: skip
def test_a_step_is_done_once(monkeypatch, place, share, has_optimizer):
    faults = Faults(monkeypatch, 5)
    with _open(**PLACES[place]) as store, _open(ddr="8MiB") as reference:
        pools: list[Any] = [table.pool for table in store.tables.values()]
        capacity = min(pool.tier.capacity_rows if pool.tier.on_device else pool.cache.capacity for pool in pools)
        assert capacity < ROWS
        generator = torch.Generator().manual_seed(1)
        size = int(capacity * SHARES[share]) // 2 * 2
        batches = [torch.randperm(ROWS, generator=generator)[:size].view(-1, 2) for _ in range(STEPS)]
        repeated, gone_back = _train(store, batches, has_optimizer=has_optimizer, faults=faults)
        _train(reference, batches, has_optimizer=has_optimizer)
        for name, table in store.tables.items():
            assert torch.equal(table.read(torch.arange(ROWS)), reference[name].read(torch.arange(ROWS)))
            assert table.state == reference[name].state
        assert repeated or gone_back or share == "small"
        assert (gone_back > 0) == (share == "over")


FEW, DIM = 100, 4
IDS, OFFSETS = torch.tensor([3, 5, 3]), torch.tensor([0, 2, 3])


@pytest.mark.parametrize("ddr", ["4MiB", "440KiB"])
def test_what_was_staged_in_a_pool_that_a_new_table_replaced_is_staged_anew(tmp_path, monkeypatch, ddr):
    """A prefetch thread has brought rows in and not yet said that it holds them, when the pool is replaced."""
    with tierstore.open(tmp_path / "store", ddr=ddr) as store:
        made: dict[str, Any] = {"num_embeddings": FEW, "embedding_dim": DIM, "optimizer": tierstore.optim.SGD(lr=1.0)}
        table = store.create_table(tierstore.TableConfig(name="t", **made))
        table.write(torch.arange(FEW), torch.arange(FEW * DIM, dtype=torch.float32).reshape(FEW, DIM))
        expected = table.pooled(IDS, OFFSETS)
        lookup = table.lookup(table.jagged(IDS, OFFSETS, mode="sum"), mode="sum")
        with monkeypatch.context() as patch:
            patch.setattr(Pins, "hold", lambda _self, lease: lease.release() is None)
            lookup.stage()
        store.create_table(tierstore.TableConfig(name="u", **made))
        out = torch.empty(2, DIM)
        lookup.forward(out, keep=True)
        assert torch.equal(out, expected)
        lookup.readied(torch.ones(2, DIM)).train()
        table.pool.cache.check_integrity()
        assert torch.equal(table.pooled(IDS, OFFSETS), expected - torch.tensor([[3.0], [2.0]]))
        assert not table.pool.in_use

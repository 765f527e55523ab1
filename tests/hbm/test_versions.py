"""Versions, whole tables in and out, and trouble, with the newest rows in device memory."""

import gc
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.gate import Gate
from tests.hbm.stores import (
    ALL,
    LEAST,
    ROWS,
    bits,
    config,
    hot,
    jagged,
    open_store,
    put,
    shown,
    step,
)
from tierstore import optim
from tierstore.errors import ChecksumError, DiskFullError, PartlyTrainedError
from tierstore.exchange.rows import read_rows
from tierstore.pool import Pool

# Versions


@pytest.mark.parametrize("point", ["write-back: segments put", "commit: frozen rows written"])
def test_a_version_shows_what_was_there_when_it_was_asked_for(store_dir: Path, gate: Gate, point: str) -> None:
    """Rows change, go down into host memory and are read again while the writer of the version stands still."""
    with open_store(store_dir, keep=3) as store:
        put(store, ALL, 1.0)
        assert store.commit() == 1
        put(store, ALL[:300], 2.0)
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        out = bag(ALL[:10], torch.tensor([0]))
        gate.close(point)
        pending = store.commit_async()
        assert gate.reached.wait(60)
        out.sum().backward()
        put(store, ALL[295:305], 4.0)  # with those above, fewer than the outbox holds
        store["t"].read(ALL[400:])
        expected = torch.tensor([1.0] * 10 + [2.0] * 285 + [4.0] * 10 + [1.0] * 295)
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)
        gate.open()
        assert pending.result(60) == 2
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)
        store.commit()
    assert (shown(store_dir, 1) == 1.0).all()
    assert torch.equal(shown(store_dir, 2)[:, 0], torch.tensor([2.0] * 300 + [1.0] * 300))
    assert torch.equal(shown(store_dir)[:, 0], expected)


# Whole tables in and out


# Trouble


class Trouble:
    """Once armed, one call fails: rows on their way up or down, or on their way to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: Pool, cold: Any, seed: int) -> None:
        self._random = random.Random(seed)
        self._left = -1
        self.raised = 0
        below = pool.transfers
        for owner, name, error in (
            (below, "take", ChecksumError), (below, "put", KeyboardInterrupt), (cold, "write", DiskFullError)
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name), error))

    def _failing(self, real: Callable[..., Any], error: type[BaseException]) -> Callable[..., Any]:
        def maybe(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.raised += 1
                raise error("trouble")
            return real(*arguments, **named)

        return maybe

    def arm(self) -> None:
        self._left = self._random.randrange(1, 10)

    def until_it_works(self, action: Callable[[], Any]) -> Any:
        while True:
            self.arm()
            try:
                return action()
            except (ChecksumError, KeyboardInterrupt, DiskFullError) as error:
                if "trouble" not in str(error):
                    raise
                if self._random.random() < 0.5:
                    self._left = -1
                    return action()
            finally:
                self._left = -1


def test_training_through_trouble_ends_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, reading and committing fail, and are tried again; a backward repeated would count twice, so those do
    not."""
    ended = []
    for hbm in (0, LEAST):
        directory = tmp_path / str(hbm)
        table = config(optimizer=optim.Adam(lr=0.1))
        settings: dict[str, Any] = {"ddr": "404KiB", "policy": "lru"} if hbm else {}
        with open_store(directory, table, hbm=hbm, **settings) as store:
            trouble = Trouble(monkeypatch, store["t"].pool, store._cold, 0) if hbm else None
            attempt = (lambda action: action()) if trouble is None else trouble.until_it_works
            order = np.random.default_rng(3)
            bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum", include_last_offset=True)
            for number in range(10):
                batch = jagged(order, 30, 10)
                out = attempt(partial(bag, *batch))
                (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
                ended.append(attempt(partial(store["t"].read, ALL)))
                if number % 5 == 4:
                    attempt(store.commit)
                if trouble is not None:
                    hot(store).check_integrity()
                    gc.collect()  # what a failed forward left in its traceback
                    assert not store["t"].pool.in_use
            assert trouble is None or trouble.raised > 5
        monkeypatch.undo()
        ended.append(shown(directory))
    for one, other in zip(ended[:11], ended[11:], strict=True):
        assert torch.equal(one, other)


def test_a_backward_that_fails_leaves_the_last_commit_to_go_back_to(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(store_dir, config(optimizer=optim.Adam(lr=0.1))) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        step(bag, ALL)
        store.commit()
        saved, state = read_rows(store["t"], 0, ROWS), store["t"].state
        for _ in range(2):
            trouble = Trouble(monkeypatch, store["t"].pool, store._cold, 0)
            out = bag(ALL, torch.arange(0, ROWS, 5))
            trouble.arm()
            with pytest.raises(PartlyTrainedError, match="trouble") as failed:
                out.sum().backward()
            assert isinstance(failed.value.__cause__, (ChecksumError, KeyboardInterrupt))
            del out, failed
            gc.collect()
            assert not store["t"].pool.in_use
            hot(store).check_integrity()
            store["t"].read(ALL)
            with pytest.raises(PartlyTrainedError, match="trouble"):
                store.commit()
            store.rollback(1)
            monkeypatch.undo()
            assert store["t"].state == state
            assert bits(store["t"].read(ALL)) == bits(saved.weights)
            assert bits(read_rows(store["t"], 0, ROWS).state) == bits(saved.state)

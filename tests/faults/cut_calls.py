"""A store whose calls are cut short at drawn instants, beside the values that its rows must have.

A row's columns are all equal, so a row that is half one thing and half another shows. After a call that was cut short
each row must be as it was before, or as the call leaves it; from then on it must be what it was seen to be. After a
commit that returned, and after any reopening, rows must be those of the version.
"""

import gc
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.errors import TierstoreError

from .cutter import KINDS, Cutter

__all__ = ["Wrong", "error_of", "live"]

_FULL: Final = 300, 8
_WIDE: Final = 900, 256
TIERS: Final[dict[str, tuple[tuple[int, int], dict[str, Any]]]] = {
    "all rows in memory": (_FULL, {"ddr": "4MiB"}),
    "LRU over SSD": (_WIDE, {"ddr": "1MiB", "policy": "lru"}),
    "TinyLFU over SSD": (_WIDE, {"ddr": "1MiB", "policy": "tinylfu"}),
    "device memory over all rows": (_FULL, {"ddr": "4MiB", "hbm": "12KiB", "device": "cpu"}),
    "device memory over LRU": (_WIDE, {"ddr": "2MiB", "hbm": "600KiB", "device": "cpu", "policy": "lru"}),
    "all rows in device memory": (_FULL, {"ddr": "4MiB", "hbm": "64MiB", "device": "cpu"}),
}
"""Rows and columns, and settings of ``tierstore.open``."""
_CALLS: Final = ("read", "look up", "write", "train", "train", "prefetch", "commit", "commit later")
_OTHER_THREADS: Final = ("prefetch", "commit", "commit later")
_CALLS_A_LIFE: Final = 40
_EXPECTED: Final = (type(None), TierstoreError, MemoryError, OSError, RuntimeError)
_PATIENCE_SECONDS: Final = 10.0


class Wrong(Exception):
    """Something is not as it must be after a call was cut short."""


def error_of(call: Callable[[], Any]) -> BaseException | None:
    """What a call raised, without its frames, which would keep rows in use."""
    try:
        call()
    except Wrong:
        raise
    except BaseException as error:
        return error.with_traceback(None)
    return None


class _Life:
    def __init__(self, folder: Path, tiers: str, seed: int, tally: Counter[str], cutter: Cutter) -> None:
        (rows, dim), settings = TIERS[tiers]
        self._folder, self._name, self._tally, self._cutter = folder, f"{tiers}, seed {seed}", tally, cutter
        self._settings = {"threads": 1, "keep": 2} | settings
        zero, counting = tierstore.init.Constant(0.0), optim.SGD(lr=1.0)
        self._config = tierstore.TableConfig(
            name="t", num_embeddings=rows, embedding_dim=dim, init=zero, optimizer=counting
        )
        self._all, self._now = torch.arange(rows), torch.zeros(rows)
        self.random, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self._versions: dict[int, Tensor] = {0: self._now.clone()}
        self._durable = 0
        self._lengths: dict[tuple[str, str, bool], int] = {}
        self._open()

    def _open(self) -> None:
        self.store = tierstore.open(self._folder, **self._settings)
        self._table = self.store.create_table(self._config)
        self._bag = tierstore.TieredEmbeddingBag(self._table, mode="sum")

    def reopen(self) -> None:
        """Close it, and compare what the version shows, to a reader and to the next writer."""
        error = error_of(self.store.close)
        self._require(isinstance(error, _EXPECTED), f"close: {error!r}")
        del self.store, self._table, self._bag
        gc.collect()
        with tierstore.open(self._folder, mode="r", ddr="64MiB") as reader:
            shown = self._versions[reader.version]
            self._compare(reader["t"].read(self._all), shown, shown, f"version {reader.version} reopened")
        self._open()
        # It goes back to the last anchor, which may be before a version that a reader saw.
        version = self.store.version
        self._require(version >= self._durable, f"version {self._durable} is gone, version {version} is there")
        self._now = self._versions[version].clone()
        self._look(self._now, self._now, "opened again")

    # Calls

    def _ids(self) -> Tensor:
        count = self.random.choice([1, 5, 40, 150])
        return torch.randint(len(self._all), (count,), generator=self._generator)

    def _draw(self) -> tuple[str, Callable[[], Any], Tensor]:
        """A call, and the rows as it leaves them."""
        name = self.random.choice(_CALLS)
        store, table, bag, ids, after = self.store, self._table, self._bag, self._ids(), self._now.clone()
        dim, now, batches = table.config.embedding_dim, self._now[ids], [ids.view(-1, 1)]
        if name == "write":
            after[ids] = float(self.random.randrange(1 << 20))
        elif name == "prefetch":
            batches = [self._ids().view(-1, 1) for _ in range(3)]
        if name in ("train", "prefetch"):
            after -= torch.bincount(torch.cat(batches).flatten(), minlength=len(after))
        if name in ("commit", "commit later"):
            self._versions[store._catalog.epoch] = after
        values = after[ids, None].expand(-1, dim)

        def expect(found: Tensor) -> None:
            self._compare(found, now, now, "a call's result")

        def look_up() -> None:
            with torch.no_grad():
                expect(bag(batches[0]))

        def prefetch() -> None:
            for batch in tierstore.prefetch(batches, bag, depth=1):
                bag(batch).sum().backward()

        def commit() -> None:
            self._durable = store.commit()

        def commit_later() -> None:
            # An update comes while the version is written, and another commit waits for it.
            pending = store.commit_async()
            table.write(ids, now[:, None].expand(-1, dim))
            self._durable = pending.result()

        calls: dict[str, Callable[[], Any]] = {
            "read": lambda: expect(table.read(ids)),
            "look up": look_up,
            "write": lambda: table.write(ids, values),
            "train": lambda: bag(batches[0]).sum().backward(),
            "prefetch": prefetch,
            "commit": commit,
            "commit later": commit_later,
        }
        return name, calls[name], after

    def cut_one(self) -> None:
        """Make a call, cut it short, and look at all rows."""
        name, call, after = self._draw()
        kind = self.random.choice(KINDS)
        in_main = kind == "signal" or self.random.random() < 0.7 or name not in _OTHER_THREADS
        length = self._lengths.setdefault((name, kind, in_main), 400)
        instant = 1 + int(length * self.random.random() ** self.random.choice([1, 1, 3]))
        seen, error = self._cutter.run(call, kind=kind, instant=instant, in_main=in_main)
        if isinstance(error, Wrong):
            raise error
        is_cut = seen >= instant
        if not is_cut:
            self._lengths[name, kind, in_main] = max(1, seen)
        elif instant > 0.9 * length:
            self._lengths[name, kind, in_main] = length + length // 4 + 1
        self._tally["cut"] += is_cut
        self._tally["raised"] += error is not None
        where = f"{name} cut by {kind} at {self._cutter.place}: {error!r}"
        before = after if error is None and not is_cut else self._now
        error = None
        self._look(before, after, where)

    # Looking

    def _look(self, before: Tensor, after: Tensor, where: str) -> None:
        """Whether all rows are as they were before or after a call, and nobody uses one."""
        try:
            rows = self._table.read(self._all)
            self._compare(rows, before, after, where)
            self._now = rows[:, 0].clone()
            self._require_whole(where)
        except TierstoreError as error:
            if "open it again" not in str(error) or "cut by disk" not in where:  # a failed sync is final
                raise Wrong(f"{self._name}: {where}") from error
        else:
            return
        self.reopen()

    def _require_whole(self, where: str) -> None:
        pool = self._table.pool
        error_of(self.store._commits.end_pending)  # what is being written is pinned
        with pool.arena.lock:
            pool.cache.check_integrity()
        if pool.tier.on_device:
            pool.tier.check_integrity()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while pool.in_use and time.monotonic() < deadline:
            gc.collect()  # the error and what it was raised in may refer to each other
            time.sleep(0.01)  # a thread that read ahead lets go of its rows when it is done
        num_pinned = pool.pins.num_pinned + pool.pins.num_held + pool.tier.num_leased
        self._require(num_pinned == 0, f"{where}: {num_pinned} slots stay pinned")

    def _compare(self, rows: Tensor, one: Tensor, other: Tensor, where: str) -> None:
        is_right = (rows == one[:, None]) | (rows == other[:, None])
        if where.startswith("prefetch"):  # some of its steps
            least, most = torch.minimum(one, other)[:, None], torch.maximum(one, other)[:, None]
            is_right = (rows >= least) & (rows <= most) & (rows == rows.round())
        wrong = (~(is_right.all(1) & (rows == rows[:, :1]).all(1))).nonzero().flatten().tolist()
        self._require(not wrong, f"{where}: {len(wrong)} rows are wrong; the first is {wrong[:1]}")

    def _require(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise Wrong(f"{self._name}: {text}")


def live(folder: Path, *, cuts: int, seed: int) -> Counter[str]:
    """Cut about so many calls short, over all tiers in turn: how many were "cut", and how many calls "raised".
    Deterministic, but for the turns of threads."""
    tally, cutter, number = Counter[str](), Cutter(), 0
    gc.collect()
    gc.freeze()  # what was there before is not looked at again and again
    with cutter.installed():
        while tally["cut"] < cuts:
            for tiers in TIERS:
                life = _Life(folder / f"{number}", tiers, seed + number, tally, cutter)
                target = min(tally["cut"] + min(_CALLS_A_LIFE, -(-cuts // len(TIERS))), cuts + len(TIERS))
                while tally["cut"] < target:
                    life.cut_one()
                    if life.random.random() < 0.04:
                        life.reopen()
                life.reopen()
                life.store.close()
                shutil.rmtree(folder / f"{number}")
                number += 1
    return tally

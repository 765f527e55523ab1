"""A store whose calls are cut short, beside the values that its rows must have.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import tierstore
from tierstore import optim

from ..common import Counts
from .instants import KINDS, Cutter

__all__ = ["TIERS", "Found", "live"]

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
_CALLS_A_LIFE: Final = 40
_EXPECTED: Final = (type(None), tierstore.errors.TierstoreError, MemoryError, OSError, RuntimeError)
_PATIENCE_SECONDS: Final = 10.0
_LOOKING: Final = "opened again"


@dataclass
class Found(Counts):
    """What was found.

    Attributes:
        cuts: calls cut short, by what raised; tried: by call; raised: of those, calls that raised.
        reopened: stores opened again, and their rows compared.
        wrong_rows: rows that had no value that they may have.
        pinned: times that slots stayed pinned, or bookkeeping was not whole.
        stopped: stores that said, "open it again".
        failures: in words.
    """

    cuts: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    raised: int = 0
    reopened: int = 0
    wrong_rows: int = 0
    pinned: int = 0
    stopped: int = 0
    failures: list[str] = field(default_factory=list)


class _Life:
    def __init__(self, folder: Path, tiers: str, seed: int, found: Found, cutter: Cutter) -> None:
        shape, settings = TIERS[tiers]
        self._name = f"{tiers}, seed {seed}"
        self._folder = folder
        self._settings = {"threads": 1, "keep": 2} | settings
        rows, dim = shape
        zero, counting = tierstore.init.Constant(0.0), optim.SGD(lr=1.0)
        self._config = tierstore.TableConfig(
            name="t", num_embeddings=rows, embedding_dim=dim, init=zero, optimizer=counting
        )
        self._all = torch.arange(rows)
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._found = found
        self._cutter = cutter
        self._now = torch.zeros(len(self._all))
        self._versions: dict[int, Tensor] = {0: self._now.clone()}
        self._durable = 0
        self._lengths: dict[tuple[str, str, bool], int] = {}
        self._open()

    # The store

    def _open(self) -> None:
        self._store = tierstore.open(self._folder, **self._settings)
        self._table = self._store.create_table(self._config)
        self._bag = tierstore.TieredEmbeddingBag(self._table, mode="sum")

    def reopen(self) -> None:
        """Close it, and compare what the version shows, to a reader and to the next writer."""
        error = _error_of(self._store.close)
        if not isinstance(error, _EXPECTED):
            self._fail(f"close: {error!r}")
        del self._store, self._table, self._bag
        gc.collect()
        with tierstore.open(self._folder, mode="r", ddr="64MiB") as reader:
            shown = self._versions[reader.version]
            self._compare(reader["t"].read(self._all), shown, shown, f"version {reader.version} reopened")
        self._open()
        # It goes back to the last anchor, which may be before a version that a reader saw.
        if self._store.version < self._durable:
            self._fail(f"version {self._durable} is gone, version {self._store.version} is there")
        self._now = self._versions[self._store.version].clone()
        self._found.reopened += 1
        self.look()

    # Calls

    def _ids(self) -> Tensor:
        count = self._random.choice([1, 5, 40, 150])
        return torch.randint(len(self._all), (count,), generator=self._generator)

    def _draw(self) -> tuple[str, Callable[[], Any], Tensor]:
        """A call, and the rows as it leaves them."""
        name = self._random.choice(["read", "look up", "write", "train", "train", "prefetch", "commit", "commit later"])
        store, table, bag, ids, after = self._store, self._table, self._bag, self._ids(), self._now.clone()
        dim, now = table.config.embedding_dim, self._now[ids]
        batches = [ids.view(-1, 1)]
        if name == "write":
            after[ids] = float(self._random.randrange(1 << 20))
        elif name == "prefetch":
            batches = [self._ids().view(-1, 1) for _ in range(3)]
        if name in ("train", "prefetch"):
            after -= torch.bincount(torch.cat(batches).flatten(), minlength=len(after))
        if name in ("commit", "commit later"):
            self._versions[store._catalog.epoch] = after
        values = after[ids, None].expand(-1, dim)

        def look_up() -> None:
            with torch.no_grad():
                self._expect(bag(batches[0]), now)

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
            "read": lambda: self._expect(table.read(ids), now),
            "look up": look_up,
            "write": lambda: table.write(ids, values),
            "train": lambda: bag(batches[0]).sum().backward(),
            "prefetch": prefetch,
            "commit": commit,
            "commit later": commit_later,
        }
        return name, calls[name], after

    def _expect(self, found: Tensor, values: Tensor) -> None:
        self._compare(found, values, values, "a call's result")

    def cut_one(self) -> None:
        """Make a call, cut it short, and look at all rows."""
        name, call, after = self._draw()
        kind = self._random.choice(KINDS)
        in_main = kind == "signal" or self._random.random() < 0.7 or name not in ("prefetch", "commit", "commit later")
        length = self._lengths.setdefault((name, kind, in_main), 400)
        instant = 1 + int(length * self._random.random() ** self._random.choice([1, 1, 3]))
        before = self._now
        seen, error = self._cutter.run(call, kind=kind, instant=instant, in_main=in_main)
        is_cut = seen >= instant
        if not is_cut:
            self._lengths[name, kind, in_main] = max(1, seen)
        elif instant > 0.9 * length:
            self._lengths[name, kind, in_main] = length + length // 4 + 1
        self._found.tried[name] += is_cut
        self._found.cuts[kind] += is_cut
        self._found.raised += error is not None
        where = f"{name} cut by {kind} at {self._cutter.place}: {error!r}"
        if error is None and not is_cut:
            before = after
        error = None
        self._look_again(before, after, where)

    def _look_again(self, before: Tensor, after: Tensor, where: str) -> None:
        try:
            self._check(before, after, where)
        except tierstore.errors.TierstoreError as error:
            if "open it again" not in str(error) or "cut by disk" not in where:  # a failed sync is final
                raise RuntimeError(f"{self._name}: {where}") from error
        else:
            return
        self._found.stopped += 1
        self.reopen()

    def _check(self, before: Tensor, after: Tensor, where: str) -> None:
        rows = self._table.read(self._all)
        self._compare(rows, before, after, where)
        self._now = rows[:, 0].clone()
        self._found_whole(where)

    def look(self) -> None:
        """All rows are as they were, and nobody uses one."""
        self._look_again(self._now, self._now, _LOOKING)

    def _found_whole(self, where: str) -> None:
        pool = self._table.pool
        _error_of(self._store._commits.end_pending)  # what is being written is pinned
        try:
            with pool.arena.lock:
                pool.cache.check_integrity()
            if pool.tier.on_device:
                pool.tier.check_integrity()
        except AssertionError as error:
            self._found.pinned += 1
            self._fail(f"{where}: {error}")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while pool.in_use and time.monotonic() < deadline:
            gc.collect()  # the error and what it was raised in may refer to each other
            time.sleep(0.01)  # a thread that read ahead lets go of its rows when it is done
        num_pinned = pool.pins.num_pinned + pool.pins.num_held + pool.tier.num_leased
        if num_pinned:
            self._found.pinned += 1
            self._fail(f"{where}: {num_pinned} slots stay pinned")

    def _compare(self, rows: Tensor, one: Tensor, other: Tensor, where: str) -> None:
        least, most = torch.minimum(one, other)[:, None], torch.maximum(one, other)[:, None]
        is_right = (rows == one[:, None]) | (rows == other[:, None])
        if where.startswith("prefetch"):  # some of its steps
            is_right = (rows >= least) & (rows <= most) & (rows == rows.round())
        is_right = is_right.all(1) & (rows == rows[:, :1]).all(1)
        wrong = (~is_right).nonzero().flatten().tolist()
        if wrong:
            self._found.wrong_rows += len(wrong)
            row = wrong[0]
            read = f"the first, {row}, reads {rows[row, :3].tolist()}, not {one[row]} or {other[row]}"
            self._fail(f"{where}: {len(wrong)} rows are wrong; {read}")

    def _fail(self, text: str) -> None:
        self._found.failures.append(f"{self._name}: {text}")


def _error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    return None


def live(folder: Path, *, cuts: int, seed: int, found: Found | None = None) -> Found:
    """Cut about so many calls short, over all tiers in turn. Deterministic, but for the turns of threads."""
    found = Found() if found is None else found
    cutter, number = Cutter(), 0
    gc.collect()
    gc.freeze()  # what was there before is not looked at again and again
    with cutter.installed():
        while found.cuts.total() < cuts and len(found.failures) < 20:
            for tiers in TIERS:
                place = folder / f"{number}"
                life = _Life(place, tiers, seed + number, found, cutter)
                target = min(found.cuts.total() + min(_CALLS_A_LIFE, -(-cuts // len(TIERS))), cuts + len(TIERS))
                while found.cuts.total() < target:
                    life.cut_one()
                    if life._random.random() < 0.04:
                        life.reopen()
                life.reopen()
                life._store.close()
                shutil.rmtree(place)
                number += 1
    return found

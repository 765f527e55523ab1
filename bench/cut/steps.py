"""A store whose commits, changes of tables and copies are cut short between any two of their steps.

An error comes at a named step (``tierstore/system/killpoints.py``), or at a drawn instant. Afterwards the store, still
open, must show what it showed before the call or what the call makes, with the tables that are on disk; the call and a
commit must then work. A copy of its directory, as a killed process leaves it, must open at the last version that a
commit said is durable, or at the one that the error names, with exactly the rows of that.
"""

import gc
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.dist.reshard import reshard
from tierstore.system import killpoints

from ..crash.life import watch_names
from .instants import Cutter
from .life import Found

__all__ = ["ERRORS", "live"]

ERRORS: Final[dict[str, Callable[[], BaseException]]] = {
    "memory": lambda: MemoryError("no memory"),
    "disk": lambda: OSError(28, "No space left on device"),
    "ctrl-c": KeyboardInterrupt,
}
_CALLS_A_LIFE: Final = 25
_ROWS: Final = 200
_DIM: Final = 8

Rows = dict[str, Tensor]
"""A value for each row, by table: all columns of a row are equal."""


class _Life:
    def __init__(self, folder: Path, seed: int, found: Found, cutter: Cutter) -> None:
        self._folder = folder / "store"
        self._scratch = folder / "copy"
        self._random = random.Random(seed)
        self._name = f"steps, seed {seed}"
        self._found = found
        self._cutter = cutter
        self._now: Rows = {}
        self._versions: dict[int, Rows] = {0: {}}
        self._made = 0
        self._open()
        for _ in range(2):
            self._create()[0]()
        self._now = {name: torch.zeros(_ROWS) for name in self._store.tables}
        self._commit()

    def _open(self) -> None:
        self._store = tierstore.open(self._folder, ddr="4MiB", threads=1, keep=2)

    def close(self) -> None:
        self._store.close()

    # Calls, each with what it leaves

    def _write(self) -> None:
        for name, values in self._now.items():
            rows = torch.tensor(self._random.sample(range(len(values)), 20))
            values[rows] = float(self._random.randrange(1 << 20))
            self._store[name].write(rows, values[rows, None].expand(-1, _DIM))

    def _commit(self) -> None:
        self._note_version(self._now)
        self._durable = self._store.commit()

    def _note_version(self, rows: Rows) -> None:
        self._versions[self._store._catalog.epoch] = {name: values.clone() for name, values in rows.items()}

    def _create(self) -> tuple[Callable[[], Any], Rows]:
        self._made += 1
        config = tierstore.TableConfig(
            name=f"t{self._made}", num_embeddings=_ROWS, embedding_dim=_DIM, init=tierstore.init.Constant(0.0)
        )
        return lambda: self._store.create_table(config), self._now | {config.name: torch.zeros(_ROWS)}

    def _change(self) -> tuple[Callable[[], Any], Rows]:
        name = self._random.choice(list(self._now))
        rows, table = self._now[name], self._store[name]
        others = {each: values for each, values in self._now.items() if each != name}
        match self._random.randrange(3):
            case 0:
                self._made += 1
                other = f"t{self._made}"
                return lambda: self._store.change_table(name, name=other), others | {other: rows}
            case 1:
                grown = torch.cat([rows, torch.zeros(50)])
                return lambda: self._store.change_table(name, num_embeddings=len(grown)), others | {name: grown}
        rule = optim.Adagrad() if isinstance(table.config.optimizer, optim.SGD) else optim.SGD()
        self._note_version(self._now)
        return lambda: self._store.change_table(name, optimizer=rule), self._now

    def _drop(self) -> tuple[Callable[[], Any], Rows]:
        name = self._random.choice(list(self._now))
        left = {each: values for each, values in self._now.items() if each != name}
        return lambda: self._store.drop_table(name), left

    def _roll_back(self) -> tuple[Callable[[], Any], Rows]:
        self._write()
        version = self._random.choice(self._store.versions)
        return lambda: self._store.rollback(version), self._of(version)

    def _copy(self, kind: str) -> tuple[Callable[[], Any], Rows]:
        target = self._scratch.with_name(f"target{self._made}")

        def copy() -> None:
            if kind == "backup":
                self._store.backup(target)
            else:
                reshard(self._folder, target, plan=None, num_ranks=2, progress=lambda *_: None)
            with tierstore.open(target, mode="r", ddr="4MiB", threads=1) as made:
                self._compare(made, self._of(made.version), f"of a {kind}")
            shutil.rmtree(target)

        return copy, self._now

    def _draw(self) -> tuple[str, Callable[[], Any], Rows]:
        kind = self._random.choice(["commit", "commit", "create", "change", "drop", "roll back", "backup", "reshard"])
        if kind == "drop" and len(self._now) < 3:
            kind = "create"
        if kind == "commit":
            self._write()
            self._note_version(self._now)
            return kind, self._store.commit, self._now
        draws = {"create": self._create, "change": self._change, "drop": self._drop, "roll back": self._roll_back}
        return kind, *(draws[kind]() if kind in draws else self._copy(kind))

    # Cutting them short

    def cut_one(self, number: int) -> None:
        kind, call, after = self._draw()
        before, epoch = self._now, self._store._catalog.epoch
        what, is_step = self._random.choice(list(ERRORS)), number % 3 > 0
        where, error = self._at_step(call, what) if is_step else self._at_instant(call, what)
        self._found.tried[kind] += bool(where)
        self._found.cuts[what] += bool(where)
        self._found.raised += error is not None
        said = f"{kind} cut by {what} at {where or 'no step'}: {error!r} {getattr(error, '__notes__', '')}"
        allowed = [after] if error is None else [after, before, self._of(self._durable)]
        if error is not None and "open it again" in str(error) and not is_step:
            self._found.stopped += 1  # the device failed to sync
            self._reopen(said, allowed)
        else:
            self._look(said, allowed)
            self._look_as_killed(said, named=error is None or not is_step or f"version {epoch}" in said)
        for path in self._folder.parent.glob("target*"):
            if kind != "reshard" or (path / "manifest.json").exists() or list(path.glob("*-of-*")):
                self._fail(f"{said}: {sorted(os.listdir(path))} is left")
            shutil.rmtree(path)
        if error is not None and kind not in ("commit", "roll back") and self._now.keys() == before.keys():
            self._commit()
            self._note_version(self._now)  # another optimizer commits
            call()  # of no effect if the table was made or changed
            self._durable = self._store.version
            self._look(f"the call after {said}", [after])
        self._write()
        self._commit()
        self._look(f"the commit after {said}", [self._now])
        self._look_as_killed(f"the commit after {said}", named=False)

    def _at_step(self, call: Callable[[], Any], what: str) -> tuple[str, BaseException | None]:
        """Make the call, and raise as it reaches a drawn step: a low one, or else one of a longer list."""
        left, reached = self._random.choice([self._random.randrange(1, 6), self._random.randrange(1, 26)]), ""

        def hook(step: str) -> None:
            nonlocal left, reached
            left -= 1
            if left == 0:
                reached = step
                raise ERRORS[what]()

        calls = os.link, os.rename, os.replace
        killpoints.hook = hook
        watch_names(hook)
        try:
            error = _error_of(call)
            return reached, error
        finally:
            killpoints.hook = None
            os.link, os.rename, os.replace = calls

    def _at_instant(self, call: Callable[[], Any], what: str) -> tuple[str, BaseException | None]:
        instant, in_main = self._random.randrange(1, 1500), self._random.random() < 0.7
        kind = what if what in ("memory", "disk") else "memory"
        seen, error = self._cutter.run(call, kind=kind, instant=instant, in_main=in_main)
        return self._cutter.place if seen >= instant else "", error

    # Looking

    def _of(self, version: int) -> Rows:
        """What a version shows of the tables that there are."""
        found = self._versions[version]
        return {name: found.get(name, torch.zeros(len(values))) for name, values in self._now.items()}

    def _look(self, said: str, allowed: list[Rows]) -> None:
        """Whether the store shows one of these; that is what it must show from then on."""
        gc.collect()
        before, tables = self._now, dict(self._store.tables)
        shown = {name: table.read(torch.arange(table.config.num_embeddings)) for name, table in tables.items()}
        for rows in allowed:
            if shown.keys() == rows.keys() and all(_are(shown[name], values) for name, values in rows.items()):
                self._now = {name: values.clone() for name, values in rows.items()}
                break
        else:
            self._found.wrong_rows += 1
            self._fail(f"{said}: wrong rows, or tables: {list(shown)}, not one of {[list(each) for each in allowed]}")
            self._now = {name: rows[:, 0].clone() for name, rows in shown.items()}
        gone, new = before.keys() - self._now.keys(), self._now.keys() - before.keys()
        if len(gone) == len(new) == 1:  # another name
            for each in self._versions.values():
                if (values := each.pop(min(gone), None)) is not None:
                    each[min(new)] = values
        if said.startswith("roll back"):
            self._durable = self._store.version
        if self._store.version not in (self._durable, max(self._versions)):
            self._fail(f"{said}: version {self._store.version}, not {self._durable}")

    def _look_as_killed(self, said: str, *, named: bool) -> None:
        shutil.copytree(self._folder, self._scratch)
        with tierstore.open(self._scratch, ddr="4MiB", threads=1) as store:
            if list(store.tables) != list(self._store.tables):
                self._fail(f"{said}: a killed process leaves tables {list(store.tables)}")
            if store.version < self._durable or (store.version > self._durable and not named):
                self._fail(f"{said}: a killed process leaves version {store.version}, not {self._durable}")
            self._compare(store, self._of(store.version), said)
        self._found.reopened += 1
        shutil.rmtree(self._scratch)

    def _compare(self, store: tierstore.Store, rows: Rows, said: str) -> None:
        for name, table in store.tables.items():
            if not _are(table.read(torch.arange(table.config.num_embeddings)), rows[name]):
                self._found.wrong_rows += 1
                self._fail(f"{said}: version {store.version} of {name} has wrong rows")

    def _reopen(self, said: str, allowed: list[Rows]) -> None:
        _error_of(self._store.close)
        self._open()
        self._look(said, [*allowed, self._of(self._store.version)])
        self._durable = self._store.version

    def _fail(self, text: str) -> None:
        self._found.failures.append(f"{self._name}: {text}")


def _are(rows: Tensor, values: Tensor) -> bool:
    """Whether rows have these values; those behind the last were never written."""
    missing = len(rows) - len(values)
    return missing >= 0 and torch.equal(rows, torch.cat([values, torch.zeros(missing)])[:, None].expand(-1, _DIM))


def _error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error.with_traceback(None)
    return None


def live(folder: Path, *, cuts: int, seed: int, found: Found | None = None) -> Found:
    """Cut about so many calls short."""
    found, cutter, number = Found() if found is None else found, Cutter(), 0
    with cutter.installed():
        while found.cuts.total() < cuts and len(found.failures) < 20:
            life = _Life(folder / f"{number}", seed + number, found, cutter)
            target = min(found.cuts.total() + _CALLS_A_LIFE, cuts)
            while found.cuts.total() < target and len(found.failures) < 20:
                life.cut_one(number := number + 1)
            life.close()
            shutil.rmtree(folder / f"{number}", ignore_errors=True)
    return found

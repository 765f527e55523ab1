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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import tierstore
from tierstore import optim
from tierstore.dist.reshard import reshard
from tierstore.system import killpoints

from .cut_calls import Wrong, error_of
from .cutter import Cutter
from .training_run import watch_names

__all__ = ["live"]

ERRORS: Final[dict[str, Callable[[], BaseException]]] = {
    "memory": lambda: MemoryError("no memory"),
    "disk": lambda: OSError(28, "No space left on device"),
    "ctrl-c": KeyboardInterrupt,
}
_KINDS: Final = ("commit", "commit", "create", "change", "drop", "roll back", "backup", "reshard")
_CALLS_A_LIFE: Final = 25
_DIM: Final = 8

Rows = dict[str, dict[int, float]]
"""By table, the rows that are not zero: all columns of a row are equal."""


class _Life:
    def __init__(self, folder: Path, seed: int, tally: Counter[str], cutter: Cutter) -> None:
        self._folder, self._scratch = folder / "store", folder / "copy"
        self._random, self._name = random.Random(seed), f"steps, seed {seed}"
        self._tally, self._cutter = tally, cutter
        self._now: Rows = {}
        self._versions: dict[int, Rows] = {0: {}}
        self._made = 0
        self._open()
        for _ in range(2):
            call, self._now = self._create()
            call()
        self._commit()

    def _open(self) -> None:
        self.store = tierstore.open(self._folder, ddr="4MiB", threads=1, keep=2)

    # Calls, each with what it leaves

    def _write(self) -> None:
        for name, values in self._now.items():
            rows = self._random.sample(range(self.store[name].config.num_embeddings), 20)
            value = float(self._random.randrange(1, 1 << 20))
            self._now = self._now | {name: values | dict.fromkeys(rows, value)}
            self.store[name].write(torch.tensor(rows), torch.full((len(rows), _DIM), value))

    def _commit(self) -> None:
        self._note_version()
        self._durable = self.store.commit()

    def _note_version(self) -> None:
        self._versions[self.store._catalog.epoch] = self._now

    def _create(self) -> tuple[Callable[[], Any], Rows]:
        self._made += 1
        zero = tierstore.init.Constant(0.0)
        config = tierstore.TableConfig(name=f"t{self._made}", num_embeddings=200, embedding_dim=_DIM, init=zero)
        return lambda: self.store.create_table(config), self._now | {config.name: {}}

    def _change(self) -> tuple[Callable[[], Any], Rows]:
        """Another name, more rows, or another optimizer."""
        name = self._random.choice(list(self._now))
        config, what = self.store[name].config, self._random.randrange(3)
        if what == 0:
            self._made += 1
            other = f"t{self._made}"
            after = {other if each == name else each: rows for each, rows in self._now.items()}
            return lambda: self.store.change_table(name, name=other), after
        if what == 1:
            return lambda: self.store.change_table(name, num_embeddings=config.num_embeddings + 50), self._now
        rule = optim.Adagrad() if isinstance(config.optimizer, optim.SGD) else optim.SGD()
        self._note_version()
        return lambda: self.store.change_table(name, optimizer=rule), self._now

    def _copy(self, kind: str) -> None:
        target = self._scratch.with_name(f"target{self._made}")
        if kind == "backup":
            self.store.backup(target)
        else:
            reshard(self._folder, target, plan=None, num_ranks=2, progress=lambda *_: None)
        with tierstore.open(target, mode="r", ddr="4MiB", threads=1) as made:
            self._require(self._shown(made) == self._of(made.version), f"a {kind} has wrong rows")
        shutil.rmtree(target)

    def _draw(self) -> tuple[str, Callable[[], Any], Rows]:
        kind = self._random.choice(_KINDS)
        if kind == "create" or (kind == "drop" and len(self._now) < 3):
            return "create", *self._create()
        if kind == "change":
            return kind, *self._change()
        if kind == "drop":
            name = self._random.choice(list(self._now))
            left = {each: rows for each, rows in self._now.items() if each != name}
            return kind, lambda: self.store.drop_table(name), left
        if kind in ("commit", "roll back"):
            self._write()
        if kind == "commit":
            self._note_version()
            return kind, self.store.commit, self._now
        if kind == "roll back":
            version = self._random.choice(self.store.versions)
            return kind, lambda: self.store.rollback(version), self._of(version)
        return kind, lambda: self._copy(kind), self._now

    # Cutting them short

    def cut_one(self, number: int) -> None:
        kind, call, after = self._draw()
        before, epoch = self._now, self.store._catalog.epoch
        what, is_step = self._random.choice(list(ERRORS)), number % 3 > 0
        where, error = self._at_step(call, what) if is_step else self._at_instant(call, what)
        if isinstance(error, Wrong):
            raise error
        self._tally["cut"] += bool(where)
        self._tally["raised"] += error is not None
        said = f"{kind} cut by {what} at {where or 'no step'}: {error!r} {getattr(error, '__notes__', '')}"
        allowed = [after] if error is None else [after, before, self._of(self._durable)]
        if error is not None and "open it again" in str(error) and not is_step:  # the device failed to sync
            error_of(self.store.close)
            self._open()
            self._look(said, [*allowed, self._of(self.store.version)])
            self._durable = self.store.version
        else:
            self._look(said, allowed)
            # Another optimizer commits the rows that it moves, before the manifest names their place.
            named = error is None or not is_step or kind == "change" or f"version {epoch}" in said
            self._look_as_killed(said, named=named)
        for path in self._folder.parent.glob("target*"):
            is_part = kind == "reshard" and not (path / "manifest.json").exists() and not list(path.glob("*-of-*"))
            self._require(is_part, f"{said}: {sorted(os.listdir(path))} is left")
            shutil.rmtree(path)
        if error is not None and kind not in ("commit", "roll back") and self._now.keys() == before.keys():
            self._commit()
            self._note_version()  # another optimizer commits
            call()  # of no effect if the table was made or changed
            self._durable = self.store.version
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
            error = error_of(call)
            return reached, error
        finally:
            killpoints.hook = None
            os.link, os.rename, os.replace = calls

    def _at_instant(self, call: Callable[[], Any], what: str) -> tuple[str, BaseException | None]:
        instant, in_main = self._random.randrange(1, 1500), self._random.random() < 0.7
        kind = "disk" if what == "disk" else "memory"
        seen, error = self._cutter.run(call, kind=kind, instant=instant, in_main=in_main)
        return self._cutter.place if seen >= instant else "", error

    # Looking

    def _of(self, version: int) -> Rows:
        """What a version shows of the tables that there are."""
        return {name: self._versions[version].get(name, {}) for name in self._now}

    def _shown(self, store: tierstore.Store) -> Rows:
        found = {}
        for name, table in store.tables.items():
            rows = table.read(torch.arange(table.config.num_embeddings))
            self._require(torch.equal(rows, rows[:, :1].expand(-1, _DIM)), f"half rows in {name}")
            found[name] = {row: value for row, value in enumerate(rows[:, 0].tolist()) if value}
        return found

    def _look(self, said: str, allowed: list[Rows]) -> None:
        """Whether the store shows one of these; that is what it must show from then on."""
        gc.collect()
        before, self._now = self._now, self._shown(self.store)
        self._require(self._now in allowed, f"{said}: wrong rows, or tables: {list(self._now)}")
        gone, new = before.keys() - self._now.keys(), self._now.keys() - before.keys()
        if len(gone) == len(new) == 1:  # another name
            other = {min(gone): min(new)}
            for number, shown in self._versions.items():
                self._versions[number] = {other.get(name, name): rows for name, rows in shown.items()}
        if said.startswith("roll back"):
            self._durable = self.store.version
        is_known = self.store.version in (self._durable, max(self._versions))
        self._require(is_known, f"{said}: version {self.store.version}, not {self._durable}")

    def _look_as_killed(self, said: str, *, named: bool) -> None:
        shutil.copytree(self._folder, self._scratch)
        with tierstore.open(self._scratch, ddr="4MiB", threads=1) as store:
            is_kept = store.version == self._durable or (named and store.version > self._durable)
            self._require(is_kept, f"{said}: a killed process leaves version {store.version}, not {self._durable}")
            self._require(self._shown(store) == self._of(store.version), f"{said}: a killed process leaves wrong rows")
        shutil.rmtree(self._scratch)

    def _require(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise Wrong(f"{self._name}: {text}")


def live(folder: Path, *, cuts: int, seed: int) -> Counter[str]:
    """Cut about so many calls short: how many were "cut", and how many calls "raised"."""
    tally, cutter, number = Counter[str](), Cutter(), 0
    gc.collect()
    gc.freeze()  # what was there before is not looked at again and again
    with cutter.installed():
        while tally["cut"] < cuts:
            place = folder / f"{number}"
            life = _Life(place, seed + number, tally, cutter)
            target = min(tally["cut"] + _CALLS_A_LIFE, cuts)
            while tally["cut"] < target:
                life.cut_one(number := number + 1)
            life.store.close()
            shutil.rmtree(place)
    return tally

"""A store whose calls are cut short, beside the values that its rows must have.

An error comes at a drawn instant of a call or, where the call changes the store, at a named step of it
(``tierstore/system/killpoints.py``). A row's columns are all equal, so a row that is half one thing and half another
shows. Afterwards each row must be as it was before, or as the call leaves it; of commits, changes of tables and
rollbacks the whole store. From then on it must be what it was seen to be. After a commit that returned, and after any
reopening, rows must be those of the version. A copy of the directory, as a killed process leaves it, must open at the
last version that a commit said is durable, or at the one that the error names.

Python runs the handlers of signals, and raises what other threads ask it to, after a call of a function, at the start
of one, and at a jump backwards. Memory may be short at any call. A tracer sees each instruction of the package's code
before it runs, so it can raise at any of these, and the same one again with the same seed. Left out: the call that
leaves a ``with`` block, before which nothing is allocated and no handler runs."""

import dis
import gc
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.errors import TierstoreError
from tierstore.system import killpoints

from .training_run import watch_names

KINDS: Final = ("signal", "memory", "disk")
_PACKAGE: Final = str(Path(tierstore.__file__).parent)
_CALLS: Final = ("CALL", "CALL_FUNCTION_EX", "CALL_KW")
_BEFORE_CALLS: Final = ("PRECALL", *_CALLS)
_CHECKS: Final = (*_CALLS, "RESUME", "JUMP_BACKWARD")
_NUMBER: Final = signal.SIGUSR1


def _leaves_with(before: list[dis.Instruction]) -> bool:
    """Whether a call has the arguments of ``__exit__`` where nothing was raised."""
    return [each.opname for each in before[-3:]] == ["LOAD_CONST"] * 3 and not any(
        each.argval is not None for each in before[-3:]
    )


@cache
def _instants(code: CodeType) -> dict[int, bool]:
    """By offset: whether a handler may run before the instruction; else memory may be short at it."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> Any:
        return next((each.target for each in entries if each.start <= offset < each.end), None)

    found: dict[int, bool] = {}
    before: list[dis.Instruction] = []
    for each in dis.get_instructions(code):
        if each.opname in _BEFORE_CALLS and not (before and before[-1].opname == "PRECALL"):
            if not _leaves_with(before):
                found[each.offset] = False
        elif before and before[-1].opname in _CHECKS and handler(before[-1].offset) == handler(each.offset):
            found[each.offset] = True
        before.append(each)
    return found


class Cutter:
    """Cuts calls short, the last one at ``place``; made in the main thread, before the threads in which it is to."""

    def __init__(self) -> None:
        self._left = self._seen = 0
        self._kind = self.place = ""
        self._is_main = True
        self._is_armed = False
        self._trace: Any = self._enter
        self._kept: Final = [self._trace] * 100_000
        """CPython 3.11 now and then calls a trace function that it let go of once too often."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, threads that begin are traced while a call is to be cut short."""

        def handle(*_: object) -> None:
            raise RuntimeError("a worker was killed")  # as the handler of torch's DataLoader does

        tierstore.open(cold="memory", ddr="2MiB").close()  # starts the thread that closes dropped stores: it lives on
        before = signal.signal(_NUMBER, handle)
        threading.settrace(self._trace)
        try:
            yield
        finally:
            threading.settrace(None)
            signal.signal(_NUMBER, before)

    def run(
        self, call: Callable[[], Any], *, kind: str, instant: int, in_main: bool
    ) -> tuple[int, BaseException | None]:
        """Make a call, and raise at the instant of that number, from 1 on, in the main thread or in others.

        Returns:
            how many instants were met; and what the call raised.
        """
        self._left, self._seen, self._kind, self._is_main, self.place = instant, 0, kind, in_main, ""
        if in_main:
            sys.settrace(self._trace)
        self._is_armed = True
        try:
            call()
        except Exception as error:
            return self._seen, error
        finally:
            self._is_armed = False
            sys.settrace(None)
        return self._seen, None

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if not self._is_armed or not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if (threading.current_thread() is threading.main_thread()) is not self._is_main:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event != "opcode" or not self._is_armed:
            return self._step
        is_check = _instants(frame.f_code).get(frame.f_lasti)
        if is_check is None or (self._kind == "signal" and not is_check):
            return self._step
        self._seen += 1
        self._left -= 1
        if self._left == 0:
            file = Path(frame.f_code.co_filename).relative_to(_PACKAGE)
            self.place = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
            if self._kind == "memory":
                raise MemoryError("no memory")
            if self._kind == "disk":
                raise OSError(28, "No space left on device")
            signal.raise_signal(_NUMBER)
        return self._step


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
"""Rows and columns of a table, and settings of ``tierstore.open``. Tables are changed in the first."""
_OF_ROWS: Final = ("read", "look up", "write", "train", "train", "prefetch")
_OF_TABLES: Final = ("create", "change", "drop")
_ERRORS: Final[dict[str, Callable[[], BaseException]]] = {
    "memory": lambda: MemoryError("no memory"),
    "disk": lambda: OSError(28, "No space left on device"),
    "ctrl-c": KeyboardInterrupt,
}
_CALLS_A_LIFE: Final = 40
_EXPECTED: Final = (type(None), TierstoreError, MemoryError, OSError, RuntimeError)
_PATIENCE_SECONDS: Final = 10.0
Rows = dict[str, dict[int, float]]
"""By table, the rows that are not zero."""


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
        (self._num_rows, self._dim), settings = TIERS[tiers]
        self._folder, self._scratch = folder / "store", folder / "copy"
        self._settings = {"threads": 1, "keep": 2} | settings
        self._name, self._tally, self._cutter = f"{tiers}, seed {seed}", tally, cutter
        self._has_changes = tiers == "all rows in memory"
        self._kinds = (*_OF_ROWS, "commit", "commit later")
        if self._has_changes:
            self._kinds += ("roll back", "roll back", *_OF_TABLES)
        self.random, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self._now: Rows = {}
        self._versions: dict[int, Rows] = {0: {}}
        self._lengths: dict[tuple[str, str, bool], int] = {}
        self._durable = self._made = 0
        self._open()
        for _ in range(1 + self._has_changes):
            call, self._now = self._create()
            call()
        self._commit()

    def _open(self) -> None:
        self.store = tierstore.open(self._folder, **self._settings)

    def _note_version(self) -> None:
        self._versions[self.store._catalog.epoch] = self._now

    def _commit(self) -> None:
        self._note_version()
        self._durable = self.store.commit()

    def _commit_later(self) -> None:
        """An update comes while the version is written, and another commit waits for it."""
        self._note_version()
        pending = self.store.commit_async()
        name, rows = next(iter(self._now.items()))
        for row, value in [*rows.items()][:3]:
            self.store[name].write(torch.tensor([row]), torch.full((1, self._dim), value))
        self._durable = pending.result()

    def _create(self) -> tuple[Callable[[], Any], Rows]:
        self._made += 1
        config = tierstore.TableConfig(
            name=f"t{self._made}", num_embeddings=self._num_rows, embedding_dim=self._dim,
            init=tierstore.init.Constant(0.0), optimizer=optim.SGD(lr=1.0),
        )  # fmt: skip
        return lambda: self.store.create_table(config), self._now | {config.name: {}}

    def _change(self) -> tuple[Callable[[], Any], Rows]:
        name = self.random.choice(list(self._now))
        config, what = self.store[name].config, self.random.randrange(3)
        if what == 0:
            self._made += 1
            other = f"t{self._made}"
            after = {other if each == name else each: rows for each, rows in self._now.items()}
            return lambda: self.store.change_table(name, name=other), after
        if what == 1:
            return lambda: self.store.change_table(name, num_embeddings=config.num_embeddings + 50), self._now
        return lambda: self.store.change_table(name, feature_names=[f"{config.feature_names[0]}'"]), self._now

    def _draw_rows(self, kind: str) -> tuple[Callable[[], Any], Rows]:
        name = self.random.choice(list(self._now))
        table, rows = self.store[name], dict(self._now[name])
        bag, batches = tierstore.TieredEmbeddingBag(table, mode="sum"), [self._ids()]
        ids = batches[0]
        values = torch.tensor([rows.get(row, 0.0) for row in ids.tolist()])[:, None].expand(-1, self._dim)
        if kind == "write":
            value = float(self.random.randrange(1, 1 << 20))
            rows |= dict.fromkeys(ids.tolist(), value)
            return lambda: table.write(ids, torch.full((len(ids), self._dim), value)), self._now | {name: rows}
        if kind == "prefetch":
            batches += [self._ids(), self._ids()]
        if kind in ("train", "prefetch"):
            for row in torch.cat(batches).tolist():
                rows[row] = rows.get(row, 0.0) - 1

        def expect(found: Tensor) -> None:
            self._require(torch.equal(found, values), f"a {kind} has wrong rows")

        def train() -> None:
            given = [each.view(-1, 1) for each in batches]
            for batch in tierstore.prefetch(given, bag, depth=1) if kind == "prefetch" else given:
                bag(batch).sum().backward()

        def look_up() -> None:
            with torch.no_grad():
                expect(bag(ids.view(-1, 1)))

        calls = {"read": lambda: expect(table.read(ids)), "look up": look_up}
        return calls.get(kind, train), self._now | {name: {row: value for row, value in rows.items() if value}}

    def _ids(self) -> Tensor:
        count = self.random.choice([1, 5, 40, 150])
        return torch.randint(self._num_rows, (count,), generator=self._generator)

    def _draw(self, kind: str) -> tuple[Callable[[], Any], Rows]:
        if kind in _OF_ROWS:
            return self._draw_rows(kind)
        if kind == "create":
            return self._create()
        if kind == "change":
            return self._change()
        if kind == "drop":
            name = self.random.choice(list(self._now))
            return lambda: self.store.drop_table(name), {each: rows for each, rows in self._now.items() if each != name}
        if kind == "roll back":
            version = self.random.choice(self.store.versions)
            return lambda: self.store.rollback(version), self._of(version)
        return self._commit if kind == "commit" else self._commit_later, self._now

    def cut_one(self) -> None:
        kind = self.random.choice(self._kinds)
        if kind in ("create", "drop"):
            kind = "create" if len(self._now) < 3 else "drop"
        if kind in _OF_TABLES:
            self._commit()
        call, after = self._draw(kind)
        before, epoch = self._now, self.store._catalog.epoch
        is_step = self._has_changes and kind not in _OF_ROWS and self.random.random() < 0.7
        by, where, error = self._at_step(call) if is_step else self._at_instant(kind, call)
        if isinstance(error, Wrong):
            raise error
        self._tally["cut"] += bool(where)
        self._tally["raised"] += error is not None
        said = f"{kind} cut by {by} at {where or 'no place'}: {error!r} {getattr(error, '__notes__', '')}"
        words, failed, error = str(error), error is not None, None
        allowed = [after] if not failed and (not where or kind not in _OF_ROWS) else [after, before]
        may_be_final = by == "disk" and not is_step  # a failed sync is
        if failed and kind not in _OF_ROWS:
            allowed.append(self._of(self._durable))
        if may_be_final and "open it again" in words:
            self.reopen(allowed)
            return
        try:
            self._look(said, allowed, by_row=kind in _OF_ROWS)
        except TierstoreError as refusal:
            if "open it again" not in str(refusal) or not may_be_final:
                raise Wrong(f"{self._name}: {said}") from refusal
            self.reopen(allowed)
            return
        if self._has_changes and kind not in _OF_ROWS:
            named = not failed or not is_step or f"version {epoch}" in said
            self._look_as_killed(said, named=named)
            is_made_again = failed and kind in _OF_TABLES and self._now.keys() == before.keys()
            self._go_on(call if is_made_again else None, said, after)

    def _go_on(self, call: Callable[[], Any] | None, said: str, after: Rows) -> None:
        if call is not None:
            self._commit()
            call()  # of no effect if the table was made or changed
            self._durable = self.store.version
            self._look(f"the call after {said}", [after])
        self._commit()
        self._look(f"the commit after {said}", [self._now])
        self._look_as_killed(f"the commit after {said}", named=False)

    def _at_step(self, call: Callable[[], Any]) -> tuple[str, str, BaseException | None]:
        """Make the call, and raise as it reaches a drawn step: a low one, or else one of a longer list."""
        what, left = self.random.choice(list(_ERRORS)), self.random.randrange(1, self.random.choice([6, 26]))
        reached = ""

        def hook(step: str) -> None:
            nonlocal left, reached
            left -= 1
            if left == 0:
                reached = step
                raise _ERRORS[what]()

        calls = os.link, os.rename, os.replace
        killpoints.hook = hook
        watch_names(hook)
        try:
            error = error_of(call)
            return what, reached, error
        finally:
            killpoints.hook = None
            os.link, os.rename, os.replace = calls

    def _at_instant(self, kind: str, call: Callable[[], Any]) -> tuple[str, str, BaseException | None]:
        what = self.random.choice(KINDS if kind in (*_OF_ROWS, "commit", "commit later") else KINDS[1:])
        has_threads = kind == "prefetch" or kind not in _OF_ROWS
        in_main = what == "signal" or self.random.random() < 0.7 or not has_threads
        length = self._lengths.setdefault((kind, what, in_main), 400)
        instant = 1 + int(length * self.random.random() ** self.random.choice([1, 1, 3]))
        seen, error = self._cutter.run(call, kind=what, instant=instant, in_main=in_main)
        if seen < instant:
            self._lengths[kind, what, in_main] = max(1, seen)
            return what, "", error
        if instant > 0.9 * length:
            self._lengths[kind, what, in_main] = length + length // 4 + 1
        return what, self._cutter.place, error

    def _of(self, version: int) -> Rows:
        return {name: self._versions[version].get(name, {}) for name in self._now}

    def _shown(self, store: tierstore.Store) -> Rows:
        found = {}
        for name, table in store.tables.items():
            rows = table.read(torch.arange(table.config.num_embeddings))
            self._require(torch.equal(rows, rows[:, :1].expand(-1, self._dim)), f"half rows in {name}")
            found[name] = {row: value for row, value in enumerate(rows[:, 0].tolist()) if value}
        return found

    def _look(self, said: str, allowed: list[Rows], *, by_row: bool = False) -> None:
        """Whether the store shows one of these, as a whole or row by row, and nobody uses a row of it."""
        shown = self._shown(self.store)
        is_right = shown in allowed or (
            by_row and all(_is_between(rows, allowed[0][name], allowed[-1][name], said) for name, rows in shown.items())
        )
        self._require(is_right, f"{said}: wrong rows, or tables: {list(shown)}")
        self._require_whole(said)
        gone, new = self._now.keys() - shown.keys(), shown.keys() - self._now.keys()
        if len(gone) == len(new) == 1:  # another name
            other = {min(gone): min(new)}
            for number, tables in self._versions.items():
                self._versions[number] = {other.get(name, name): rows for name, rows in tables.items()}
        self._now = shown
        if said.startswith("roll back"):
            self._durable = self.store.version
        is_known = self.store.version >= self._durable and self.store.version in self._versions
        self._require(is_known, f"{said}: version {self.store.version}, not {self._durable}")

    def _require_whole(self, said: str) -> None:
        error_of(self.store._commits.end_pending)  # what is being written is pinned
        for pool in {table.pool for table in self.store.tables.values()}:
            with pool.arena.lock:
                pool.cache.check_integrity()
            if pool.tier.on_device:
                pool.tier.check_integrity()
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while pool.in_use and time.monotonic() < deadline:
                gc.collect()  # the error and what it was raised in may refer to each other
                time.sleep(0.01)  # a thread that read ahead lets go of its rows when it is done
            num_pinned = pool.pins.num_pinned + pool.pins.num_held + pool.tier.num_leased
            self._require(num_pinned == 0, f"{said}: {num_pinned} slots stay pinned")

    def _look_as_killed(self, said: str, *, named: bool) -> None:
        shutil.copytree(self._folder, self._scratch)
        with tierstore.open(self._scratch, ddr="4MiB", threads=1) as store:
            is_kept = store.version >= self._durable and (named or store.version <= self.store.version)
            self._require(is_kept, f"{said}: a killed process leaves version {store.version}, not {self._durable}")
            self._require(self._shown(store) == self._of(store.version), f"{said}: a killed process leaves wrong rows")
        shutil.rmtree(self._scratch)

    def reopen(self, allowed: list[Rows] | None = None) -> None:
        """Close it, and compare what the version shows, to a reader and to the next writer."""
        error = error_of(self.store.close)
        self._require(isinstance(error, _EXPECTED), f"close: {error!r}")
        del self.store
        gc.collect()
        with tierstore.open(self._folder, mode="r", ddr="64MiB") as reader:
            shown = self._shown(reader)
            is_right = shown in (allowed or []) or shown == self._of(reader.version)
            self._require(is_right, f"version {reader.version} reopened has wrong rows")
        self._open()
        # It goes back to the last superblock, which may be before a version that a reader saw.
        version = self.store.version
        self._require(version >= self._durable, f"version {self._durable} is gone, version {version} is there")
        self._durable = version
        self._look("opened again", [*(allowed or []), self._of(version)])

    def _require(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise Wrong(f"{self._name}: {text}")


def _is_between(rows: dict[int, float], after: dict[int, float], before: dict[int, float], said: str) -> bool:
    """Whether each row is as before or after a call, or after some steps of one that makes several."""
    for row in {*rows, *after, *before}:
        value, ends = rows.get(row, 0.0), sorted((after.get(row, 0.0), before.get(row, 0.0)))
        is_step = said.startswith("prefetch") and ends[0] <= value <= ends[1] and value.is_integer()
        if value not in ends and not is_step:
            return False
    return True


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

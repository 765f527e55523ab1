"""A device that fills up or fails at any single call: a clear error, no row lost, nothing promised that is not so."""

import collections
import errno
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tierstore.errors import DiskFullError, PartlyTrainedError, TierstoreError
from tierstore.io import anchor

from .powerloss import losses, materialise, pending, state
from .recovery import Counts, check, explore, other_boot, promised
from .syscalls import Call, Failure, Recorder
from .workload import Snapshot, Trained, Workload, copied

SYNCS = {"fsync", "fdatasync"}
DATA = {"pwrite", "write", "writev"}
NAMES = {"open", "link", "rename", "mkdir", "ftruncate"}
FULL = (errno.ENOSPC, errno.EDQUOT)
REOPEN = "open it again"
REOPEN_ONLY = "close the store and open it again"
META_BYTES = 512
"""More than what LMDB writes of a meta page, and less than a page."""


@dataclass
class Device:
    """Fails the call of that number among those it is asked about, or every one from there on, until it is freed.

    A write cut short is followed by one that finds no room, as on a device that fills up.

    Attributes:
        names: calls that it fails.
        hits: those that it failed.
    """

    number: int
    failure: Failure
    names: set[str]
    for_good: bool
    asked: int = 0
    is_free: bool = False
    hits: list[Call] = field(default_factory=list)

    def __call__(self, call: Call) -> Failure | None:
        if call.name not in self.names or self.is_free or call.path.name.endswith("-lock"):
            return None
        number = self.asked
        self.asked += 1
        if number == self.number or (self.for_good and number > self.number):
            self.hits.append(call)
            return self.failure if len(self.hits) == 1 or self.failure.errno else Failure(errno.ENOSPC)
        return None


class Trainer:
    """Somebody who trains, and does what the errors say.

    Attributes:
        errors: those that were raised.
        reopened: the store had to be closed and opened again.
        gone_back: steps failed half way, and were done again from the last version, or from an empty store.
    """

    def __init__(self, root: Path, initial: dict[str, Trained], device: Device) -> None:
        self.directory = root / "store"
        self.device = device
        self.recorder = Recorder(root, fail=device)
        self.first = Snapshot({}, {}, initial, version=0)
        self.workload = Workload(copied(initial), np.random.default_rng(0), self.recorder.mark)
        self.errors: list[TierstoreError] = []
        self.reopened = False
        self.gone_back = 0

    def run(self) -> None:
        """Open, train, commit in the foreground and the background, close."""
        work = self.workload
        with self.recorder:
            self._open()
            self._attempt(lambda: work.train(2))
            self._attempt(work.commit, again=True)
            self._attempt(lambda: work.train(2))
            self._attempt(lambda: work.commit_beside(1))
            self._attempt(work.commit, again=True)
            try:
                work.close()
            except TierstoreError as error:
                self._note(error)
            self.device.is_free = True
        assert self.recorder.problems == []

    def _note(self, error: TierstoreError) -> None:
        self.errors.append(error)
        self.device.is_free = True

    def _open(self) -> None:
        try:
            self.workload.open(self.directory)
        except TierstoreError as error:
            self._note(error)
            if self.workload.store is not None:
                self._close()
            self.workload.open(self.directory)

    def _attempt(self, step: Callable[[], object], *, again: bool = False) -> None:
        """Take a step; after an error go on, in the same store if it lets us, else in one opened anew."""
        try:
            step()
            return
        except TierstoreError as error:
            self._note(error)
            partly = isinstance(error, PartlyTrainedError)
        for _ in range(2):  # of what failed in the background meanwhile we may hear only now
            try:
                self.workload.take_up()
                if partly:
                    self._go_back()
                    partly = False
                if again:
                    step()
                return
            except TierstoreError as error:
                if REOPEN in str(error):
                    break
                if not isinstance(error, DiskFullError):
                    raise
        self._reopen()
        if again:
            step()

    def _go_back(self) -> None:
        """A step failed half way: back to the last version, and on from there."""
        work = self.workload
        work.settle()
        goal = work.steps + 1
        if work.store.versions:
            work.last = self._shown()
            work.go_back(replace(work.last, version=work.store.version))
        else:
            with pytest.raises(PartlyTrainedError, match=f"last commit, {REOPEN_ONLY}"):
                work.store.commit()
            self._open_anew()
            work.train(goal - work.steps)
        self.gone_back += 1

    def _shown(self) -> Snapshot:
        versions, _ = promised(self.recorder, self.recorder.time, self.first)
        return next(v for v in versions if v.extra == self.workload.store.extra)

    def _close(self) -> None:
        try:
            self.workload.close()
        except TierstoreError as error:
            self.errors.append(error)

    def _reopen(self) -> None:
        self.reopened = True
        self._open_anew()

    def _open_anew(self) -> None:
        self._close()
        self.workload.open(self.directory)
        self.workload.show(self._shown())
        self.workload.take_up()

    def check_errors(self) -> None:
        """Each names the file; a full disk is called that, and the store goes on once there is room."""
        for error in self.errors:
            assert str(self.directory) in str(error), error
        in_place = any(_is_in_place(call) for call in self.device.hits)
        if self.device.failure.errno in FULL and self.errors and not in_place:
            assert isinstance(_reason(self.errors[0]), DiskFullError), self.errors[0]
            assert not self.reopened
            assert self.gone_back == isinstance(self.errors[0], PartlyTrainedError)

    def check_files(self, scratch: Path, *, powers: int) -> None:
        """What is on disk is what was promised: now, and after the machine stopped."""
        now = self.recorder.time
        versions, tables = promised(self.recorder, now, self.first)
        safe, unsafe = pending(self.recorder, now)
        for number, loss in enumerate([*losses(self.recorder, unsafe, np.random.default_rng(0), 4)][:powers]):
            place = scratch / f"lost {number}"
            materialise(state(self.recorder, safe, loss, unsafe), place)
            with other_boot(1):
                check(place / "store", versions, tables, Counts(states=1))
        check(self.directory, versions, tables, Counts(states=2))


def _reason(error: TierstoreError) -> BaseException | None:
    """What failed, where the error is that it did so half way through a step."""
    return error.__cause__ if isinstance(error, PartlyTrainedError) else error


def _is_in_place(call: Call) -> bool:
    """LMDB's meta pages, and anchors, are overwritten in place, which takes no room on most file systems.

    Where it does, the store has to be opened again.
    """
    return call.path.name.startswith("rows.anchor") or call.size_bytes < META_BYTES


def drill(scratch: Path, initial: dict[str, Trained], device: Device, *, powers: int) -> Trainer:
    """Train on a device that fails, and check everything afterwards."""
    root = scratch / f"run {device.number} {device.failure.errno} {device.for_good}"
    (root / "store").mkdir(parents=True)
    trainer = Trainer(root, initial, device)
    try:
        trainer.run()
        trainer.check_errors()
        trainer.check_files(root, powers=powers)
    except BaseException as error:
        error.add_note(f"failed calls: {device.hits[:3]}; errors: {trainer.errors}")
        raise
    return trainer


@pytest.fixture(autouse=True)
def _anchors_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor, "GROWTH_BYTES", 1 << 18)


@dataclass(frozen=True)
class Fault:
    """A way to fail, and the calls that can."""

    names: frozenset[str]
    errno: int


FAULTS = {
    "full": Fault(frozenset(DATA | NAMES), errno.ENOSPC),
    "over quota": Fault(frozenset(DATA | NAMES), errno.EDQUOT),
    "broken": Fault(frozenset(DATA | NAMES), errno.EIO),
    "cut short": Fault(frozenset(DATA), 0),
    "not synced": Fault(frozenset(SYNCS), errno.EIO),
}


def fail_calls(
    scratch: Path, initial: dict[str, Trained], fault: Fault, *, first: int, step: int, for_good: bool, powers: int
) -> collections.Counter[str]:
    """Fail one call a run: the one of number ``first``, ``first + step``, and so on to the last.

    Args:
        for_good: every later call fails too, until the trainer sees an error and makes room.
        powers: states of a power loss after each run to check beside the files as they are.

    Returns:
        how many runs there were, and with which errors they met.
    """
    counts: collections.Counter[str] = collections.Counter()
    for number in itertools.count(first, step):
        trainer = drill(
            scratch, initial, Device(number, Failure(fault.errno), set(fault.names), for_good), powers=powers
        )
        if not trainer.device.hits:
            return counts
        counts["runs"] += 1
        counts["reopened"] += trainer.reopened
        counts["gone back"] += trainer.gone_back
        counts.update(type(_reason(error)).__name__ for error in trainer.errors)
    raise AssertionError("unreachable")


@pytest.mark.parametrize("name", FAULTS)
def test_some_calls_fail(scratch: Path, initial: dict[str, Trained], name: str) -> None:
    step = {"not synced": 5, "over quota": 60}.get(name, 30)  # over quota is as full
    counts = fail_calls(
        scratch, initial, FAULTS[name], first=len(name) % step, step=step, for_good=name == "full", powers=1
    )
    print(counts)
    assert counts["runs"] >= 2
    assert counts["TierstoreError"] + counts["DiskFullError"] >= 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("name", FAULTS)
def test_every_call_fails(scratch: Path, initial: dict[str, Trained], name: str, part: int, for_good: bool) -> None:
    counts = fail_calls(scratch, initial, FAULTS[name], first=part, step=5, for_good=for_good, powers=3)
    print(counts)
    assert counts["runs"] >= 4


def lose_power_after(
    scratch: Path, initial: dict[str, Trained], number: int, *, points: int, least: int = 0
) -> Counts | None:
    """A sync fails, training goes on as the error says, and then power is lost; None if there are fewer syncs."""
    root = scratch / f"run {number}"
    (root / "run" / "store").mkdir(parents=True)
    (root / "states").mkdir()
    trainer = Trainer(root / "run", initial, Device(number, Failure(errno.EIO), SYNCS, False))
    trainer.run()
    if not trainer.device.hits:
        return None
    return explore(
        trainer.recorder,
        trainer.first,
        root / "states",
        points=points,
        states_each=6,
        least=least,
        generator=np.random.default_rng(number),
    )


@pytest.mark.parametrize("number", [9, 16])
def test_power_lost_after_a_sync_that_failed(scratch: Path, initial: dict[str, Trained], number: int) -> None:
    counts = lose_power_after(scratch, initial, number, points=4, least=16)
    assert counts is not None
    assert counts.states >= 16


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
def test_power_lost_after_any_sync_that_failed(scratch: Path, initial: dict[str, Trained], part: int) -> None:
    states = 0
    for number in itertools.count(part, 10):
        counts = lose_power_after(scratch, initial, number, points=40)
        if counts is None:
            break
        states += counts.states
    print(f"states: {states}")
    assert states > 100

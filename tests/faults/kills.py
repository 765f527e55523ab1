"""Kill training runs: ``python -m tests.faults.kills --seed 1 --kills 500 --rounds 5`` prints how often each was done.

One store after another is used by a chain of processes, each killed with SIGKILL: at each named point of opening,
write-back and commit, then at random instants. After each kill every row, optimizer state and dense tensor of every
kept version is compared with a run that nobody kills, and the next process goes on from there. After some of the kills
the machine seems to have started again. Places and times are drawn from the seed and the number of the chain. What
fails leaves the store.
"""

import argparse
import faulthandler
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import tierstore
from tests.children import fork
from tierstore.errors import DamagedError, TierstoreError
from tierstore.kernels.jit import FIRST_USE
from tierstore.system.killpoints import POINTS
from tierstore.system.signals import settle

from .training_run import (
    STEPS_A_COMMIT,
    Report,
    State,
    different,
    expected_states,
    live,
    other_boot,
    quiet,
    state_of,
    train,
)

_NEVER: Final = ("", 0)
_HANGS_SECONDS: Final = 60.0
_DDR: Final = "2MiB"
_REBOOT_SHARE: Final = 0.2
_REBOOT_SHARES: Final = {"write-back": 0.5, "anchor": 0.8, "commit": 0.5}
"""After kills at named points of these: what an anchor must hold shows when the machine starts again."""
_COUNTS: Final = {"write-back": 4, "anchor": 3}
"""Up to which of its times a named point is killed at; 1 of the others."""

# A process that helps to compile kernels is waited for by a thread, and there may be none where processes are forked.
FIRST_USE.is_alone = True


def forked(body: Callable[[Report], None], kill_after: float | None = None) -> tuple[list[dict[str, Any]], bool]:
    settle(60)
    own = {each.name for each in threading.enumerate()} - {"tierstore-dropped"}  # which holds none while it waits
    assert len(own) == 1, f"a lock that one of {own} holds would stay locked after a fork"

    def watched(report: Report) -> None:
        faulthandler.dump_traceback_later(_HANGS_SECONDS, exit=True)
        body(report)

    reports, status = fork(watched, kill_after=kill_after)
    assert status in (0, -signal.SIGKILL), f"ended with status {status}"
    assert not [each for each in reports if each["label"] == "failed"], reports
    return reports, status != 0


class Course(NamedTuple):
    """What every chain does, and how many seconds it takes without a kill."""

    commits: int
    states: dict[int, State]
    seconds: float


class Doom(NamedTuple):
    """How one process ends: at the ``point[1]``-th time a named point is reached, or after so many seconds; before
    the next one the machine seems to have started again if ``reboot``."""

    after: float | None = None
    point: tuple[str, int] = _NEVER
    reboot: bool = False


class Chain:
    """One store, from its making to the last commit; what was done is counted in ``tally``.

    A reader may see a version that was begun, and the next process that writes go back to the one before: it builds
    only on what is known to be on the device.
    """

    def __init__(self, directory: Path, course: Course, settings: dict[str, Any], tally: Counter[str]) -> None:
        self._directory, self._course, self._settings, self._tally = directory, course, settings, tally
        self._boot, self._was_opened = 1, False
        self._durable = self._begun = 0
        self._numbers: dict[int, int] = {}
        """Of versions that a commit said are durable, by position."""

    def run(self, dooms: Iterator[Doom]) -> None:
        for doom in dooms:
            if not self._live(doom):
                assert doom.point == _NEVER, f"{doom.point} was never reached"
                break
            self._boot += doom.reboot
            self._inspect()
        else:
            self._live(Doom())
        assert self._inspect() == self._course.commits * STEPS_A_COMMIT
        self._tally["ended"] += 1
        shutil.rmtree(self._directory)

    def _live(self, doom: Doom) -> bool:
        course, settings, boot = self._course, self._settings, self._boot
        reports, is_killed = forked(
            lambda report: live(self._directory, course.commits, report, boot=boot, kill_at=doom.point, **settings),
            doom.after,
        )
        self._tally[doom.point[0] or "random"] += is_killed
        for report in reports:
            position = report["position"]
            if report["label"] == "opened":  # what a process that writes has taken up is durable
                assert self._durable <= position <= self._begun
                self._was_opened, self._durable, self._begun = True, position, position
            elif report["label"] == "begin":
                self._begun = position
            else:
                assert report["version"] > max(self._numbers.values(), default=0)
                self._durable, self._numbers[position] = position, report["version"]
        return is_killed

    def _inspect(self) -> int:
        may_lack = not self._was_opened
        (*_, shown), _ = forked(
            lambda report: inspect(self._directory, self._course.states, report, boot=self._boot, may_lack=may_lack)
        )
        found: dict[int, int] = dict(shown["versions"])
        last = max(found, default=0)
        assert self._durable <= last <= self._begun, f"{found} is shown, not {self._durable} to {self._begun}"
        assert [*found] == [*range(STEPS_A_COMMIT, last + 1, STEPS_A_COMMIT)][-self._settings["keep"] :]
        assert sorted({*found.values()}) == [*found.values()], f"the versions' numbers do not rise: {found}"
        assert found.items() <= (found | self._numbers).items(), f"{found} were committed as {self._numbers}"
        self._tally["versions"] += len(found)
        return last


def inspect(directory: Path, states: dict[int, State], report: Report, *, boot: int, may_lack: bool) -> None:
    """Open what a process left for reading, and compare every version; reports the "versions" that are "shown".
    Where the machine has started again, a store can be read only after it was opened for writing: then a copy is."""
    copy, shown = directory.with_name(f"{directory.name} copy"), list[tuple[int, int]]()
    with other_boot(boot):
        try:
            shown = _shown(directory, states, may_lack)
        except TierstoreError as error:
            if isinstance(error, DamagedError) and "the machine stopped" in str(error):
                shutil.copytree(directory, copy)
                tierstore.open(copy, ddr=_DDR, threads=1).close()
                shown = _shown(copy, states, may_lack)
                shutil.rmtree(copy)
            elif not may_lack:
                raise
    report("shown", versions=shown)


def _shown(directory: Path, states: dict[int, State], may_lack: bool) -> list[tuple[int, int]]:
    with tierstore.open(directory, mode="r", ddr=_DDR, threads=1) as store:
        numbers = store.versions
    shown = []
    for number in numbers or (None,):
        with tierstore.open(directory, mode="r", version=number, ddr=_DDR, threads=1) as store:
            store.verify()
            position, found = store.extra.get("position", 0), state_of(store)
        assert position in states, f"version {number} was committed at {position}, where there is no commit"
        wrong = different(states[position], found, may_lack=may_lack)
        assert not wrong, f"version {number}, of position {position}, differs in {wrong}"
        shown += [] if number is None else [(position, number)]
    return shown


def random_dooms(course: Course, generator: random.Random) -> Iterator[Doom]:
    while True:
        yield Doom(generator.uniform(0, course.seconds), reboot=generator.random() < _REBOOT_SHARE)


def point_dooms(generator: random.Random) -> Iterator[Doom]:
    """A kill at each named point, in an order in which each is still to come."""
    for part in ("manifest", "rows file", "prune", "commit", "log", "write-back", "cleaning", "anchor"):
        for name in (name for name in POINTS if name.partition(":")[0] == part):
            count = generator.randint(1, _COUNTS.get(part, 1))
            yield Doom(point=(name, count), reboot=generator.random() < _REBOOT_SHARES.get(part, _REBOOT_SHARE))
    # Pages are put back where something was written after the last anchor.
    yield Doom(point=("write-back: segments published", 3), reboot=True)
    yield Doom(point=("recovery: anchored meta pages put back", 1))


def _settings(generator: random.Random) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "policy": ["lru", "lfu"], "keep": [2, 3, 4], "ddr": ["496KiB", "512KiB"], "hbm": ["0", "0", "160KiB"],
        "growth_bytes": [each * 2**10 for each in (64, 256, 1024)], "depth": [0, 2, 2],
    }  # fmt: skip
    return {name: generator.choice(values) for name, values in choices.items()}


def _course(folder: Path, commits: int) -> Course:
    """What is loaded and compiled here, before anything is forked, is loaded and compiled in every process."""
    states = expected_states(folder / "expected", commits)
    started = time.monotonic()
    train(folder / "timed", commits, ddr="512KiB", policy="lru")
    seconds = time.monotonic() - started
    inspect(folder / "timed", states, quiet, boot=0, may_lack=False)
    return Course(commits, states, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20, help="at random instants")
    parser.add_argument("--rounds", type=int, default=1, help="over all named points")
    parser.add_argument("--commits", type=int, default=20, help="of a run")
    parser.add_argument("--dir", type=Path, help="where stores are made [a temporary folder]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=given.dir))
    course, tally = _course(folder, given.commits), Counter[str]()
    for number in itertools.count():
        if number >= given.rounds and tally["random"] >= given.kills:
            break
        generator = random.Random(f"{given.seed} {number}")
        dooms = itertools.islice(random_dooms(course, generator), given.kills - tally["random"])
        if number < given.rounds:
            dooms = point_dooms(generator)
        print(f"--seed {given.seed}, chain {number}, after {dict(tally)}", file=sys.stderr, flush=True)
        Chain(folder / f"{number}", course, _settings(generator), tally).run(dooms)
    shutil.rmtree(folder)
    print(json.dumps(tally))


if __name__ == "__main__":
    main()

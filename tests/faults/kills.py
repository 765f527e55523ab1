"""Kill training runs: ``python -m tests.faults.kills --seed 1 --kills 500 --rounds 5`` prints how often each was done.

One store after another is used by a chain of processes, each killed with SIGKILL: at each named point, then at random
instants. After each kill every row, optimizer state and dense tensor of every kept version is compared with a run that
nobody kills, and the next process goes on from there. After some of the kills the machine seems to have started again.
Places and times are drawn from the seed and the number of the chain; ``--chain N --seed S`` repeats one chain. What
fails ends it, and leaves the store.
"""

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import tierstore
from tierstore.errors import DamagedError, TierstoreError
from tierstore.system.killpoints import POINTS

from .forked import Ending, fork
from .training_run import (
    Action,
    Report,
    Settings,
    State,
    different,
    expected_states,
    live,
    make_plan,
    other_boot,
    quiet,
    state_of,
    train,
)  # fmt: skip

_NEVER: Final = ("", 0)
_DDR: Final = "2MiB"
_REBOOT_SHARE: Final = 0.2
_REBOOT_SHARES: Final = {"write-back": 0.5, "anchor": 0.8, "commit": 0.5, "rollback": 0.5}
"""After kills at named points of these: what an anchor must hold shows when the machine starts again."""
_COUNTS: Final = {"write-back": 6, "commit": 2, "anchor": 3}
"""Up to which of its times a named point is killed at; 1 of the others."""
Head = tuple[int, ...]
"""Positions of the kept versions, the oldest first."""


class Course(NamedTuple):
    """What every chain does, and how many seconds it takes without a kill."""

    plan: Sequence[Action]
    states: dict[int, State]
    seconds: float


class Doom(NamedTuple):
    """How one process ends: at the ``point[1]``-th time a named point is reached, or after so many seconds.

    ``reboot``: before the next process, the machine seems to have started again.
    """

    after: float | None = None
    point: tuple[str, int] = _NEVER
    reboot: bool = False


class Promise:
    """The heads that may be found: the last that is durable, and those that were begun since.

    A reader may see one that was begun, and the next process that writes go back to the one before: it builds only on
    what is known to be on the device.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._heads: list[Head] = [()]
        self._numbers: dict[int, int] = {}
        self._highest = 0
        self.was_opened = False

    def hear(self, report: dict[str, Any]) -> None:
        """Take in what a process reported."""
        label, position = report["label"], report.get("position", 0)
        if label == "opened":  # what a process that writes has taken up is durable
            self.was_opened, count = True, len(report["numbers"])
            fitting = [head for head in self._heads if (head or (0,))[-1] == position and len(head) == count]
            assert fitting, f"opened at {position}, with {count} versions, of {self._heads}"
            self._heads, self._numbers = fitting[-1:], dict(zip(fitting[-1], report["numbers"], strict=True))
        elif label == "begin":
            self._heads.append((*self._heads[-1], position)[-self._keep :])
            self._numbers.pop(position, None)
        elif label == "going back":
            self._heads.append(tuple(kept for kept in self._heads[-1] if kept <= position))
        elif label in ("durable", "back"):
            # Going back to the newest version leaves the head as it is: both are this one.
            del self._heads[: next(i for i, head in enumerate(self._heads) if head and head[-1] == position)]
            if label == "durable":
                assert report["version"] > self._highest, f"number {report['version']} after {self._highest}"
                self._highest = self._numbers[position] = report["version"]

    def check(self, head: Head, numbers: Sequence[int]) -> None:
        """Of what a store shows after a kill."""
        assert head in self._heads, f"the positions kept are {head}, not one of {self._heads}"
        assert sorted(set(numbers)) == list(numbers), f"the versions' numbers do not rise: {numbers}"
        told = [self._numbers.get(position, number) for position, number in zip(head, numbers, strict=True)]
        assert told == list(numbers), f"the versions at {head} are {numbers}, and were committed as {told}"


class Chain:
    """One store, from its making to the end of the plan; what was done is counted in ``tally``."""

    def __init__(self, directory: Path, course: Course, settings: Settings, tally: Counter[str]) -> None:
        self._directory, self._course, self._settings, self._tally = directory, course, settings, tally
        self._stacks = directory.with_name(f"{directory.name} stacks")
        self._promise = Promise(settings.keep)
        self._boot = 1

    def run(self, dooms: Iterator[Doom]) -> None:
        """Kill one process after another until ``dooms`` end or one outlives its own; then go on to the end."""
        for doom in dooms:
            if self._live(doom).how == "ended":
                assert doom.point == _NEVER, f"{doom.point} was never reached"
                break
            self._boot += doom.reboot
            self._inspect()
        else:
            self._live(Doom())
        head = self._inspect()
        assert head[-1:] == (len(self._course.plan),), f"the run ended, and its last version is of {head}"
        self._tally["ended"] += 1
        shutil.rmtree(self._directory)

    def _live(self, doom: Doom) -> Ending:
        """One process; counted where it was killed."""
        plan, settings, boot = self._course.plan, self._settings, self._boot
        ending = fork(
            lambda report: live(self._directory, plan, settings, report, boot=boot, kill_at=doom.point),
            self._stacks,
            doom.after,
        )
        assert ending.how != "failed", ending.words
        if ending.how == "killed":
            self._tally[doom.point[0] or "random"] += 1
        for report in ending.reports:
            self._promise.hear(report)
        return ending

    def _inspect(self) -> Head:
        """Check what the process left; the positions of its versions."""
        may_lack = not self._promise.was_opened
        ending = fork(
            lambda report: inspect(self._directory, self._course.states, report, boot=self._boot, may_lack=may_lack),
            self._stacks,
        )
        shown = ending.last("shown")
        assert shown is not None, f"could not be opened and read: {ending.words or ending.how}"
        self._tally["versions"] += len(shown["head"])
        self._promise.check(head := tuple(shown["head"]), shown["numbers"])
        return head


def inspect(directory: Path, states: dict[int, State], report: Report, *, boot: int, may_lack: bool) -> None:
    """Open what a process left for reading, and compare every version; reports the "head" and "numbers" it "shown".

    Where the machine has started again, a store can be read only after it was opened for writing: then a copy is.

    Args:
        may_lack: the process may have died before the store was whole.
    """
    copy, shown = directory.with_name(f"{directory.name} copy"), (list[int](), list[int]())
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
    report("shown", head=shown[0], numbers=shown[1])


def _shown(directory: Path, states: dict[int, State], may_lack: bool) -> tuple[list[int], list[int]]:
    with tierstore.open(directory, mode="r", ddr=_DDR, threads=1) as store:
        numbers = list(store.versions)
    head = []
    for number in numbers or (None,):
        with tierstore.open(directory, mode="r", version=number, ddr=_DDR, threads=1) as store:
            store.verify()
            position, found = store.extra.get("position", 0), state_of(store)
        head += [] if number is None else [position]
        assert position in states, f"version {number} was committed at {position}, where there is no commit"
        wrong = different(states[position], found, may_lack=may_lack)
        assert not wrong, f"version {number}, of position {position}, differs in {wrong}"
    return head, numbers


def random_dooms(course: Course, generator: random.Random) -> Iterator[Doom]:
    """Kills spread over the whole run."""
    while True:
        yield Doom(generator.uniform(0, course.seconds), reboot=generator.random() < _REBOOT_SHARE)


def point_dooms(generator: random.Random) -> Iterator[Doom]:
    """A kill at each named point, in an order in which each is still to come."""
    parts = ("manifest", "rows file", "rollback", "prune", "commit", "write-back", "anchor")
    order = {part: [name for name in POINTS if name.partition(":")[0] == part] for part in parts}
    for part, names in order.items():
        for name in names:
            count = generator.randint(1, _COUNTS.get(part, 1))
            yield Doom(point=(name, count), reboot=generator.random() < _REBOOT_SHARES.get(part, _REBOOT_SHARE))
    for name in POINTS:
        if name.partition(":")[0] not in order:
            # The pages are put back where something was written after the last anchor.
            yield Doom(point=("write-back: segments published", 3), reboot=True)
            yield Doom(point=(name, 1))


def _settings(generator: random.Random) -> Settings:
    return Settings(
        policy=generator.choice(["lru", "lfu"]), keep=generator.choice([2, 3, 4]),
        ddr=generator.choice(["496KiB", "512KiB"]), hbm=generator.choice(["0", "0", "160KiB"]),
        growth_bytes=generator.choice([64, 256, 1024]) * 2**10, depth=generator.choice([0, 2, 2]),
    )  # fmt: skip


def _course(folder: Path, num_commits: int) -> Course:
    """The plan, what it must lead to, and how long it takes without a kill."""
    plan = make_plan(num_commits)
    states = expected_states(folder / "expected", plan)
    # Here, before anything is forked: what is loaded and compiled now is loaded and compiled in every process.
    train(folder / "warm", make_plan(3), Settings(), quiet)
    inspect(folder / "warm", states, quiet, boot=0, may_lack=False)
    started = time.monotonic()
    train(folder / "timed", plan, Settings(), quiet)
    return Course(plan, states, time.monotonic() - started)


def main() -> None:
    """First a chain that is not killed, then some killed at each point, then at random until there were enough."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20, help="at random instants")
    parser.add_argument("--rounds", type=int, default=1, help="over all named points")
    parser.add_argument("--commits", type=int, default=20, help="of a run")
    parser.add_argument("--chain", type=int, help="only this one")
    parser.add_argument("--dir", type=Path, help="where stores are made [a temporary folder]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=given.dir))
    course, tally, names = _course(folder, given.commits), Counter[str](), ["not killed"]
    names += ["named points"] * given.rounds
    for number in itertools.count() if given.chain is None else [given.chain]:
        if number >= len(names) and tally["random"] >= given.kills:
            break
        name = names[number] if number < len(names) else "random"
        generator = random.Random(f"{given.seed} {number} {name}")
        left = 0 if name == "not killed" else given.kills - tally["random"]
        dooms = point_dooms(generator) if name == "named points" else random_dooms(course, generator)
        dooms = dooms if name == "named points" else itertools.islice(dooms, left)
        print(f"--seed {given.seed} --chain {number} ({name}), after {tally['random']}", file=sys.stderr, flush=True)
        Chain(folder / f"{name} {number}", course, _settings(generator), tally).run(dooms)
    shutil.rmtree(folder)
    print(json.dumps(tally))


if __name__ == "__main__":
    main()

"""Chains: one store, used by one process after another, each killed, the last one running to the end of the plan."""

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from tierstore.system.killpoints import POINTS

from ..common import Counts
from .inspection import inspect
from .life import Settings, live
from .plan import Action
from .processes import Ending, Kill, fork
from .promise import Promise, PromiseError
from .state import State

__all__ = ["Chain", "Course", "Doom", "Tally", "point_dooms", "random_dooms"]

_NEVER: Final = ("", 0)
_REBOOT_SHARE: Final = 0.2
_REBOOT_SHARES: Final = {"write-back": 0.5, "anchor": 0.8, "commit": 0.5, "rollback": 0.5}
"""After kills at named points of these: what an anchor must hold shows when the machine starts again."""
_COUNTS: Final = {"write-back": 6, "commit": 2, "anchor": 3}
"""Up to which of its times a named point is killed at; 1 of the others."""
_DOOMS: Final = {"anywhere": 0.5, "opening": 0.15, "committing": 0.25, "closing": 0.1}
"""Where random kills strike, and how often."""


class Course(NamedTuple):
    """What every chain does, and how long its parts take without a kill, in seconds."""

    plan: Sequence[Action]
    states: dict[int, State]
    whole: float = 1.0
    opening: float = 0.1
    commit: float = 0.1
    closing: float = 0.1


class Doom(NamedTuple):
    """How one process ends: at the ``point[1]``-th time a named point is reached, or by ``kill``.

    ``reboot``: before the next process, the machine seems to have started again.
    """

    kill: Kill | None = None
    point: tuple[str, int] = _NEVER
    reboot: bool = False


@dataclass(kw_only=True)
class Tally(Counts):
    """What was tried, and what came of it.

    Attributes:
        random_kills, point_kills: processes killed at random instants, and at named points (``points``: at each).
        struck: what the processes were at when a random kill struck.
        reopened: kills after which the store showed versions that it had to, each of them whole.
        reboots: kills after which the machine seemed to have started again.
        versions: versions compared.
        rows_differ: rows of them that were not as they must be.
        ended: runs that came to their end; final_bits_differ: bits of theirs that are not those of a run never killed.
        reached: how often each point was reached by processes that came to their end.
        failures: in words, with what repeats them.
    """

    random_kills: int = 0
    point_kills: int = 0
    points: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    reopened: int = 0
    reboots: int = 0
    versions: int = 0
    rows_differ: int = 0
    ended: int = 0
    final_bits_differ: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Of all kinds."""
        return self.random_kills + self.point_kills


class _Failure(Exception):
    pass


class Chain:
    """One store from its making to the end of the plan.

    Args:
        directory: where the store is made; must not exist.
        name: what repeats it, for messages.
    """

    def __init__(self, directory: Path, course: Course, settings: Settings, name: str) -> None:
        self._directory, self._course, self._settings, self._name = directory, course, settings, name
        self._stacks = directory.with_name(f"{directory.name} stacks")
        self._promise = Promise(settings.keep)
        self._boot = 1
        self.tally = Tally()

    def run(self, dooms: Iterator[Doom]) -> Tally:
        """Kill one process after another until ``dooms`` end or a process outlives its own; then go on to the end.

        A failure is told in a way that lets it be repeated; a store that has none is removed.
        """
        try:
            if self._kill_all(dooms):
                self._live(Doom())
            self._end()
        except (_Failure, PromiseError) as error:
            self.tally.failures.append(f"{self._name}, {self._settings}, after {self.tally.kills} kills: {error}")
        else:
            shutil.rmtree(self._directory, ignore_errors=True)
        return self.tally

    def _kill_all(self, dooms: Iterator[Doom]) -> bool:
        """Whether the run has yet to come to its end."""
        for doom in dooms:
            if self._live(doom).how == "ended":
                if doom.point[0]:
                    raise _Failure(f"{doom.point} was never reached")
                return False
            self._boot += doom.reboot
            self.tally.reboots += doom.reboot
            self._inspect()
            self.tally.reopened += 1
        return True

    def _live(self, doom: Doom) -> Ending:
        """One process; counted by how it ended."""
        plan, settings, tally, point = self._course.plan, self._settings, self.tally, doom.point[0]
        ending = fork(
            lambda report: live(self._directory, plan, settings, report, boot=self._boot, kill_at=doom.point),
            self._stacks,
            doom.kill,
        )
        if ending.how == "failed":
            raise _Failure(ending.words)
        if ending.how == "killed" and point:
            tally.point_kills += 1
            tally.points[point] += 1
        elif ending.how == "killed":
            tally.random_kills += 1
            tally.struck[_at_work(ending)] += 1
        for report in ending.reports:
            self._promise.hear(report)
        closed = ending.last("closed")
        tally.reached.update(closed["reached"] if closed else {})
        return ending

    def _inspect(self, *, is_end: bool = False) -> tuple[int, ...]:
        """Open what the process left, for reading, and check what it shows; the positions of its versions."""
        may_lack = not self._promise.was_opened
        ending = fork(
            lambda report: inspect(self._directory, self._course.states, report, boot=self._boot, may_lack=may_lack),
            self._stacks,
        )
        shown = ending.last("shown")
        if shown is None:
            raise _Failure(f"could not be opened and read: {ending.words or ending.how}")
        self.tally.versions += len(shown["numbers"])
        self.tally.rows_differ += shown["rows"]
        self.tally.final_bits_differ += shown["bits"] * is_end
        if shown["words"]:
            raise _Failure(shown["words"])
        head = tuple(shown["head"])
        self._promise.check(head, shown["numbers"])
        return head

    def _end(self) -> None:
        """The plan is done: its last version must be there, with the bits of the run that was never killed."""
        self.tally.ended += 1
        if (head := self._inspect(is_end=True))[-1:] != (len(self._course.plan),):
            raise _Failure(f"the run ended, and its last version is of {head}")


def _at_work(ending: Ending) -> str:
    """What a process was at when it ended."""
    labels = [report["label"] for report in ending.reports]
    if "opened" not in labels:
        return "opening"
    if labels.count("begin") > labels.count("durable"):
        return "closing, a commit under way" if "closing" in labels else "training, a commit under way"
    if "closing" in labels:
        return "closing"
    return "going back" if labels.count("going back") > labels.count("back") else "training"


def random_dooms(course: Course, generator: random.Random) -> Iterator[Doom]:
    """Kills spread over the whole run, some aimed at its short parts: opening, committing, closing."""
    num_commits = sum(action.kind == "commit" for action in course.plan)
    while True:
        where = generator.choices(list(_DOOMS), list(_DOOMS.values()))[0]
        kill = {
            "anywhere": Kill("start", 1, generator.uniform(0, course.whole)),
            "opening": Kill("start", 1, generator.uniform(0, 1.5 * course.opening)),
            "committing": Kill(
                "begin", generator.randint(1, num_commits // 4), generator.uniform(0, 1.5 * course.commit)
            ),
            "closing": Kill("closing", 1, generator.uniform(0, 1.5 * course.closing)),
        }[where]
        yield Doom(kill, reboot=generator.random() < _REBOOT_SHARE)


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

"""Kill ranks that go on from another number of ranks: ``python -m bench.crash.resharding --seed 1 --kills 20``; prints
one line of JSON, what came of it.

One store is taken up by 1 to 4 ranks in turn. One, some or all of them are killed: at named steps, or at drawn
instants. Then as many ranks as before, as many as were killed, or one process must find the last commit: every row has
the value that its step gave it. After that the next number of ranks goes on from there. A part of the kills is of
``tierstore reshard``, which is then called again.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

import tierstore
from tierstore.dist import Plan, Sharding, gone, open_sharded
from tierstore.dist.reshard import reshard
from tierstore.system import killpoints

from .counts import Counts
from .processes import Process

__all__ = ["Tally", "kill_ranks", "main"]

SIZES: Final = (1, 2, 3, 4)
TABLES: Final = {"a": ("row_wise", 41, 8), "b": ("column_wise", 30, 12), "c": ("table_wise", 20, 4)} | {
    "d": ("data_parallel", 10, 4)
}
"""Sharding, rows and columns."""
MAX_FAILURES: Final = 5
_GROUP_SECONDS: Final = 30
_COMMAND_SHARE: Final = 0.15
"""Of the kills; of the command, not of ranks."""
_AGAIN_SHARE: Final = 0.3
"""Of the kills before all had opened: as many ranks try once more, by another plan, and may be killed again."""
_OPENING_SHARE: Final = 1.2
"""Of the time that an opening takes: until then instants are drawn."""


class Doom(NamedTuple):
    """Whom to kill: at the ``times``-th time ``point`` is reached, or at any point if that is ""; with times of 0
    after so many seconds."""

    ranks: tuple[int, ...]
    point: str = ""
    times: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class Tally(Counts):
    """What was tried, and what came of it.

    Attributes:
        kills: rounds in which processes were killed, by what was killed. points: of them at named steps, by the last.
        instants: at drawn ones. spared: rounds that ended before their kill.
        reopened: by who went on after a kill. replaced: sets of parts moved away that were read.
        lost: rounds after which the last commit was not there, or rows differed. failures: in words.
    """

    kills: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    instants: int = 0
    spared: int = 0
    reopened: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    lost: int = 0
    failures: list[str] = field(default_factory=list)


class LostError(Exception):
    """The run is not at its last commit, or a process failed that should not."""


def values_of(name: str, step: int) -> torch.Tensor:
    """What a table's rows are after a step."""
    _, rows, dim = TABLES[name]
    return torch.arange(rows * dim, dtype=torch.float32).reshape(rows, dim) + 1000 * step


def own_values(table: Any, step: int) -> torch.Tensor:
    """What a rank has of them."""
    rows, columns = table.rows, table.columns
    return values_of(table.name, step)[rows.start : rows.stop, columns.start : columns.stop].contiguous()


def is_right(store: Any, step: int) -> bool:
    """Whether the rows that a store, or a rank's part of one, has are those of a step."""
    for name, table in store.tables.items():
        wanted, local = values_of(name, step), getattr(table, "local", table)
        first = 0
        if local is not table:  # a rank's part
            wanted, first = own_values(table, step), table.rows.start
        if step and len(wanted) and not torch.equal(local.read(torch.arange(first, first + len(wanted))), wanted):
            return False
    return len(store.tables) == len(TABLES) or not step


def arm(doom: Doom | None, report: Callable[..., None]) -> None:
    """Have this process kill itself, and say where it is."""
    seen, total = Counter[str](), itertools.count(1)

    def reach(name: str) -> None:
        seen[name] += 1
        count = seen[name] if doom is not None and doom.point else next(total)
        if doom is not None and doom.point in ("", name) and count == doom.times:
            report("struck", point=name)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    killpoints.hook = reach


def live(
    folder: Path, meet: Path, rank: int, report: Callable[..., None], *, size: int, plan: Plan, doom: Doom | None
) -> None:
    """A rank: open, look, and commit the next step."""
    vars(gone)["_GRACE_SECONDS"] = 0.1  # several may be killed, and nobody asks which
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    timeout = timedelta(seconds=_GROUP_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size, timeout=timeout)
    report("joined")
    arm(doom if doom is not None and rank in doom.ranks else None, report)
    with open_sharded(folder, plan=plan, ddr="1MiB", threads=1) as store:
        step = store.extra.get("step", 0)
        if not step:  # what is resharded later, by whatever plan, keeps the kinds of the others
            for name, (kind, rows, dim) in TABLES.items():
                config = tierstore.TableConfig(name=name, num_embeddings=rows, embedding_dim=dim)
                store.create_table(config, sharding_type=None if name in plan.tables else kind)  # type: ignore[arg-type]
        report("opened", step=step, right=is_right(store, step))
        for table in store.tables.values():
            if table.rows:
                table.local.write(torch.arange(table.rows.start, table.rows.stop), own_values(table, step + 1))
        store.commit(extra={"step": step + 1})
        report("committed", step=step + 1)
    report("closed")


def look(folder: Path, report: Callable[..., None]) -> None:
    """One process that reads the store, and those that it replaced."""
    with tierstore.open(folder, mode="r", ddr="1MiB", threads=1) as store:
        report("opened", step=store.extra["step"], right=is_right(store, store.extra["step"]))
    for replaced in folder.glob("replaced-at-*"):
        try:
            found = tierstore.open(replaced, mode="r", ddr="1MiB", threads=1)
        except tierstore.errors.StoreNotFoundError:  # a part of an attempt that was cut short, or without a commit
            continue
        with found as store:
            report("replaced", right=is_right(store, store.extra["step"]))


class Ranks:
    """So many processes that take up a store; see ``live``."""

    def __init__(self, folder: Path, size: int, plan: Plan, doom: Doom | None = None) -> None:
        meet = folder.with_name(f"meet-{time.monotonic_ns()}")
        self.size = size
        body = partial(live, folder, meet, plan=plan, size=size, doom=doom)
        self.processes = [Process(f"rank {rank} of {size}", partial(body, rank)) for rank in range(size)]
        started = self.processes[0].wait_for("joined")["at"]
        doomed = doom.ranks if doom is not None and not doom.times else ()
        if doomed and doom is not None:
            time.sleep(max(0.0, started + doom.seconds - time.monotonic()))
            for rank in doomed:
                self.processes[rank].kill()
        for rank in set(range(size)) - set(doomed):
            self.processes[rank].join()
        self.seconds = time.monotonic() - started
        meet.unlink(missing_ok=True)

    def of(self, label: str) -> list[dict[str, Any]]:
        return [report for process in self.processes for report in process.of(label)]

    @property
    def killed(self) -> list[Process]:
        return [process for process in self.processes if process.status == -signal.SIGKILL]

    def require_ended(self) -> None:
        """LostError unless all ended well, or ranks that lost others said so."""
        for process in self.processes:
            words = "".join(report["words"] for report in process.of("failed"))
            is_told = bool(self.killed) and ("RankError" in words or "RuntimeError" in words or "Dist" in words)
            if process.status not in (0, -signal.SIGKILL) and not is_told:
                raise LostError(f"{process.name} ended with {process.status}: {words}")


class Rounds:
    """One store, taken up again and again."""

    def __init__(self, folder: Path, generator: random.Random) -> None:
        self.folder, self.store = folder, folder / "run"
        self.generator = generator
        self.tally = Tally()
        self.size, self.step, self.seconds = 2, 0, 1.0
        self.again = 0  # how many ranks were killed, if as many are to try once more
        self.go_on(self.size, "")
        self.go_on(3, "")

    def dooms(self, points: Iterator[str]) -> Iterator[tuple[int, Doom]]:
        """(number of ranks, doom), for ever; half at named steps, in turn."""
        draw = self.generator
        while True:
            size = self.again or draw.choice([each for each in SIZES if each != self.size])
            count = draw.choice([1, size, draw.randint(1, size)])
            ranks = tuple(draw.sample(range(size), count))
            kind = draw.random()
            if kind < 0.5:
                is_stale = self.again and draw.random() < 0.5
                point = "reshard: stale part set aside" if is_stale else next(points)
                yield size, Doom(ranks, point, 1 if is_stale else draw.choice([1, 1, 1, 2]))
            elif kind < 0.75:
                yield size, Doom(ranks, "", draw.randint(1, 40))
            else:
                yield size, Doom(ranks, seconds=draw.uniform(0, _OPENING_SHARE * self.seconds))

    def run(self, kills: int) -> Tally:
        points = itertools.cycle([*killpoints.COPY_POINTS, *_COMMIT_POINTS])
        dooms = self.dooms(points)
        while sum(self.tally.kills.values()) < kills and len(self.tally.failures) < MAX_FAILURES:
            size, doom = next(dooms)
            self.again = 0
            if sum(self.tally.kills.values()) % 25 == 0:
                print(json.dumps(vars(self.tally)), file=sys.stderr, flush=True)
            what = f"{self.size} ranks at step {self.step}, then {size} with {doom}"
            try:
                if self.generator.random() < _COMMAND_SHARE:
                    self.kill_command(size, doom)
                else:
                    self.kill_ranks(size, doom)
            except (LostError, RuntimeError) as error:
                self.tally.lost += 1
                self.tally.failures.append(f"{what}: {error}")
                shutil.rmtree(self.store, ignore_errors=True)
                self.size, self.step = 2, 0
                self.go_on(self.size, "")
        return self.tally

    def plan(self, size: int) -> Plan:
        """Of a table whose sharding changes from one attempt to the next."""
        kind = self.generator.choice(["row_wise", "table_wise"])
        ranks = tuple(range(size)) if kind == "row_wise" else (self.generator.randrange(size),)
        return Plan(size, {"a": Sharding.checked(kind, ranks, "rows", size)})

    def note(self, what: str, doom: Doom, struck: list[dict[str, Any]]) -> None:
        self.tally.kills[what] += 1
        if doom.times:
            self.tally.points[struck[-1]["point"] if struck else doom.point] += 1
        else:
            self.tally.instants += 1

    def kill_ranks(self, size: int, doom: Doom) -> None:
        ranks = Ranks(self.store, size, self.plan(size), doom)
        ranks.require_ended()
        if any(report["step"] != self.step or not report["right"] for report in ranks.of("opened")):
            raise LostError(f"ranks opened {ranks.of('opened')}")
        possible = {self.step + bool(ranks.of("committed"))}
        if ranks.of("opened"):
            possible.add(self.step + 1)
        if not ranks.killed:
            self.tally.spared += 1
            self.seconds = ranks.seconds
            self.size, self.step = size, self.step + 1
            return
        self.note(f"{len(ranks.killed)} of {size} ranks", doom, ranks.of("struck"))
        if possible == {self.step} and self.generator.random() < _AGAIN_SHARE:
            self.again = size
            return
        then = self.generator.choice(["the new number", "the old number", "one process", "another number"])
        if then == "one process":
            self.read(possible)  # which of two it is until ranks open it: no commit returned
        other = self.generator.choice(SIZES)
        next_size = {"the new number": size, "the old number": self.size}.get(then, other)
        self.go_on(next_size, then, possible)

    def go_on(self, size: int, then: str, possible: set[int] | None = None) -> None:
        """Take up the store by so many ranks, none of which is killed."""
        ranks = Ranks(self.store, size, self.plan(size))
        ranks.require_ended()
        steps = {report["step"] for report in ranks.of("opened")}
        if len(ranks.of("closed")) < size or len(steps) != 1 or not all(each["right"] for each in ranks.of("opened")):
            raise LostError(f"{size} ranks, {then}, opened {ranks.of('opened')}, not {possible or self.step}")
        if not steps <= (possible or {self.step}):
            raise LostError(f"{size} ranks, {then}, opened step {steps}, not {possible or self.step}")
        self.size, self.step = size, max(steps) + 1
        if then:
            self.tally.reopened[then] += 1
        self.read({self.step})
        for replaced in self.store.glob("replaced-at-*"):
            shutil.rmtree(replaced)

    def read(self, possible: set[int]) -> int:
        """The step that one process finds."""
        process = Process("one process", lambda report: look(self.store, report))
        process.join()
        found = process.of("opened")
        if process.status or not found or found[0]["step"] not in possible or not found[0]["right"]:
            raise LostError(f"one process read {found}, not {possible}: {process.of('failed')}")
        if not all(report["right"] for report in process.of("replaced")):
            raise LostError("a set of parts that was replaced is not what it was")
        self.tally.replaced += len(process.of("replaced"))
        step: int = found[0]["step"]
        return step

    def kill_command(self, size: int, doom: Doom) -> None:
        """``tierstore reshard``, killed, and called again."""
        target, num_ranks = self.folder / "copy", self.generator.choice([0, size])

        def copy(report: Callable[..., None], doom: Doom | None) -> None:
            arm(doom, report)
            reshard(self.store, target, plan=None, num_ranks=num_ranks, progress=lambda *_: None)

        doom = doom._replace(times=doom.times or 1, point=doom.point if doom.times else "")
        first = Process("reshard", lambda report: copy(report, doom))
        first.join()
        if first.status == -signal.SIGKILL:
            self.note("tierstore reshard", doom, first.of("struck"))
            again = Process("reshard again", lambda report: copy(report, None))
            again.join()
            is_whole = any("is not empty" in each["words"] for each in again.of("failed"))
            if again.status and not is_whole:
                raise LostError(f"the command, called again: {again.of('failed')}")
            self.tally.reopened["the command again"] += 1
        elif first.status:
            raise LostError(f"the command: {first.of('failed')}")
        else:
            self.tally.spared += 1
        reader = Process("reader", lambda report: look(target, report))
        reader.join()
        found = reader.of("opened")
        if not found or found[0]["step"] != self.step or not found[0]["right"]:
            raise LostError(f"the copy has {found}: {reader.of('failed')}")
        shutil.rmtree(target)


_COMMIT_POINTS: Final = tuple(
    name
    for name in killpoints.POINTS
    if not name.startswith(("recovery", "cleaning", "rollback", "prune", "write-back: rows chosen"))
)
"""Those that a new part passes."""


def _load_kernels(folder: Path) -> None:
    """Here, once, and not in every process."""
    with tierstore.open(folder, ddr="1MiB", threads=1) as store:
        for name, (_, rows, dim) in TABLES.items():
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=rows, embedding_dim=dim))
            store[name].write(torch.arange(rows), values_of(name, 1))
        store.commit(extra={"step": 1})
    sharded = folder.with_name(f"{folder.name} sharded")
    reshard(folder, sharded, plan=None, num_ranks=2, progress=lambda *_: None)
    with tierstore.open(sharded, mode="r", ddr="1MiB", threads=1) as store:
        assert is_right(store, 1)


def kill_ranks(folder: Path, *, kills: int, seed: int) -> Tally:
    """Kill ranks that reshard a store in a folder."""
    _load_kernels(folder / "warm")
    return Rounds(folder, random.Random(seed)).run(kills)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.crash.resharding", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--dir", type=Path, help="where the store is made [a temporary folder]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="resharding-", dir=given.dir))
    tally = kill_ranks(folder, kills=given.kills, seed=given.seed)
    if not tally.failures:
        shutil.rmtree(folder)
    print(json.dumps(vars(tally)))


if __name__ == "__main__":
    main()

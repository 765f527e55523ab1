"""Kill a training run: ``python -m bench.crash --seed 1 --kills 20``; prints one line of JSON, what came of it.

One process does it, so that those it forks find everything loaded and compiled. Places and times are drawn from the
seed and the number of the chain; ``--chain N --seed S`` repeats one chain.
"""

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from .chain import Chain, Course, Tally, point_dooms, random_dooms
from .inspection import inspect
from .life import Settings, expected_states, live, train
from .plan import make_plan
from .processes import Ending, fork

__all__ = ["main"]

MAX_FAILURES = 10
"""Where so much is wrong, more kills tell nothing new."""


def _settings(generator: random.Random) -> Settings:
    return Settings(
        policy=generator.choice(["lru", "lfu"]),
        keep=generator.choice([2, 3, 4]),
        ddr=generator.choice(["496KiB", "512KiB"]),
        hbm=generator.choice(["0", "0", "160KiB"]),
        growth_bytes=generator.choice([64, 256, 1024]) * 2**10,
        depth=generator.choice([0, 2, 2]),
        stall_seconds=generator.choice([0, 0, 0.003]),
    )


def _course(folder: Path, num_commits: int) -> Course:
    """The plan, what it must lead to, and how long it takes without a kill."""
    plan, warm = make_plan(num_commits), make_plan(3)
    course = Course(plan, expected_states(folder / "expected", plan))
    # Here, before anything is forked: what is loaded and compiled now is loaded and compiled in every process.
    train(folder / "warm", warm, Settings(), lambda *_, **__: None)
    inspect(folder / "warm", course.states, lambda *_, **__: None, boot=0, may_lack=False)
    ending = fork(
        lambda report: live(folder / "timed", plan, Settings(), report, boot=1, kill_at=("", 0)),
        folder / "timed stacks",
    )
    return _timed(course, ending)


def _timed(course: Course, ending: Ending) -> Course:
    if ending.how != "ended":
        raise SystemExit(f"the run that nobody killed {ending.how}: {ending.words}")
    at = {report["label"]: report["at"] for report in ending.reports}
    begun = {report["position"]: report["at"] for report in ending.reports if report["label"] == "begin"}
    ends = {report["position"]: report["at"] for report in ending.reports if report["label"] == "durable"}
    return course._replace(
        whole=at["closed"] - at["start"],
        opening=at["opened"] - at["start"],
        commit=median(ends[position] - begun[position] for position in begun),
        closing=at["closed"] - at["closing"],
    )


def _rounds(course: Course, folder: Path, given: argparse.Namespace) -> Tally:
    """First a chain that is not killed, then some killed at each point, then at random until there were enough."""
    tally = Tally()

    def run(number: int, name: str) -> None:
        generator = random.Random(f"{given.seed} {number} {name}")
        left = given.kills - tally.random_kills
        dooms = {
            "not killed": iter(()),
            "named points": point_dooms(generator),
            "random": itertools.islice(random_dooms(course, generator), left),
        }[name]
        chain = Chain(
            folder / f"{name} {number}", course, _settings(generator), f"--seed {given.seed} --chain {number} ({name})"
        )
        tally.add(chain.run(dooms))

    names = ["not killed", *["named points"] * given.rounds]
    for number in itertools.count() if given.chain is None else [given.chain]:
        is_enough = number >= len(names) and tally.random_kills >= given.kills
        if is_enough or len(tally.failures) >= MAX_FAILURES:
            break
        run(number, names[number] if number < len(names) else "random")
        print(f"chain {number}: {tally.random_kills} + {tally.point_kills} kills", file=sys.stderr, flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.crash", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20, help="at random instants")
    parser.add_argument("--rounds", type=int, default=1, help="over all named points")
    parser.add_argument("--commits", type=int, default=20, help="of a run")
    parser.add_argument("--chain", type=int, help="only this one")
    parser.add_argument("--dir", type=Path, help="where stores are made; those that failed stay [a temporary folder]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=given.dir))
    course = _course(folder, given.commits)
    tally = _rounds(course, folder, given)
    times = {name: getattr(course, name) for name in ("whole", "opening", "commit", "closing")}
    if not tally.failures:
        shutil.rmtree(folder)
    print(json.dumps(vars(tally) | {"seconds": times}))


if __name__ == "__main__":
    main()

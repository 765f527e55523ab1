"""Kill training runs: ``python -m bench.crash.runs --seed 1 --kills 20`` prints one line of JSON, what came of it.

One process does it, so that those it forks find everything loaded and compiled. Places and times are drawn from the
seed and the number of the chain; ``--chain N --seed S`` repeats one chain.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import torch

from ..data import ROOT
from .chain import Chain, Course, Doom, Tally, point_dooms, random_dooms
from .inspection import inspect
from .life import Settings, expected_states, live, train
from .plan import make_plan
from .processes import fork

__all__ = ["Outcome", "kill_runs"]

_MAX_FAILURES: Final = 10
"""Where so much is wrong, more kills tell nothing new."""
_TIMES: Final = ("whole", "opening", "commit", "closing")
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""
}  # fmt: skip
"""Only a process without other threads may be forked; a graphics processor would bring some."""


class Outcome(NamedTuple):
    """``seconds``: what parts of a run take that is not killed, in the first process."""

    tally: Tally
    seconds: dict[str, float]


def kill_runs(folder: Path, *, kills: Sequence[int], rounds: int, commits: int, seed: int) -> Outcome:
    """One process for each of ``kills``, with a seed of its own from ``seed`` on; the others are its arguments.

    Raises:
        RuntimeError: one of them failed itself.
    """
    common = [sys.executable, "-m", "bench.crash.runs", "--dir", folder, "--rounds", rounds, "--commits", commits]
    processes = [
        subprocess.Popen(
            [*map(str, [*common, "--seed", seed + number, "--kills", count])],
            cwd=ROOT, env=os.environ | _ONE_THREAD | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        )
        for number, count in enumerate(kills)
    ]  # fmt: skip
    tally, seconds = Tally(), []
    try:
        for process in processes:
            out, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}: {out}")
            found = json.loads(out.splitlines()[-1])
            seconds.append(found.pop("seconds"))
            tally.add(found)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Outcome(tally, seconds[0])


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
    plan = make_plan(num_commits)
    states = expected_states(folder / "expected", plan)
    # Here, before anything is forked: what is loaded and compiled now is loaded and compiled in every process.
    train(folder / "warm", make_plan(3), Settings(), lambda *_, **__: None)
    inspect(folder / "warm", states, lambda *_, **__: None, boot=0, may_lack=False)
    ending = fork(
        lambda report: live(folder / "timed", plan, Settings(), report, boot=1, kill_at=("", 0)),
        folder / "timed stacks",
    )
    if ending.how != "ended":
        raise SystemExit(f"the run that nobody killed {ending.how}: {ending.words}")
    at = {report["label"]: report["at"] for report in ending.reports}
    begun, ends = (
        {report["position"]: report["at"] for report in ending.reports if report["label"] == label}
        for label in ("begin", "durable")
    )
    commit = median(ends[position] - begun[position] for position in begun)
    opening, closing = at["opened"] - at["start"], at["closed"] - at["closing"]
    return Course(plan, states, at["closed"] - at["start"], opening, commit, closing)


def _rounds(course: Course, folder: Path, given: argparse.Namespace) -> Tally:
    """First a chain that is not killed, then some killed at each point, then at random until there were enough."""
    tally, names = Tally(), ["not killed", *["named points"] * given.rounds]
    for number in itertools.count() if given.chain is None else [given.chain]:
        is_enough = number >= len(names) and tally.random_kills >= given.kills
        if is_enough or len(tally.failures) >= _MAX_FAILURES:
            break
        name = names[number] if number < len(names) else "random"
        generator = random.Random(f"{given.seed} {number} {name}")
        dooms = iter(list[Doom]())
        if name == "named points":
            dooms = point_dooms(generator)
        elif name == "random":
            dooms = itertools.islice(random_dooms(course, generator), given.kills - tally.random_kills)
        repeated = f"--seed {given.seed} --chain {number} ({name})"
        tally.add(Chain(folder / f"{name} {number}", course, _settings(generator), repeated).run(dooms))
        print(f"chain {number}: {tally.random_kills} + {tally.point_kills} kills", file=sys.stderr, flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.crash.runs", description=__doc__)
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
    if not tally.failures:
        shutil.rmtree(folder)
    print(json.dumps(vars(tally) | {"seconds": {name: getattr(course, name) for name in _TIMES}}))


if __name__ == "__main__":
    main()

"""Part "kills": ranks are killed one after another while they train, and torchrun starts them again."""

import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from ..common import Goal, Run, Table
from ..parts import Part, Told
from . import counted
from .torchrun import begin, summary_of

__all__ = ["PART"]

RANKS: Final = 2
_MOST_RESTARTS: Final = 10_000


def _workers(torchrun: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The ranks that are there."""
    try:
        found: list[psutil.Process] = psutil.Process(torchrun.pid).children()
        return found
    except psutil.NoSuchProcess:
        return []


def _kill_until(torchrun: "subprocess.Popen[bytes]", end: float, every_s: float, generator: random.Random) -> int:
    """Kill a rank now and then until ``end`` of the monotonic clock; how many were killed."""
    killed, due = 0, time.monotonic() + every_s
    while due < end and torchrun.poll() is None:
        time.sleep(max(0.0, due - time.monotonic()))
        if found := _workers(torchrun):
            generator.choice(found).kill()
            killed += 1
            due += every_s
        else:
            due += every_s / 50
    return killed


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    settings = {
        "train.epochs": config["kills_epochs"],
        "data.train_rows": config["kills_rows"],
        "train.commit_every": config["kills_commit_every"],
    }
    with tempfile.TemporaryDirectory(dir=request.folder) as name:
        whole = summary_of(Path(name) / "whole", begin(Path(name) / "whole", RANKS, settings))
        folder, begun = Path(name) / "killed", time.monotonic()
        run = begin(folder, RANKS, settings, restarts=_MOST_RESTARTS, module=counted.__name__)
        try:
            end = begun + config["kills_seconds"]
            killed = _kill_until(run, end, config["kills_every_s"], random.Random(config["seed"]))
            commits = (folder / "log").read_text(errors="replace").count("committed version")
            found = summary_of(folder, run)
            done = counted.counts_in(folder / counted.FILE)
        finally:
            run.kill()
    return {
        "kills": killed,
        "restarts": done.restarts,
        "every_s": config["kills_every_s"],
        "seconds": time.monotonic() - begun,
        "whole_seconds": whole["seconds"],
        "commits_between_kills": commits,
        "steps": found["step"],
        "steps_redone": done.steps - found["step"],
        "last_process_steps": found["rows"] / whole["rows"] * whole["step"],
        "bits": [whole["bits"], found["bits"]],
        "auc": [whole["test"]["auc"], found["test"]["auc"]],
    }


def _tell(figures: dict[str, Any]) -> Told:
    equal = figures["bits"][0] == figures["bits"][1]
    rows = [
        ["kills of a rank", f"{figures['kills']:,}"],
        ["restarts of all ranks by torchrun", f"{figures['restarts']:,}"],
        ["commits while ranks were killed", f"{figures['commits_between_kills']:,}"],
        ["steps of the run", f"{figures['steps']:,}"],
        ["steps done twice or oftener, counted each time", f"{figures['steps_redone']:,}"],
        ["steps after the last kill", f"{figures['last_process_steps']:,.0f}"],
        ["seconds, killed and started again", f"{figures['seconds']:.0f}"],
        ["seconds of training without a kill", f"{figures['whole_seconds']:.0f}"],
        ["bits (SHA-256)", figures["bits"][1][:16]],
    ]
    title = f"a rank of {RANKS} is killed every {figures['every_s']:g} s"
    goals = [
        Goal(name="kills: the same bits as without one", value=int(equal), exactly=1),
        Goal(name="kills: test AUC off that without one", value=abs(figures["auc"][0] - figures["auc"][1]), exactly=0),
    ]
    note = (
        "Kills: examples/criteo.toml under torchrun, SIGKILL to a rank drawn at random, whatever it does then, as "
        "starting or opening; bits are those of all rows and dense weights."
    )
    return Told(tables=[Table(title=title, columns=["", ""], rows=rows)], goals=goals, notes=[note])


PART: Final = Part(_measure, _tell)

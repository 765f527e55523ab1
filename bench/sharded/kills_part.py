"""Part "kills": ranks are killed one after another while they train, and torchrun starts them again."""

import contextlib
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
_POLL_S: Final = 0.05


def _workers(torchrun: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """The ranks that are there."""
    try:
        children = psutil.Process(torchrun.pid).children()
        return [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def _kill_until(
    torchrun: "subprocess.Popen[bytes]", steps: Path, end: float, every_s: float, generator: random.Random
) -> dict[str, int]:
    """Kill a rank every so many seconds until ``end`` of the monotonic clock; counts what they did when killed.

    Every second kill waits until ranks have done a step since the last one: starting may take longer than ``every_s``.
    """
    killed, seen = {"training": 0, "starting": 0}, 0

    def is_over() -> bool:
        return time.monotonic() >= end or torchrun.poll() is not None

    def has_trained() -> bool:
        return steps.exists() and steps.stat().st_size > seen

    while not is_over():
        time.sleep(every_s)
        if sum(killed.values()) % 2 == 0 and not has_trained():
            while not has_trained() and not is_over():
                time.sleep(_POLL_S)
            time.sleep(generator.uniform(0, every_s))
        if (found := _workers(torchrun)) and not is_over():
            killed["training" if has_trained() else "starting"] += 1
            with contextlib.suppress(psutil.NoSuchProcess):
                generator.choice(found).kill()
            seen = steps.stat().st_size if steps.exists() else 0
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
            steps, generator = folder / counted.FILE, random.Random(config["seed"])
            killed = _kill_until(run, steps, end, config["kills_every_s"], generator)
            commits = (folder / "log").read_text(errors="replace").count("committed version")
            found = summary_of(folder, run)
            done = counted.counts_in(steps)
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
        ["kills of a rank since whose start ranks had trained", f"{figures['kills']['training']:,}"],
        ["kills of a rank that was starting", f"{figures['kills']['starting']:,}"],
        ["restarts of all ranks by torchrun", f"{figures['restarts']:,}"],
        ["commits while ranks were killed", f"{figures['commits_between_kills']:,}"],
        ["steps of the run", f"{figures['steps']:,}"],
        ["steps done twice or oftener, counted each time", f"{figures['steps_redone']:,}"],
        ["steps after the last kill", f"{figures['last_process_steps']:,.0f}"],
        ["seconds, killed and started again", f"{figures['seconds']:.0f}"],
        ["seconds of training without a kill", f"{figures['whole_seconds']:.0f}"],
        ["bits (SHA-256)", figures["bits"][1][:16]],
    ]
    title = f"a rank of {RANKS} is killed, {figures['every_s']:g} s after the last or later"
    goals = [
        Goal(name="kills: the same bits as without one", value=int(equal), exactly=1),
        Goal(name="kills: commits that later starts went on from", value=figures["commits_between_kills"], at_least=10),
        Goal(name="kills: test AUC off that without one", value=abs(figures["auc"][0] - figures["auc"][1]), exactly=0),
    ]
    note = (
        "Kills: examples/criteo.toml under torchrun, SIGKILL to a rank drawn at random, whatever it does then; "
        "every second kill waits until ranks have trained since the last. Bits are those of all rows and dense weights."
    )
    return Told(tables=[Table(title=title, columns=["", ""], rows=rows)], goals=goals, notes=[note])


PART: Final = Part(_measure, _tell)

"""A process killed at any instant leaves a whole commit; a call that an exception cuts short leaves every row right."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.data import ROOT
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.system.killpoints import POINTS

from . import cuts

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="a process under test has no time for plain Python")


def killed(folder: Path, program: str, **settings: int) -> Any:
    """What a program prints that kills processes. One with threads may not be forked; a GPU would bring some."""
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    alone |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", f"tests.faults.{program}", "--dir", str(folder), *flags]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | alone, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-20_000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "settings",
    [
        {"kills": 3, "rounds": 1, "commits": 12, "seed": 2},
        *(
            pytest.param({"kills": 250, "rounds": 5, "commits": 20, "seed": seed}, marks=pytest.mark.soak)
            for seed in (1, 2)
        ),
    ],
)
def test_a_killed_run_loses_nothing(tmp_path: Path, settings: dict[str, int]) -> None:
    """At every named point, and at random instants."""
    tally = killed(tmp_path, "kills", **settings)
    assert tally["random"] == settings["kills"]
    assert all(tally[name] >= settings["rounds"] for name in POINTS if not name.startswith("rollback"))
    assert tally["ended"] > settings["rounds"]


@pytest.mark.parametrize(
    ("kills", "seed"), [(4, 3), *(pytest.param(150, seed, marks=pytest.mark.soak) for seed in (1, 2))]
)
def test_servers_show_what_was_approved_whoever_is_killed(tmp_path: Path, kills: int, seed: int) -> None:
    """Servers, what writes for them, publishers with a canary."""
    assert sum(killed(tmp_path, "served", kills=kills, seed=seed).values()) >= kills


# Some instants are in generators and threads that end; what is raised there is shown, and goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("number", "seed"), [(180, 1), *(pytest.param(2000, 1000 * seed, marks=pytest.mark.soak) for seed in range(1, 11))]
)
def test_calls_cut_short_leave_every_row_right(
    tmp_path: Path, number: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups and updates over all tiers; commits, tables made, changed and dropped, rollbacks, backups, reshards."""
    monkeypatch.setattr(logging.getLogger("tierstore"), "disabled", True)
    tally = cuts.live(tmp_path, cuts=number, seed=seed)
    assert tally["cut"] >= number
    assert tally["raised"] > number / 4, "hardly any call was cut short"

"""A process killed at any instant leaves a whole commit; a call that an exception cuts short leaves every row right."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.crash.runs import kill_runs
from bench.cut import steps
from bench.cut.instants import Cutter
from bench.cut.life import Found, live
from bench.data import ROOT
from tests.io.support import open_tier
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.system.killpoints import POINTS

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="a process under test has no time for plain Python")


def kill(folder: Path, **arguments: Any) -> None:
    tally = kill_runs(folder, **arguments).tally
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.random_kills == sum(arguments["kills"])
    assert set(tally.points) == set(POINTS)
    assert tally.reopened == tally.kills
    assert tally.rows_differ == 0
    assert tally.ended >= len(arguments["kills"]) * (1 + arguments["rounds"])
    assert tally.final_bits_differ == 0


def test_a_killed_run_loses_nothing(tmp_path: Path) -> None:
    kill(tmp_path, kills=[3], rounds=1, commits=12, seed=2)


@pytest.mark.soak
def test_a_run_killed_very_often_loses_nothing(tmp_path: Path) -> None:
    kill(tmp_path, kills=[250, 250], rounds=5, commits=20, seed=1)


def kill_servers(folder: Path, kills: int, seed: int) -> None:
    settings = ["--kills", str(kills), "--seed", str(seed), "--dir", str(folder)]
    command = [sys.executable, "-m", "bench.crash.served", *settings]
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    found = json.loads(subprocess.run(command, cwd=ROOT, env=os.environ | alone, stdout=-1, check=True).stdout)
    assert not found["failures"], "\n".join(found["failures"])
    assert sum(found["kills"].values()) >= kills


def test_servers_show_what_was_approved_whoever_is_killed(tmp_path: Path) -> None:
    kill_servers(tmp_path, 4, seed=3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_servers_killed_very_often_show_what_was_approved(tmp_path: Path, seed: int) -> None:
    kill_servers(tmp_path, 150, seed)


def cut(folder: Path, cuts: int, seed: int, live: Callable[..., Found] = live) -> None:
    level = logging.getLogger("tierstore").level
    logging.getLogger("tierstore").setLevel(logging.CRITICAL)
    try:
        found = live(folder, cuts=cuts, seed=seed)
    finally:
        logging.getLogger("tierstore").setLevel(level)
    assert not found.failures, "\n".join(found.failures)
    assert (found.wrong_rows, found.pinned) == (0, 0)
    assert found.cuts.total() >= cuts
    assert found.raised > cuts / 4, "hardly any call was cut short"


# Some instants are in generators and threads that end; what is raised there is shown, and goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", [1])
def test_calls_cut_short_at_any_instant_leave_every_row_right(tmp_path: Path, seed: int) -> None:
    cut(tmp_path, 280, seed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cuts", [12, pytest.param(400, marks=pytest.mark.soak)])
def test_an_error_between_any_two_steps_leaves_the_store_at_work(tmp_path: Path, cuts: int) -> None:
    """Of commits, tables made, changed and dropped, rollbacks, backups and reshards."""
    cut(tmp_path, cuts, 1, steps.live)


def test_a_lease_that_is_cut_short_keeps_no_tier_open(tmp_path: Path) -> None:
    cutter, instant = Cutter(), 0
    error: BaseException | None = MemoryError()

    def lease() -> None:
        with tier.lease():
            pass

    with cutter.installed():
        while error is not None:
            instant += 1
            tier = open_tier(tmp_path)
            lease()  # makes the map
            _, error = cutter.run(lease, kind="memory", instant=instant, in_main=True)
            closing = threading.Thread(target=tier.close, daemon=True)
            closing.start()
            closing.join(30)
            assert not closing.is_alive(), f"closing waits for a lease that was cut short at {cutter.place}"
    assert instant > 8


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", range(1000, 10_000, 1000))
def test_many_calls_cut_short_leave_every_row_right(tmp_path: Path, seed: int) -> None:
    cut(tmp_path, 2000, seed)

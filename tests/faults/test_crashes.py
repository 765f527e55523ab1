"""Promise 2: a process killed at any instant leaves a whole commit, and the next one ends in the bits that were due."""

from pathlib import Path
from typing import Any

import pytest

from bench.crash.hosts import kill_runs
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.system.killpoints import POINTS

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="a process under test has no time for plain Python")


def kill(folder: Path, **arguments: Any) -> None:
    """Kill runs, and see that nothing was lost."""
    tally = kill_runs(folder, **arguments).tally
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.random_kills == sum(arguments["kills"])
    assert set(tally.points) == set(POINTS)
    assert tally.reopened == tally.kills
    assert tally.rows_differ == 0
    assert tally.ended >= len(arguments["kills"]) * (1 + arguments["rounds"])
    assert tally.final_bits_differ == 0


def test_a_killed_run_loses_nothing(tmp_path: Path) -> None:
    """At every named point once, and at a few random instants."""
    kill(tmp_path, kills=[3], rounds=1, commits=12, seed=2)


@pytest.mark.soak
def test_a_run_killed_very_often_loses_nothing(tmp_path: Path) -> None:
    kill(tmp_path, kills=[250, 250], rounds=5, commits=20, seed=1)

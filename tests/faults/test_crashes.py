"""Promise 2: a process killed at any instant leaves a whole commit, and the next one ends in the bits that were due."""

from pathlib import Path
from typing import Any

import pytest

from bench.crash.hosts import kill_runs
from bench.crash.promise import Promise, PromiseError
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


ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def heard(*reports: tuple[str, int, int]) -> Promise:
    """Of a store that keeps two versions, after (label, position, number)."""
    promise = Promise(keep=2)
    for label, position, number in reports:
        promise.hear({"label": label, "position": position, "version": number, "numbers": []})
    return promise


def test_a_promise_is_the_last_durable_version_or_one_begun_since() -> None:
    durable = ("begin", 5, 0), ("durable", 5, 1), ("begin", 9, 0), ("durable", 9, 2)
    for reports, head, numbers in [
        ((), (), ()),
        (durable, (5, 9), (1, 2)),
        ((*durable, ("begin", 12, 0)), (5, 9), (1, 2)),
        ((*durable, ("begin", 12, 0)), (9, 12), (2, 3)),
        ((*durable, ("going back", 5, 0)), (5, 9), (1, 2)),
        ((*durable, ("going back", 5, 0)), (5,), (1,)),
        ((*durable, ("going back", 5, 0), ("back", 5, 0)), (5,), (1,)),
    ]:
        heard(*reports).check(head, numbers)
    for reports, head, numbers, words in [
        (durable, (5,), (1,), "positions kept"),
        (durable, (5, 9), (1, 3), "were committed as"),
        (durable, (5, 9), (2, 1), "do not rise"),
        ((*durable, ("begin", 12, 0), ("durable", 12, 3)), (5, 9), (1, 2), "positions kept"),
        ((*durable, ("begin", 12, 0)), (5, 9, 12), (1, 2, 3), "positions kept"),
        ((*durable, ("going back", 5, 0), ("back", 5, 0)), (5, 9), (1, 2), "positions kept"),
    ]:
        with pytest.raises(PromiseError, match=words):
            heard(*reports).check(head, numbers)

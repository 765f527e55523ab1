"""Promise 2: a process killed at any instant leaves a whole commit, and the next one ends in the bits that were due."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.crash.hosts import kill_runs
from bench.crash.plan import commits, make_plan, stretch
from bench.crash.promise import Promise, PromiseError
from bench.crash.state import Difference, State
from tests.children import run
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


@pytest.mark.soak
def test_rows_that_change_before_they_are_written_are_missed_if_nobody_copies_them(tmp_path: Path) -> None:
    """The test of the test: without the copies of frozen rows, kills show it."""
    code = """
        import json
        from bench.crash import __main__ as program
        from tierstore.pool.writeback import WriteBack

        def begin_update(self, slots):
            self._cache.mark_dirty(slots)

        WriteBack.begin_update = begin_update
        torch.set_num_threads(1)
        sys.argv = ["crash", "--kills", "5", "--commits", "16", "--dir", sys.argv[1]]
        program.main()
        """
    found = json.loads(run(code, tmp_path, changes=ALONE).splitlines()[-1])
    assert found["failures"]
    assert found["rows_differ"] > 0


def test_a_process_is_killed_when_its_time_comes_and_a_hang_is_a_failure(tmp_path: Path) -> None:
    code = """
        import threading
        from bench.crash import processes
        from bench.crash.processes import Kill, fork

        stacks = Path(sys.argv[1])

        def sleepy(report):
            report("asleep")
            time.sleep(200)

        def wrong(report):
            raise ValueError("so wrong")

        endings = [
            fork(lambda report: report("said", word=3), stacks),
            fork(sleepy, stacks, Kill("asleep", 1, 0.0)),
            fork(sleepy, stacks, Kill("start", 1, 0.0)),
            fork(wrong, stacks),
            fork(lambda report: os.kill(os.getpid(), signal.SIGABRT), stacks),
        ]
        processes.TIME_LIMIT_S = 0.2
        endings.append(fork(sleepy, stacks))
        for ending in endings:
            said = (ending.last("said") or {}).get("word")
            words = ("so wrong", "status -6", "hung", "in sleepy")
            print(ending.how, said, *(word for word in words if word in ending.words))
        """
    lines = run(code, tmp_path / "stacks", changes=ALONE).splitlines()
    assert lines == [
        "ended 3",
        "killed None",
        "killed None",
        "failed None so wrong",
        "failed None status -6",
        "failed None hung in sleepy",
    ]


def test_a_plan_trains_commits_and_goes_back_to_each_of_the_last_two_versions() -> None:
    plan = make_plan(12)
    marks = commits(plan)
    assert len(marks) == 12
    assert marks[-1] == len(plan)
    back = {position: action.number for position, action in enumerate(plan) if action.kind == "rollback"}
    assert [[mark for mark in marks if mark <= position].index(to) for position, to in back.items()] == [2, 7]
    trained = [action.number for action in plan if action.kind == "train"]
    assert trained == list(range(len(trained)))
    position, seen = 0, 0
    while actions := stretch(plan, position):
        assert plan[position : position + len(actions)] == tuple(actions)
        seen += any(action.kind == "rollback" for action in actions)
        assert len(actions) == 1 or all(action.kind != "rollback" for action in actions)
        position += len(actions)
    assert seen == len(back)
    assert position == len(plan)


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


def test_a_number_is_not_used_twice_and_a_process_takes_up_what_was_promised() -> None:
    durable = ("begin", 5, 0), ("durable", 5, 1), ("begin", 9, 0), ("durable", 9, 2)
    with pytest.raises(PromiseError, match="was used before"):
        heard(*durable, ("going back", 5, 0), ("back", 5, 0), ("begin", 9, 0), ("durable", 9, 2))
    promise = heard(*durable, ("begin", 12, 0))
    with pytest.raises(PromiseError, match="opened at 5"):
        promise.hear({"label": "opened", "position": 5, "numbers": [1]})
    promise.hear({"label": "opened", "position": 9, "numbers": [1, 2]})
    with pytest.raises(PromiseError, match="positions kept"):
        promise.check((9, 12), (2, 3))


def test_differences_are_counted_in_rows_and_bits() -> None:
    zeros = {"t": np.zeros((4, 8), np.uint8)}
    state = State(position=3, rows=zeros, tables={"t": (1, 0.5)}, tensors={"w": np.zeros(4, np.uint8)})
    assert state.difference(state) == Difference(rows=0, bits=0, words="")
    rows = {"t": zeros["t"].copy()}
    rows["t"][2, 3], rows["t"][2, 5] = 1, 3
    tensors = {"w": np.array([0, 0, 255, 0], np.uint8)}
    found = state.difference(replace(state, rows=rows, tensors=tensors, tables={"t": (2, 0.5)}))
    assert (found.rows, found.bits) == (1, 11)
    for word in ("1 rows of table 't', the first is 2", "tensor 'w'", "(2, 0.5)"):
        assert word in found.words
    assert state.difference(replace(state, rows={})).rows == 4
    assert state.only([]).rows == {}

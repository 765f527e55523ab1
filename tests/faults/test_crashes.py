"""A process killed at any instant leaves a whole commit; a call that an exception cuts short leaves every row right."""

import json
import logging
from pathlib import Path

import pytest
import torch

import tierstore
from tests.children import run
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.system.killpoints import POINTS

from . import cuts

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="a process under test has no time for plain Python")


@pytest.mark.parametrize(
    ("kills", "rounds", "commits", "seed"),
    [(2, 1, 9, 2), *(pytest.param(250, 5, 20, seed, marks=pytest.mark.soak) for seed in (1, 2))],
)
def test_a_killed_run_loses_nothing(tmp_path: Path, kills: int, rounds: int, commits: int, seed: int) -> None:
    flags = {"--dir": tmp_path, "--kills": kills, "--rounds": rounds, "--commits": commits, "--seed": seed}
    code, words = "from tests.faults.kills import main; main()", [word for flag in flags.items() for word in flag]
    tally = json.loads(run(code, *words, timeout=7200))
    assert tally["random"] == kills
    assert all(tally[name] >= rounds for name in POINTS if not name.startswith("rollback"))
    assert tally["ended"] > rounds


ROLLED_BACK = """
from tierstore.system import killpoints

def live(folder, point):
    store = tierstore.open(folder, ddr="2MiB", threads=1, keep=3)
    table = store.create_table(table_config())
    for value in (1, 2, 3):
        table.write(torch.arange(0, 2000, value), torch.full((len(range(0, 2000, value)), 16), float(value)))
        store.commit()
    killpoints.hook = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None
    store.rollback(1)

forked(live, *sys.argv[1:])
"""


@pytest.mark.parametrize("point", [name for name in POINTS if name.startswith("rollback")])
def test_a_rollback_that_is_killed_has_gone_back_or_not(tmp_path: Path, point: str) -> None:
    """Whoever writes goes on from what is known to be on the device."""
    assert run(ROLLED_BACK, tmp_path, point) == "ended with -9\n"
    kept = {"head put": {3}, "transaction committed": {1, 3}}.get(point.removeprefix("rollback: "), {1})
    for options in ({"mode": "r"}, {"keep": 3}, {"mode": "r"}):
        with tierstore.open(tmp_path, ddr="2MiB", threads=1, **options) as store:
            expected = torch.full((2000, 16), 0.5)
            for value in range(1, store.version + 1):
                expected[::value] = value
            assert torch.equal(store["t"].read(torch.arange(2000)), expected)
            assert store.version in kept
            assert store.versions == tuple(range(1, store.version + 1))
            store.verify()


# Some instants are in generators and threads that end; what is raised there is shown, and goes no further.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("number", "seed"), [(180, 1), *(pytest.param(2000, 1000 * seed, marks=pytest.mark.soak) for seed in range(1, 11))]
)
def test_cut_calls_leave_rows_right(tmp_path: Path, number: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("tierstore"), "disabled", True)
    tally = cuts.live(tmp_path, cuts=number, seed=seed)
    assert tally["cut"] >= number
    assert tally["raised"] > number / 4, "hardly any call was cut short"

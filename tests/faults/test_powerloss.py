"""Power is lost at any instant, whatever of the writes in flight arrives: the store opens at the last commit."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.errors import TierstoreError
from tierstore.io import anchor

from .powerloss import Loss, materialise, pending, state
from .recovery import Counts, explore, other_boot, promised
from .syscalls import Recorder
from .workload import Snapshot, Trained, Workload, copied

Scenario = Callable[[Workload, Path], None]


def commits(workload: Workload, directory: Path) -> None:
    """Write-back while training, commits, a close with rows that were never committed, and an open that drops them."""
    workload.open(directory)
    for _ in range(2):
        workload.train(3)
        workload.commit()
    workload.train(3)
    shown = workload.commit()
    workload.train(3)
    workload.close()
    workload.show(shown)
    workload.open(directory)
    workload.train(1)
    workload.commit()
    workload.close()


def commits_in_the_background(workload: Workload, directory: Path) -> None:
    """Training goes on while a commit is written."""
    workload.open(directory)
    for _ in range(3):
        workload.train(2)
        workload.commit_beside(3)
    workload.train(1)
    workload.close()


def versions_kept(workload: Workload, directory: Path) -> None:
    """Several versions are kept, and gone back to."""
    workload.keep = 3
    workload.open(directory)
    commits = []
    for _ in range(4):
        workload.train(2)
        commits.append(workload.commit_beside(1))
    workload.rollback(commits[2])
    workload.train(2)
    workload.commit()
    workload.close()


SCENARIOS = [commits, commits_in_the_background, versions_kept]


def record(scenario: Scenario, scratch: Path, initial: dict[str, Trained], **settings: Any) -> Recorder:
    """Run a scenario in an empty directory."""
    (scratch / "run" / "store").mkdir(parents=True)
    with Recorder(scratch / "run", **settings) as recorder:
        workload = Workload(copied(initial), np.random.default_rng(0), recorder.mark)
        scenario(workload, scratch / "run" / "store")
    assert recorder.problems == []
    assert workload.moved > 0
    return recorder


def nothing(initial: dict[str, Trained]) -> Snapshot:
    """A store without a commit."""
    return Snapshot({}, {}, initial, version=0)


def try_states(
    scenario: Scenario,
    scratch: Path,
    initial: dict[str, Trained],
    *,
    points: int,
    states_each: int,
    least: int = 0,
    part: int = 0,
    parts: int = 1,
) -> Counts:
    """Run a scenario and lose power at so many instants of it (0: all of one part), in about so many ways each."""
    recorder = record(scenario, scratch, initial)
    (scratch / "states").mkdir()
    return explore(
        recorder,
        nothing(initial),
        scratch / "states",
        points=points,
        states_each=states_each,
        least=least,
        needs_both=True,
        generator=np.random.default_rng(part),
        part=part,
        parts=parts,
    )


@pytest.fixture(autouse=True)
def _anchors_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor, "GROWTH_BYTES", 1 << 17)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_lost_at_some_instants(scratch: Path, initial: dict[str, Trained], scenario: Scenario) -> None:
    counts = try_states(scenario, scratch, initial, points=5, states_each=5, least=24)
    print(counts)
    assert counts.crash_points >= 5
    assert counts.states >= 24
    assert counts.pending_most > 10
    assert min(counts.torn, counts.trained, counts.went_back, counts.went_ahead) > 0


PARTS = 8


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_lost_at_every_instant(scratch: Path, initial: dict[str, Trained], scenario: Scenario, part: int) -> None:
    counts = try_states(scenario, scratch, initial, points=0, states_each=16, part=part, parts=PARTS)
    print(counts)
    assert counts.states > 500
    assert min(counts.torn, counts.went_back, counts.went_ahead) > 5


def lost_again(
    scratch: Path, initial: dict[str, Trained], *, points: int, states_each: int, least: int = 0
) -> tuple[Counts, int]:
    """Lose power, and again while the store is opened and goes on; the second loss is explored."""
    recorder = record(commits, scratch, initial)
    generator = np.random.default_rng(2)
    time = next(mark.time for mark in recorder.marks if mark.label == "begun" and mark.value.version == 3)
    safe, unsafe = pending(recorder, time)
    survivors = frozenset(index for index in unsafe if generator.random() < 0.5)
    place = scratch / "first loss"
    materialise(state(recorder, safe, Loss(survivors), unsafe), place)
    (last,), _ = promised(recorder, time, nothing(initial))
    with other_boot(1), Recorder(place) as second:
        workload = Workload(copied(last.tables), generator, second.mark, serial=100)
        workload.open(place / "store").train(2)
        workload.commit()
        workload.close()
    assert second.problems == []
    (scratch / "states").mkdir()
    explored = explore(
        second,
        last,
        scratch / "states",
        points=points,
        states_each=states_each,
        least=least,
        needs_both=True,
        generator=generator,
        boots=2,
    )
    return explored, len(survivors)


def test_power_lost_again_while_the_store_recovers(scratch: Path, initial: dict[str, Trained]) -> None:
    counts, survivors = lost_again(scratch, initial, points=5, states_each=5, least=16)
    print(counts)
    assert survivors > 0
    assert counts.states >= 16
    assert min(counts.went_back, counts.went_ahead) > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_power_lost_again_at_every_instant(scratch: Path, initial: dict[str, Trained]) -> None:
    counts, _ = lost_again(scratch, initial, points=0, states_each=16)
    print(counts)
    assert counts.states > 500


# A harness that finds nothing must be one that would have.


@contextlib.contextmanager
def no_sync_of_rows() -> Iterator[None]:
    real = anchor.AnchorKeeper.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **(named | {"sync": lambda: None}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchor.AnchorKeeper, "__init__", init)
        yield


@contextlib.contextmanager
def no_sync_of_anchors() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchor.os, "fdatasync", lambda descriptor: None)
        yield


@contextlib.contextmanager
def no_pins() -> Iterator[None]:
    """Pages of the anchored tree may be reused."""
    real = anchor.AnchorKeeper.__init__

    class Unpinned:
        def close(self) -> None:
            pass

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **(named | {"pin": Unpinned}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchor.AnchorKeeper, "__init__", init)
        yield


@contextlib.contextmanager
def no_sync_of_the_directory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tierstore.store.manifest", "tierstore.io.files", "tierstore.io.anchor"):
            patch.setattr(f"{module}.sync_directory", lambda directory: None)
        yield


@contextlib.contextmanager
def no_recovery() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierstore.io.opened.recover", lambda path, store_id, pins: None)
        yield


BROKEN = [no_sync_of_rows, no_sync_of_anchors, no_pins, no_sync_of_the_directory, no_recovery]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_store_that_leaves_out_a_step_is_found_out(
    scratch: Path, initial: dict[str, Trained], broken: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    with broken():
        recorder = record(commits, scratch, initial)
    (scratch / "states").mkdir()
    found = pytest.raises((AssertionError, TierstoreError))
    with no_recovery() if broken is no_recovery else contextlib.nullcontext(), found as raised:
        explore(
            recorder,
            nothing(initial),
            scratch / "states",
            points=60,
            states_each=12,
            generator=np.random.default_rng(0),
        )
    assert "promised" in raised.value.__notes__[0]

"""Power is lost while a store is made: it is there or it is not, and can be opened."""

from pathlib import Path

import numpy as np

from .powerloss import pending
from .recovery import explore
from .syscalls import Recorder
from .workload import Snapshot, Trained, Workload, copied


def test_power_lost_while_the_store_is_made(scratch: Path, initial: dict[str, Trained]) -> None:
    (scratch / "run").mkdir()
    (scratch / "states").mkdir()
    with Recorder(scratch / "run") as recorder:
        Workload(copied(initial), np.random.default_rng(0), recorder.mark).open(scratch / "run" / "store").close()
    assert recorder.problems == []
    counts = explore(
        recorder,
        Snapshot({}, {}, initial, version=0),
        scratch / "states",
        points=15,
        states_each=4,
        least=32,
        generator=np.random.default_rng(0),
    )
    print(counts)
    assert counts.states >= 32


def test_a_store_in_new_directories_lasts(scratch: Path, initial: dict[str, Trained]) -> None:
    """Whoever makes a directory syncs the one that names it: else the first commits may vanish, store and all."""
    (scratch / "run").mkdir()
    (scratch / "states").mkdir()
    place = scratch / "run" / "new" / "newer" / "store"
    with Recorder(scratch / "run") as recorder:
        workload = Workload(copied(initial), np.random.default_rng(0), recorder.mark).open(place)
        workload.train(1)
        workload.commit()
        workload.close()
    made = [number for number, operation in enumerate(recorder.operations) if operation.kind == "mkdir"]
    safe, _ = pending(recorder, recorder.time)
    assert len(made) == 3
    assert {*made} <= {*safe}

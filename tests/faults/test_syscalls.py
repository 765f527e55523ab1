"""The record is exact: replayed from nothing it gives the same bytes, and a call that is failed fails."""

from pathlib import Path

import numpy as np

from .powerloss import Loss, materialise, pending, state
from .syscalls import Operation, Recorder, read_tree
from .workload import Trained, Workload, copied


def replayed(recorder: Recorder, target: Path) -> Path:
    """Everything that was recorded, applied to the files as they were before."""
    safe, unsafe = pending(recorder, recorder.time)
    materialise(state(recorder, safe, Loss(frozenset(unsafe)), unsafe), target)
    return target


def contents(root: Path) -> dict[str, bytes]:
    """All files but LMDB's tables of readers, which are written through a mapping and mean nothing later."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.name.endswith("-lock")]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_a_run_replayed_from_nothing_is_the_same_byte_for_byte(scratch: Path, initial: dict[str, Trained]) -> None:
    (scratch / "run").mkdir()
    with Recorder(scratch / "run") as recorder:
        workload = Workload(copied(initial), np.random.default_rng(0)).open(scratch / "run" / "store")
        for _ in range(3):
            workload.train(3)
            workload.commit()
        workload.train(2)
        workload.close()
    assert recorder.problems == []
    written = contents(scratch / "run")
    assert {"store/manifest.json", "store/rows.lmdb", "store/rows.anchor", "store/writer.lock"} == set(written)
    assert contents(replayed(recorder, scratch / "replayed")) == written
    writes = [operation for operation in recorder.operations if operation.kind == "write"]
    assert sum(len(operation.data) for operation in writes) > 2 * len(written["store/rows.lmdb"])


def recorded(scratch: Path, operations: list[Operation]) -> Recorder:
    """A record made up: a file "file" with ten zeros."""
    (scratch / "file").write_bytes(bytes(10))
    recorder = Recorder(scratch)
    recorder.before, _, _ = read_tree(scratch)
    recorder.operations = operations
    return recorder


def test_what_a_sync_makes_safe(scratch: Path) -> None:
    def write(began: int, ended: int) -> Operation:
        return Operation("write", 1, data=b"x", began=began, ended=ended)

    def sync(began: int, ended: int, *, failed: bool = False, inode: int = 1) -> Operation:
        return Operation("sync", inode, began=began, ended=ended, failed=failed)

    before, beside, after = write(0, 1), write(3, 4), write(7, 8)
    recorder = recorded(scratch, [before, sync(2, 5), beside, sync(6, 9, inode=0), after])
    assert pending(recorder, 5) == ([], [0, 2]), "the sync has not returned"
    assert pending(recorder, 6) == ([0], [2]), "what is written beside a sync is not in it"
    assert pending(recorder, 10) == ([0], [2, 4]), "another file's sync is of no help"
    failed = recorded(scratch, [before, sync(2, 3, failed=True), write(4, 5), sync(6, 7)])
    assert pending(failed, 9) == ([2], [0]), "a sync that failed is not made good by the next"
    renamed = Operation("rename", 1, 0, "new", "file", began=0, ended=1)
    failed = recorded(scratch, [renamed, sync(2, 3, failed=True, inode=0), sync(6, 7, inode=0)])
    assert pending(failed, 4) == ([], [0])
    assert pending(failed, 9) == ([0], []), "but entries are"

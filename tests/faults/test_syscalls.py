"""The record is exact: replayed from nothing it gives the same bytes, and a call that is failed fails."""

import os
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


def test_every_kind_of_call_is_replayed(scratch: Path) -> None:
    root = scratch / "run"
    root.mkdir()
    (root / "old").write_bytes(b"0123456789")
    with Recorder(root) as recorder:
        (root / "folder").mkdir()
        (root / "folder" / "new").write_text("one\ntwo\n")
        (root / "old").write_bytes(b"abc")
        descriptor = os.open(root / "folder" / "new", os.O_RDWR)
        os.pwrite(descriptor, b"far", 3000)
        os.write(descriptor, b"ONE")
        os.writev(descriptor, [b"+", b"++"])
        os.ftruncate(descriptor, 2000)
        os.fsync(descriptor)
        os.close(descriptor)
        os.link(root / "old", root / "twin")
        os.rename(root / "old", root / "older")
        os.replace(root / "folder" / "new", root / "folder" / "newer")
        (root / "gone").touch()
        (root / "gone").unlink()
    assert recorder.problems == []
    assert contents(replayed(recorder, scratch / "replayed")) == contents(root)
    assert [operation.kind for operation in recorder.operations] == [
        *("mkdir", "create", "write", "truncate", "write", "write", "write", "write", "truncate", "sync"),
        *("link", "rename", "rename", "create", "unlink"),
    ]


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


def test_what_a_loss_leaves(scratch: Path) -> None:
    first = Operation("write", 1, offset=0, data=b"a" * 1200, began=0, ended=1)
    second = Operation("write", 1, offset=1500, data=b"b" * 100, began=2, ended=3)
    renamed = Operation("rename", 1, 0, "new", "file", began=4, ended=5)
    recorder = recorded(scratch, [first, second, renamed])
    safe, unsafe = pending(recorder, 9)
    assert (safe, unsafe) == ([], [0, 1, 2])

    def left(loss: Loss) -> tuple[list[str], bytes]:
        tree = state(recorder, safe, loss, unsafe)
        entries, content = tree[0], tree[1]
        assert isinstance(entries, dict)
        assert isinstance(content, bytes)
        return list(entries), content

    assert left(Loss(frozenset())) == (["file"], bytes(10))
    assert left(Loss(frozenset(), grown=True)) == (["file"], bytes(1600))
    assert left(Loss(frozenset({2}))) == (["new"], bytes(10))
    assert left(Loss(frozenset({1}))) == (["file"], bytes(1500) + b"b" * 100)
    assert left(Loss(frozenset({0, 2}), torn=((0, 0b101),))) == (["new"], b"a" * 512 + bytes(512) + b"a" * 176)
    assert left(Loss(frozenset({0}), torn=((0, 0b010),))) == (["file"], bytes(512) + b"a" * 512)

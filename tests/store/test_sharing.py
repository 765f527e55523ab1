"""Processes that share a store, whatever else they do: copies from inside, forks, containers, kills, damaged copies."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.children import run, start
from tests.following import OWN_NAMESPACE, Reader, Writer
from tierstore import errors
from tierstore.io.reader_locks import FileLocks

BIG = list(range(10_000))


def new_writer(stack: ExitStack, folder: Path, **options: Any) -> Writer:
    writer = Writer(**options)
    stack.callback(writer.kill)
    writer("open", str(folder), 1)
    return writer


def new_reader(stack: ExitStack, folder: Path, **options: Any) -> Reader:
    reader = Reader(**options)
    stack.callback(reader.kill)
    reader("open", str(folder))
    return reader


def write(writer: Writer, value: int) -> None:
    if value == 1:
        writer("create", "big", len(BIG), 32)
    writer("write", "big", BIG, value)
    assert writer("commit", value) == value


def test_new_writers_leave_the_trees_alone_that_older_readers_show(stack: ExitStack, tmp_path: Path) -> None:
    """Also a reader that copies the directory, which opens and closes the files that it locks."""
    folder = tmp_path / "store"
    writer = new_writer(stack, folder)
    write(writer, 1)
    first = new_reader(stack, folder)
    first("copy", str(folder), str(tmp_path / "copy"))
    write(writer, 2)
    second = new_reader(stack, folder)
    for value in range(3, 5):
        writer.kill()
        writer = new_writer(stack, folder)
        write(writer, value)
        assert (first("read", "big"), second("read", "big")) == ([1.0], [2.0])
    assert first("refresh") == 4
    first("close")
    size_bytes = 0
    for value in range(5, 12):
        write(writer, value)
        second("refresh")
        before, size_bytes = size_bytes, (folder / "rows.lmdb").stat().st_size
    assert size_bytes == before, "what no reader shows any more is used again"
    assert second("read", "big") == [11.0]


def test_processes_of_the_same_number_share_a_store(stack: ExitStack, tmp_path: Path) -> None:
    """A trainer and servers, each process 1 of its container; whoever comes first."""
    if shutil.which("unshare") is None or subprocess.run([*OWN_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("PID namespaces are not permitted here")
    folder = tmp_path / "store"
    writer = new_writer(stack, folder, before=OWN_NAMESPACE)
    write(writer, 1)
    readers = [new_reader(stack, folder, before=OWN_NAMESPACE) for _ in range(2)]
    write(writer, 2)
    for reader in readers:
        assert reader("read", "big") == [1.0]
        assert reader("refresh") == 2
    with pytest.raises(errors.StoreLockedError, match="has the store open for writing; close it there"):
        tierstore.open(folder)
    writer("close")
    writer = new_writer(stack, folder, before=OWN_NAMESPACE)
    write(writer, 3)
    for reader in readers:
        assert reader("read", "big") == [2.0]
        assert reader("refresh") == 3
        assert reader("read", "big") == [3.0]


def test_processes_that_create_one_store_at_once(store_dir: Path) -> None:
    code = """
    go, hold = os.pipe()
    def create():
        os.close(hold)
        os.read(go, 1)
        try:
            store = tierstore.open(sys.argv[1], ddr="1MiB")
        except errors.StoreLockedError:
            os._exit(5)
        time.sleep(0.2)
        store.close()
        os._exit(0)
    creating = [os.fork() or create() for _ in range(2)]
    os.close(hold)
    print(sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in creating))
    """
    assert run(code, store_dir) in ("[0, 5]\n", "[0, 0]\n")  # the second may begin when the first has ended
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert store.commit() == 1


FORK = """
import ctypes
mode, how = sys.argv[2:]
store = tierstore.open(sys.argv[1], mode=mode, ddr="2MiB", threads=1)
store["t"].read(torch.arange(10))
child = os.fork() if how == "python" else ctypes.PyDLL(None).fork()
if not child:
    print(os.getpid(), flush=True)
    time.sleep(600)
    os._exit(0)
if sys.stdin.readline() == "close\\n":
    store.close()
    print("closed", flush=True)
    time.sleep(600)
"""


def test_a_child_does_not_write_by_what_its_parent_had_open(store: Path) -> None:
    code = """
    store = tierstore.open(sys.argv[1], ddr="2MiB", threads=1)
    closed, closing = os.pipe()
    if not (child := os.fork()):
        os.close(closing)
        os.read(closed, 1)
        forked(tierstore.open, sys.argv[1])
        os._exit(0)
    store.close()
    os.close(closing)
    os.waitpid(child, 0)
    """
    said = run(code, store, changes={"PYTHONWARNINGS": "ignore"})
    assert said.startswith("StoreLockedError")
    assert "open the store in a new process" in said


@pytest.mark.parametrize(("mode", "how"), [("r", "python"), ("w", "c")])
def test_no_child_keeps_what_its_parent_locked(stack: ExitStack, store: Path, mode: str, how: str) -> None:
    """A child that does nothing, forked by Python or by C, unnoticed; the parent is killed, or closes the store."""
    locks = stack.enter_context(closing(FileLocks(store / "rows.lmdb")))
    parent = stack.enter_context(start(FORK, store, mode, how, changes={"PYTHONWARNINGS": "ignore"}))
    stack.callback(parent.kill)
    stack.callback(os.kill, int(parent.stdout.readline()), signal.SIGKILL)
    assert locks.oldest(1 << 40) is not None
    if mode == "r":
        parent.kill()
        parent.wait()
    else:
        with pytest.raises(errors.StoreLockedError, match=rf"process .*\b{parent.pid}\b.* has the store open for wri"):
            tierstore.open(store)
        parent.stdin.write("close\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "closed\n"
    assert locks.oldest(1 << 40) is None
    tierstore.open(store).close()


@pytest.mark.parametrize("number", ["free", "another file's", "the same file's"])
@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_descriptor_that_was_closed_is_noticed(stack: ExitStack, store: Path, mode: Any, number: str) -> None:
    opened = tierstore.open(store, mode=mode, ddr="2MiB", threads=1)
    locks = opened._cold._file.map.locks
    os.close(locks.descriptor)
    if number != "free":
        other = os.open(store / ("rows.lmdb" if number == "the same file's" else "manifest.json"), os.O_RDONLY)
        assert other == locks.descriptor
        stack.callback(os.close, other)
    own = (opened.refresh, lambda: locks.hold(1 << 20)) if mode == "r" else (opened.commit, opened._cold._writer.sync)
    for use in (lambda: opened["t"].read(torch.arange(10)), *own):
        with pytest.raises(errors.ClosedError, match=r"rows\.lmdb: somebody in this process closed descriptors"):
            use()
    opened.close()
    if number != "free":
        os.fstat(other)  # it was somebody else's to close


CODE = """
import gc, multiprocessing, threading
from tierstore.system import killpoints

store = tierstore.open(sys.argv[1], ddr="2MiB", threads=2)
reader = tierstore.open(sys.argv[1], mode="r", ddr="2MiB", threads=1)
memory = tierstore.open(cold="memory", ddr="4MiB", threads=1)
memory.create_table(table_config())
memory.optimizer()  # imports much of torch, which no child needs to do again
table, ids = store["t"], torch.arange(2000)
bag = tierstore.TieredEmbeddingBag(table)
batches = [ids[start : start + 50].view(-1, 5) for start in range(0, 2000, 50)]
pipeline = tierstore.prefetch(batches, bag, depth=2)
plain = tierstore.prefetch(batches, bag, depth=0)
next(pipeline), next(plain)
out = bag(batches[0]).sum()
many = torch.zeros(100_000, dtype=torch.int64), torch.arange(0, 100_001, 100)
assert table.pooled(*many).unique().tolist() == [300.0]  # by threads that torch computes with
recorder = store.record(sys.argv[1] + "/../t.npz", rate=1.0)
held, goes_on = threading.Event(), threading.Event()
def hold(name):
    if name == "commit: frozen rows written":
        held.set()
        goes_on.wait()
table.write(ids[:10], torch.full((10, 16), 5.0))
killpoints.hook = hold
pending = store.commit_async()
held.wait()  # in the thread of the commit
stop = threading.Event()
def read():
    while not stop.is_set():
        table.read(torch.randint(0, 2000, (50,)))
reads = [threading.Thread(target=read) for _ in range(2)]  # who holds a lock at a fork is not there to release it
for each in reads:
    each.start()

refused = [
    lambda: table.read(ids), lambda: table.write(ids[:1], torch.ones(1, 16)), lambda: bag(batches[0]),
    lambda: out.backward(), lambda: store.commit(), lambda: store.create_table(table_config(name="u")),
    lambda: store.rollback(1), lambda: store.stats(), lambda: store.verify(), lambda: store.optimizer(),
    lambda: store.backup(sys.argv[1] + "/../copy"), lambda: store.record(sys.argv[1] + "/../u.npz"),
    lambda: reader.refresh(), lambda: reader["t"].read(ids), lambda: memory["t"].read(ids), lambda: pending.result(),
    lambda: next(pipeline), lambda: next(plain), lambda: recorder.describe(),
]
right = [
    (lambda: (store.version, store.extra, store.tensors()["w"].tolist()), (1, {"step": 1}, [1.0, 1.0, 1.0])),
    (lambda: pipeline.close(), None), (lambda: recorder.stop(), None),
    (lambda: (store.close(), reader.close(), memory.close()), (None, None, None)),
    (lambda: tierstore.open(sys.argv[1], mode="r", ddr="2MiB")["t"].pooled(*many).unique().tolist(), [300.0]),
]

def use_all():
    signal.alarm(120)
    for number, use in enumerate(refused):
        try:
            found = use()
        except errors.ClosedError as error:
            found = str(error)
        assert isinstance(found, str) and "fork" in found, (number, found)
    for use, expected in right:
        assert use() == expected, expected

def use_and_drop():
    use_all()
    globals().update(store=None, reader=None, memory=None, table=None, bag=None, pipeline=None, plain=None,
                     recorder=None, pending=None, out=None, refused=[], right=[])
    gc.collect()

for number in range(4):
    if not os.fork():
        (use_and_drop if number % 2 else use_all)()
        sys.exit(7)  # runs finalizers, and what is to be done at exit
kid = multiprocessing.get_context("fork").Process(target=use_all)
kid.start()
kid.join()
assert kid.exitcode == 0, kid.exitcode
for _ in range(4):
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7

stop.set()
for each in reads:
    each.join()
killpoints.hook = None
goes_on.set()
assert pending.result() == 2
assert [bag(batch).shape for batch in pipeline] == [(10, 16)] * 39
pipeline.close(), plain.close()
assert reader.refresh() == 2
assert torch.equal(reader["t"].read(ids[:10]), torch.full((10, 16), 5.0))
table.write(ids, torch.full((2000, 16), 6.0))
assert store.commit() == 3
recorder.stop()
store.close()
with tierstore.open(sys.argv[1], ddr="2MiB") as again:
    assert again["t"].read(ids).unique().tolist() == [6.0]
print("unharmed")
"""


def test_forked_processes_are_right_or_refused_and_harm_nothing(store: Path) -> None:
    """Each object that owns a thread, a lock, a descriptor or a connection, also where the child runs finalizers."""
    assert run(CODE, store, timeout=240, changes={"OMP_NUM_THREADS": "2"}).splitlines()[-1] == "unharmed"


def require_sound(folder: Path, mode: Any) -> None:
    with tierstore.open(folder, mode=mode, ddr="2MiB", threads=1) as store:
        assert (store["t"].read(torch.arange(2000)) == 3.0).all()
        store.verify()
        if mode == "w":
            store.commit()


def put(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def clear_root(folder: Path, place: int) -> None:
    data = (folder / "rows.lmdb").read_bytes()
    for meta in (0, 4096):
        if (root := int.from_bytes(data[meta + place : meta + place + 8], "little")) < 2**32:
            put(folder / "rows.lmdb", root * 4096, bytes(64))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest": lambda folder: put(folder / "manifest.json", 20, b"xx"),
    "meta page": lambda folder: put(folder / "rows.lmdb", 16, bytes(4)),
    "tree": lambda folder: clear_root(folder, 128),
    "free pages": lambda folder: clear_root(folder, 80),
    "many pages": lambda folder: [
        put(folder / "rows.lmdb", at + 40, b"damage")
        for at in range(8 * 4096, (folder / "rows.lmdb").stat().st_size, 3 * 4096)
    ],
    "cut short": lambda folder: os.truncate(folder / "rows.lmdb", 40_000),
    "anchor": lambda folder: put(folder / "rows.anchor", 0, bytes(8192)),
    "table of readers": lambda folder: put(folder / "rows.lmdb-lock", 0, b"\xa5" * 9000),
}


@pytest.mark.parametrize("mode", ["r", "w"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_opened_before_and_beside(store: Path, tmp_path: Path, damage: str, mode: Any) -> None:
    """Its errors are kept, and with them every frame that they came through."""
    kept, opened = list[BaseException](), list[tierstore.Store]()

    def use_damaged() -> None:
        damaged = shutil.copytree(store, tmp_path / f"damaged-{len(kept)}-{len(opened)}")
        DAMAGES[damage](damaged)
        try:
            opened.append(tierstore.open(damaged, mode=mode, ddr="2MiB", threads=1))
            opened[-1]["t"].read(torch.arange(2000))
            opened[-1].verify()
        except errors.TierstoreError as error:
            kept.append(error)

    use_damaged()
    require_sound(store, "r")
    require_sound(store, "w")
    with tierstore.open(store, ddr="2MiB", threads=1) as sound:
        use_damaged()
        sound["t"].write(torch.arange(2000), torch.full((2000, 16), 3.0))
        sound.commit()
    assert kept or damage in ("table of readers", "meta page")  # which a writer puts right
    for each in opened:
        each.close()
    require_sound(store, "w")

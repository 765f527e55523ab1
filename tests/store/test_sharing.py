"""Processes that share a store, whatever else they do: copies from inside, forks, containers, kills."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.children import make_store, run, start
from tests.following import OWN_NAMESPACE, Reader, Writer
from tierstore import errors
from tierstore.io.reader_locks import FileLocks

BIG = list(range(10_000))


@pytest.fixture
def children() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def new_writer(children: ExitStack, folder: Path, **options: Any) -> Writer:
    writer = Writer(**options)
    children.callback(writer.kill)
    writer("open", str(folder), 1)
    return writer


def new_reader(children: ExitStack, folder: Path, **options: Any) -> Reader:
    reader = Reader(**options)
    children.callback(reader.kill)
    reader("open", str(folder))
    return reader


def begin(writer: Writer) -> None:
    writer("create", "big", len(BIG), 32)
    write(writer, 1)
    writer("commit", 1)


def write(writer: Writer, value: int) -> None:
    writer("write", "big", BIG, value)


# Copies from inside


def test_a_reader_that_copies_the_directory_sees_the_same_rows_still(children: ExitStack, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    writer = new_writer(children, folder)
    begin(writer)
    reader = new_reader(children, folder)
    reader("copy", str(folder), str(tmp_path / "copy"))
    for value in range(2, 8):
        write(writer, value)
        writer("commit", value)
        assert reader("read", "big") == [1.0]
    assert reader("refresh") == 7
    assert reader("read", "big") == [7.0]


def test_a_new_writer_leaves_the_trees_alone_that_older_readers_show(children: ExitStack, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    writer = new_writer(children, folder)
    begin(writer)
    first = new_reader(children, folder)
    write(writer, 2)
    writer("commit", 2)
    second = new_reader(children, folder)
    for value in range(3, 5):
        writer.kill()
        writer = new_writer(children, folder)
        write(writer, value)
        writer("commit", value)
        assert (first("read", "big"), second("read", "big")) == ([1.0], [2.0])
    first("close")
    size_bytes = 0
    for value in range(5, 12):
        write(writer, value)
        writer("commit", value)
        second("refresh")
        before, size_bytes = size_bytes, (folder / "rows.lmdb").stat().st_size
    assert size_bytes == before, "what no reader shows any more is used again"


# Containers


def requires_namespaces() -> None:
    try:
        done = subprocess.run([*OWN_NAMESPACE, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode:
        pytest.skip(f"PID namespaces are not permitted here: {done.stderr.strip()}")


def test_processes_of_the_same_number_share_a_store(children: ExitStack, tmp_path: Path) -> None:
    """A trainer and servers, each process 1 of its container; whoever comes first."""
    requires_namespaces()
    folder = tmp_path / "store"
    writer = new_writer(children, folder, before=OWN_NAMESPACE)
    begin(writer)
    readers = [new_reader(children, folder, before=OWN_NAMESPACE) for _ in range(2)]
    write(writer, 2)
    assert writer("commit", 2) == 2
    for reader in readers:
        assert reader("read", "big") == [1.0]
        assert reader("refresh") == 2
    with pytest.raises(errors.StoreLockedError, match="has the store open for writing; close it there"):
        tierstore.open(folder)
    writer("close")
    writer = new_writer(children, folder, before=OWN_NAMESPACE)
    write(writer, 3)
    assert writer("commit", 3) == 3
    for reader in readers:
        assert reader("read", "big") == [2.0]
        assert reader("refresh") == 3
        assert reader("read", "big") == [3.0]


# Forks

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


@pytest.fixture
def store(store_dir: Path) -> Path:
    make_store(store_dir)
    return store_dir


class Forked:
    """A process that has a store open, with a child that does nothing; how it forks: "python", or "c", unnoticed."""

    def __init__(self, children: ExitStack, folder: Path, mode: str, how: str) -> None:
        self._process = start(FORK, folder, mode, how, changes={"PYTHONWARNINGS": "ignore"})
        children.callback(self.kill)
        assert self._process.stdout is not None
        self.pid, child = self._process.pid, int(self._process.stdout.readline())
        children.callback(os.kill, child, signal.SIGKILL)

    def close(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._process.stdin.write("close\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "closed\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


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


@pytest.mark.parametrize("mode", ["r", "w"])
@pytest.mark.parametrize(("how", "end"), [("python", Forked.kill), ("c", Forked.close)])
def test_no_child_keeps_what_its_parent_locked(children: ExitStack, store: Path, how: str, end: Any, mode: str) -> None:
    locks = FileLocks(store / "rows.lmdb")
    children.callback(locks.close)
    parent = Forked(children, store, mode, how)
    assert locks.oldest(1 << 40) is not None
    if mode == "w":
        with pytest.raises(errors.StoreLockedError, match=rf"process .*\b{parent.pid}\b.* has the store open for wri"):
            tierstore.open(store)
    end(parent)
    assert locks.oldest(1 << 40) is None
    tierstore.open(store).close()


# Descriptors that somebody else closes


def require_lost(use: Any) -> None:
    with pytest.raises(errors.ClosedError, match=r"rows\.lmdb: somebody in this process closed descriptors"):
        use()


@pytest.mark.parametrize("number", ["free", "another file's", "the same file's"])
@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_descriptor_that_was_closed_is_noticed(children: ExitStack, store: Path, mode: Any, number: str) -> None:
    opened = tierstore.open(store, mode=mode, ddr="2MiB", threads=1)
    locks = opened._cold._file.map.locks
    descriptor = locks.descriptor
    os.close(descriptor)
    if number != "free":
        other = os.open(store / ("rows.lmdb" if number == "the same file's" else "manifest.json"), os.O_RDONLY)
        assert other == descriptor
        children.callback(os.close, other)
    require_lost(lambda: opened["t"].read(torch.arange(10)))
    own = (opened.refresh, lambda: locks.hold(1 << 20)) if mode == "r" else (opened.commit, opened._cold._writer.sync)
    for use in own:
        require_lost(use)
    opened.close()
    if number != "free":
        os.fstat(descriptor)  # it was somebody else's to close


def test_a_child_forked_amid_lookups_is_refused_and_ends(store: Path) -> None:
    """Whoever held a lock at the fork is not there to release it."""
    code = """
    import faulthandler, threading
    store = tierstore.open(sys.argv[1], ddr="2MiB")
    bag = tierstore.TieredEmbeddingBag(store["t"])
    out = bag(torch.arange(20).view(10, 2)).sum()
    stop = threading.Event()

    def read():
        while not stop.is_set():
            store["t"].read(torch.randint(0, 2000, (50,)))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        if not (child := os.fork()):
            faulthandler.dump_traceback_later(30, exit=True)
            try:
                out.backward()
            except errors.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    stop.set()
    for thread in threads:
        thread.join()
    print("ended")
    """
    assert run(code, store, changes={"PYTHONWARNINGS": "ignore"}) == "ended\n"

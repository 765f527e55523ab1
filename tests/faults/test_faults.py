"""What systems and people do to a store: each ends in the right rows or in an error that says the way out."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore
from bench.data import ROOT
from tests.children import make_store, run, start
from tierstore import errors, optim
from tierstore.store import lineage


@pytest.fixture
def store(store_dir: Path) -> Path:
    make_store(store_dir)
    return store_dir


def contents(folder: Path) -> torch.Tensor:
    with tierstore.open(folder, mode="r", ddr="2MiB", threads=1) as store:
        store.verify()
        return store["t"].read(torch.arange(2000))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

# File systems and permissions


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system in memory that can be mounted again read-only."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_read_only_file_system_is_read(mounted: Path) -> None:
    make_store(mounted / "store")
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    assert (contents(mounted / "store") == 3.0).all()
    with pytest.raises(errors.StoreNotFoundError):
        tierstore.open(mounted / "new", mode="r")
    subprocess.run(["mount", "-o", "remount,rw", str(mounted)], check=True)
    with tierstore.open(mounted / "store", ddr="2MiB") as store:
        assert store.commit() == 2


def test_a_read_only_file_system_is_not_written_to(mounted: Path) -> None:
    make_store(mounted / "store")
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    for name in ("store", "new"):
        with pytest.raises(errors.TierstoreError, match=rf"{name}.*read-only; open the store with mode=\"r\""):
            tierstore.open(mounted / name, ddr="2MiB")


def _as_nobody(folder: Path, name: str, mode: str) -> str:
    """How an open by another user ends; root is permitted everything."""
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.geteuid() and above.is_relative_to(Path(tempfile.gettempdir()) / "pytest-of-root"):
            above.chmod(0o755)
    code = """
    def use(folder, mode):
        with tierstore.open(folder, mode=mode, ddr="2MiB", threads=1) as store:
            return bool((store["t"].read(torch.arange(2000)) == 3.0).all())

    os.setgid(65534)
    os.setuid(65534)
    forked(use, *sys.argv[1:])
    """
    return run(code, folder / name, mode).strip()


@needs_root
def test_who_may_only_read_the_files_reads(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    assert _as_nobody(tmp_path, "store", "r") == "ok True"


@needs_root
def test_a_store_that_this_user_may_not_use(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    (tmp_path / "store" / "rows.lmdb").chmod(0o600)
    said = _as_nobody(tmp_path, "store", "r")
    assert said.startswith(f"TierstoreError {tmp_path / 'store'}")
    assert "ermission" in said


@needs_root
@pytest.mark.parametrize("name", ["store", "new"])
def test_a_directory_that_this_user_may_not_write(tmp_path: Path, name: str) -> None:
    make_store(tmp_path / "store")
    said = _as_nobody(tmp_path, name, "w")
    assert said.startswith(f"TierstoreError {tmp_path / name}")
    assert "this user lacks the permission" in said


# File descriptors


def _refusals(store: Path, mode: str) -> list[str]:
    """What a use of the store says as the limit on descriptors rises by one until all works; the store stays whole."""
    code = """
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    ids = torch.arange(2000)

    def use():
        # As little memory as there may be, so that rows are written back between commits.
        with tierstore.open(folder, mode=mode, ddr="640KiB", threads=2) as store:
            if mode == "w":
                store["t"].write(ids, torch.full((2000, 16), float(store.version + 3)))
                store.commit(extra={"step": store.version + 1}, tensors={"w": torch.ones(3)})
            store.verify()

    def state():
        with tierstore.open(folder, mode="r", ddr="2MiB", threads=1) as store:
            values = store["t"].read(ids).unique().tolist()
            assert values == [store.version + 2], (values, store.version)
            return store.version

    use()
    version = state()
    used = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in range(used - 1, used + 40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            use()
            refusal = None
        except (errors.TierstoreError, OSError) as caught:
            refusal = caught
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        before, version = version, state()
        if refusal is None:
            break
        assert version in (before, before + 1)
        print(type(refusal).__name__, str(refusal).replace("\\n", " "))
    assert refusal is None
    assert len(os.listdir("/proc/self/fd")) <= used, "descriptors leak"
    """
    return run(code, store, mode).splitlines()


@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_store_stays_whole_without_file_descriptors(store: Path, mode: str) -> None:
    assert len(_refusals(store, mode)) >= 2


@pytest.mark.parametrize("mode", ["r", "w"])
def test_without_file_descriptors_the_error_says_what_to_raise(store: Path, mode: str) -> None:
    said = _refusals(store, mode)
    assert [line for line in said if "raise `ulimit -n`" not in line or str(store) not in line] == []


# Other processes


def test_a_reader_that_was_killed_does_not_hold_pages_back(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock goes with it, so that the file stops growing."""
    code = """
    store = tierstore.open(sys.argv[1], mode="r", ddr="2MiB", threads=1)
    store["t"].read(torch.arange(10))
    print("open", flush=True)
    time.sleep(600)
    """
    rows = store / "rows.lmdb"
    monkeypatch.setattr(lineage, "MAX_ANCESTORS", 10)  # a commit's payload is as long as it becomes after as many
    with tierstore.open(store, ddr="2MiB", threads=1) as writer:

        def commit(times: int) -> int:
            for _ in range(times):
                writer["t"].write(torch.arange(2000), torch.full((2000, 16), 3.0))
                writer.commit()
            return rows.stat().st_size

        level = commit(20)
        assert commit(20) == level
        reader = start(code, store)
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "open\n"
            assert commit(20) > level, "a live reader keeps its pages"
        finally:
            reader.send_signal(signal.SIGKILL)
            reader.communicate()
        level = commit(20)
        assert commit(40) == level
    assert (contents(store) == 3.0).all()


def test_a_second_writer_is_told_who_writes_and_may_follow_at_once(store: Path) -> None:
    code = """
    store = tierstore.open(sys.argv[1], ddr="2MiB", threads=1)
    store["t"].write(torch.arange(2000), torch.zeros(2000, 16))
    print("open", flush=True)
    time.sleep(600)
    """
    writer = start(code, store)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(errors.StoreLockedError, match=rf"process {writer.pid} has the store open for writing"):
            tierstore.open(store, ddr="2MiB")
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    with tierstore.open(store, ddr="2MiB", threads=1) as second:
        assert (second["t"].read(torch.arange(2000)) == 3.0).all()
        assert second.commit() == 2


# The clock


def _train(folder: Path) -> torch.Tensor:
    """Train with prefetching, write-back and commits; returns all rows."""
    generator = torch.Generator().manual_seed(3)
    with tierstore.open(folder, ddr="640KiB", threads=2) as store:
        for name in ("a", "b"):
            store.create_table(
                tierstore.TableConfig(
                    name=name, num_embeddings=5000, embedding_dim=16, optimizer=optim.RowWiseAdagrad(lr=0.1)
                )
            )
        collection = tierstore.TieredEmbeddingBagCollection(store)
        batches = [
            tierstore.KeyedJaggedTensor(
                keys=["a", "b"],
                values=torch.randint(0, 5000, (400,), generator=generator),
                offsets=torch.arange(0, 401, 10),
            )
            for _ in range(30)
        ]
        for step, batch in enumerate(tierstore.prefetch(batches, collection, depth=2)):
            torch.cat(list(collection(batch).to_dict().values()), 1).square().sum().backward()
            if step % 7 == 0:
                store.commit(extra={"step": step})
        return torch.cat([store[name].read(torch.arange(5000)) for name in ("a", "b")])


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _train(tmp_path / "steady")
    now, asked = time.time, []

    def jumping() -> float:
        asked.append(1)
        return now() + 86_400 * (1, -1)[len(asked) % 2]

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 10**9))
    assert torch.equal(_train(tmp_path / "jumping"), expected)


def test_no_source_asks_for_the_time_of_day() -> None:
    """Waits and rates go by clocks that never jump. The server's log says when a line was written, and its statistics
    when a model was asked last."""
    words = ("time.time(", "time_ns(", "datetime", "time import time", "CLOCK_REALTIME", "gettimeofday", "utcnow")
    allowed = ("time.monotonic_ns(", "from datetime import timedelta\n")  # the latter: a length of time, not a time
    tells_time = {ROOT / "tierstore" / "serve" / name for name in ("logs.py", "monitoring/metrics.py")}
    for path in sorted({*(ROOT / "tierstore").rglob("*.py")} - tells_time):
        text = path.read_text()
        for word in allowed:
            text = text.replace(word, "")
        assert not [word for word in words if word in text], path


# Forks and workers


def test_forked_workers_harm_neither_the_rows_nor_the_snapshot(store: Path) -> None:
    """A DataLoader's workers are forks of a process that trains; their data set holds on to the open store."""
    code = """
    store = tierstore.open(sys.argv[1], ddr="640KiB", threads=2)
    table = store["t"]
    reader = None

    class Data(torch.utils.data.Dataset):
        def __init__(self):
            self.store = store

        def __len__(self):
            return 64

        def __getitem__(self, index):
            try:
                self.store["t"].read(torch.tensor([index]))
            except errors.ClosedError as error:
                assert "of which this is a fork" in str(error)
                return index
            raise AssertionError("a fork read the parent's store")

    bag = tierstore.TieredEmbeddingBag(table, mode="sum")
    steps = torch.zeros(2000)
    for epoch in range(3):
        loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2, multiprocessing_context="fork")
        for ids in loader:
            bag(ids.reshape(1, -1)).sum().backward()
            steps[ids] += 1
            store.commit()
            assert table.read(torch.arange(2000)).shape == (2000, 16)
    store.verify()
    assert store.version == 1 + 24
    rows = table.read(torch.arange(2000))
    assert torch.equal(rows, (3.0 - 0.01 * steps)[:, None].expand(2000, 16)) or torch.allclose(
        rows, (3.0 - 0.01 * steps)[:, None].expand(2000, 16), rtol=0, atol=1e-6)
    store.close()
    """
    run(code, store)
    with tierstore.open(store, mode="r", ddr="2MiB", threads=1) as again:
        assert again.version == 25


def test_spawned_workers_read_a_store_of_their_own(store: Path, tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(
        """
import sys
import torch
import tierstore

class Data(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder, self.store = folder, None

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.store is None:
            self.store = tierstore.open(self.folder, mode="r", ddr="2MiB", threads=1)
        return self.store["t"].read(torch.tensor([index]))[0]

if __name__ == "__main__":
    with tierstore.open(sys.argv[1], ddr="2MiB", threads=1) as store:
        loader = torch.utils.data.DataLoader(
            Data(sys.argv[1]), batch_size=8, num_workers=1, multiprocessing_context="spawn")
        for rows in loader:
            assert rows.shape == (8, 16) and (rows == 3.0).all()
            store["t"].write(torch.arange(2000), torch.full((2000, 16), 3.0))
            store.commit()
        assert store.version == 3
    print("done")
"""
    )
    done = subprocess.run(
        [sys.executable, str(script), str(store)], capture_output=True, text=True, timeout=250, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "done"

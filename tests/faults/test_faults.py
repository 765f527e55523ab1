"""What systems and people do to a store: each ends in the right rows or in an error that says the way out."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import tierstore
from bench.data import ROOT
from tests.children import make_store, run
from tierstore import errors

from .test_file_systems import mounted

# File systems and permissions


def test_a_read_only_file_system_is_read_and_not_written_to(tmp_path: Path) -> None:
    with mounted(tmp_path / "mounted", "-t", "tmpfs", "-o", "size=64m", "tmpfs") as folder:
        make_store(folder / "store")
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with tierstore.open(folder / "store", mode="r", ddr="2MiB", threads=1) as reader:
            reader.verify()
            assert (reader["t"].read(torch.arange(2000)) == 3.0).all()
        for name in ("store", "new"):
            with pytest.raises(errors.TierstoreError, match=rf"{name}.*read-only; open the store with mode=\"r\""):
                tierstore.open(folder / name, ddr="2MiB")
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        with tierstore.open(folder / "store", ddr="2MiB") as store:
            assert store.commit() == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_that_lacks_a_permission() -> None:
    """In a folder of its own: that of pytest may not be looked into by others."""
    code = """
    def use(folder, mode):
        with tierstore.open(folder, mode=mode, ddr="2MiB", threads=1) as store:
            return bool((store["t"].read(torch.arange(2000)) == 3.0).all())

    def use_as_nobody(folder, mode):
        os.setgid(65534)
        os.setuid(65534)
        return use(folder, mode)

    store = Path(sys.argv[1])
    for mode in ("r", "w"):
        use(store, mode)  # loads the kernels, which others may not read
    for folder, mode in ((store, "r"), (store, "w"), (store.with_name("new"), "w")):
        forked(use_as_nobody, folder, mode)
    (store / "rows.lmdb").chmod(0o600)
    forked(use_as_nobody, store, "r")
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        store = Path(folder, "store")
        make_store(store)
        read, *refused = run(code, store).splitlines()
    assert read == "ok True"
    for said, folder in zip(refused, (store, store.with_name("new"), store), strict=True):
        assert said.startswith(f"TierstoreError {folder}")
        assert "ermission" in said
    assert all("this user lacks the permission" in said for said in refused[:2])


@pytest.mark.parametrize("mode", ["r", "w"])
def test_a_store_stays_whole_without_file_descriptors_and_says_what_to_raise(store: Path, mode: str) -> None:
    """As the limit on descriptors rises by one until all works."""
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
    said = run(code, store, mode).splitlines()
    assert len(said) >= 2
    assert [line for line in said if "raise `ulimit -n`" not in line or str(store) not in line] == []


def test_no_source_asks_for_the_time_of_day() -> None:
    """Waits and rates go by clocks that never jump. The server's log says when a line was written, its statistics when
    a model was asked last, and a version when it was committed. When events happened is the world's time."""
    words = ("time.time(", "time_ns(", "datetime", "time import time", "CLOCK_REALTIME", "gettimeofday", "utcnow")
    loaded_early, length_of_time = "import datetime  # noqa: F401", "from datetime import timedelta\n"
    allowed = ("time.monotonic_ns(", loaded_early, length_of_time)
    told = (
        "serve/logs.py", "serve/metrics.py", "serve/engine.py", "store/version.py", "offline/inspection.py",
        "train/readers/following.py", "train/summary.py", "cli/entry.py",
    )  # fmt: skip
    tells_time = {ROOT / "tierstore" / name for name in told}
    for path in sorted({*(ROOT / "tierstore").rglob("*.py")} - tells_time):
        text = path.read_text()
        for word in allowed:
            text = text.replace(word, "")
        assert not [word for word in words if word in text], path

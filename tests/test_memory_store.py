"""A store whose cold rows are in memory: no file, and as much memory as its versions need."""

from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.errors import ClosedError, TableError, TierstoreError

ROWS, DIM = 2000, 16
EVERY = torch.arange(ROWS)


CONFIG = tierstore.TableConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM, optimizer=tierstore.optim.Adam(lr=0.1))


def test_versions_that_are_dropped_take_no_memory() -> None:
    with tierstore.open(cold="memory", keep=3, ddr="1MiB", threads=1) as store:
        store.create_table(CONFIG)
        for step in range(6):
            store["a"].write(EVERY, torch.full((ROWS, DIM), float(step)))
            store.commit()
            row_bytes = store["a"].pool.layout.row_bytes
            assert store.verify().bytes <= min(step + 1, 3) * ROWS * row_bytes + ROWS * row_bytes
        assert store.versions == (4, 5, 6)


def test_what_takes_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'directory=.*cold="memory".*leave it out'):
        tierstore.open(tmp_path / "store", cold="memory")
    with pytest.raises(ValueError, match=r'mode="r" does not go with cold="memory"'):
        tierstore.open(cold="memory", mode="r")
    with pytest.raises(ValueError, match=r'needs a directory.*cold="memory"'):
        tierstore.open()
    with pytest.raises(ValueError, match="cold="):
        tierstore.open(cold="disk")  # type: ignore[arg-type]
    with tierstore.open(cold="memory", ddr="1MiB", threads=1) as store:
        store.create_table(CONFIG)
        store.commit()
        with pytest.raises(TierstoreError, match=r"no files to copy; give it a directory"):
            store.backup(tmp_path / "backup")
        assert store.find_newer() is None
        with pytest.raises(TableError, match="no table 'd' in :memory:"):
            store["d"]
    with pytest.raises(ClosedError, match=":memory: is closed"):
        store.commit()
    assert list(tmp_path.iterdir()) == []

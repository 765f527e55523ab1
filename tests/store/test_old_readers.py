"""A reader that never refreshes makes the row file grow: its writer says so, and how much it is."""

import logging
import os
from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.io import oldest_reader
from tierstore.offline.inspection import describe_store

ROWS = 1000
CONFIG = tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=16)


def test_what_an_old_reader_holds_is_told(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(oldest_reader, "_LEAST_BYTES", 300 << 10)

    def told() -> list[str]:
        found = [each.message for each in caplog.records if each.levelno == logging.WARNING]
        caplog.clear()
        return found

    with tierstore.open(store_dir, ddr="4MiB", threads=1) as store:
        table = store.create_table(CONFIG)

        def commit(times: int) -> None:
            for _ in range(times):
                table.write(torch.arange(ROWS), torch.randn(ROWS, 16))
                store.commit()

        commit(12)
        with tierstore.open(store_dir, mode="r", ddr="4MiB", threads=1) as reader:
            reader["t"].read(torch.arange(3))
            assert told() == []
            assert store.stats().ssd.held_bytes == 0
            before = (store_dir / "rows.lmdb").stat().st_blocks * 512
            commit(40)
            growth = (store_dir / "rows.lmdb").stat().st_blocks * 512 - before
            held = store.stats().ssd.held_bytes
            assert growth / 2 < held < growth + before
            said = told()
            assert 2 <= len(said) <= 6  # each of twice as much
            assert all(f"process {os.getpid()} still shows an old version, and keeps " in each for each in said)
            assert all("Store.refresh()" in each for each in said)
            assert f"process {os.getpid()} shows an older version, and keeps " in describe_store(store_dir)
            reader.refresh()
            commit(2)
            assert store.stats().ssd.held_bytes < held / 4
        commit(1)
        assert store.stats().ssd.held_bytes == 0
        assert told() == []
    assert "keeps" not in describe_store(store_dir)

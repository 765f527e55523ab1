"""Sharded tables in checkpoints: of torch.distributed.checkpoint, for any number of ranks, and of the store itself."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import tierstore
from tierstore import checkpoint
from tierstore.dist import open_sharded
from tierstore.exchange import rows as chunked

from .ranks import run
from .test_whole import SMALL, TABLES, config_of, contents, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def states(folder: Path) -> dict[str, Any]:
    with tierstore.open(folder, mode="r", **SMALL) as store:
        return {name: table.state for name, table in store.tables.items()}


def save(folder: Path, path: Path) -> None:
    chunked.CHUNK_BYTES = 1 << 12  # type: ignore[misc]
    with open_sharded(folder, **SMALL) as store:
        dcp.save({"tables": checkpoint.rows(store)}, checkpoint_id=path)


def load(folder: Path, path: Path) -> None:
    chunked.CHUNK_BYTES = 1 << 12  # type: ignore[misc]
    with open_sharded(folder, **SMALL) as store:
        for name, (kind, _) in TABLES.items():
            store.create_table(config_of(name), sharding_type=kind)  # type: ignore[arg-type]
        dcp.load({"tables": checkpoint.rows(store)}, checkpoint_id=path)
        store.commit()


def test_other_numbers_of_ranks_load_what_ranks_saved(tmp_path: Path) -> None:
    first, path = tmp_path / "2", tmp_path / "saved"
    run(train, 2, tmp_path, first, 1)
    expected = contents(first), states(first)
    run(save, 2, tmp_path, first, path)
    for size in (3, 1):
        run(load, size, tmp_path, other := tmp_path / f"loaded-{size}", path)
        assert (contents(other), states(other)) == expected
    with tierstore.open(plain := tmp_path / "plain", **SMALL) as store:
        for name in TABLES:
            store.create_table(config_of(name))
        dcp.load({"tables": checkpoint.rows(store)}, checkpoint_id=path)
        store.commit()
        dcp.save({"tables": checkpoint.rows(store)}, checkpoint_id=tmp_path / "again")
    assert (contents(plain), states(plain)) == expected
    run(load, 2, tmp_path, last := tmp_path / "last", tmp_path / "again")
    assert (contents(last), states(last)) == expected

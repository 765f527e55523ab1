"""Exports: what is asked for, whole or not at all, beside whatever else goes on."""

import errno
import fcntl
import os

import pytest
import safetensors.torch
import torch

import tierstore
from tierstore import errors
from tierstore.exchange import export_store, exporting
from tierstore.exchange.rows import chunks
from tierstore.system import files as system_files

from .support import DTYPES, OPTIMIZERS, STATES, bits, config, make_store, weights


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store", config(rows=90), config("user", 40, 3), config("shop", 20, 3))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_many_chunks_and_a_small_budget_change_nothing(tmp_path, monkeypatch):
    source = make_store(tmp_path / "store", config(rows=3000, dim=8, optimizer=OPTIMIZERS["adam"]))
    export_store(source, tmp_path / "whole", state=True)
    monkeypatch.setattr("tierstore.exchange.rows.CHUNK_BYTES", 20_000)
    with tierstore.open(source, mode="r", ddr="8MiB") as store:
        assert len(list(chunks(store["item"]))) > 20
    shown = []
    export_store(source, tmp_path / "parts", state=True, ddr="450KiB", progress=lambda *pair: shown.append(pair))
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert shown == sorted(shown)
    assert {total for _, total in shown} == {3000 * 24 * 4} == {shown[-1][0]}


def test_tables_and_keys_are_chosen_and_state_lies_beside_its_weights(store, tmp_path):
    report = export_store(store, tmp_path / "out", tables=["user", "shop", "user"], key="net.{table}")
    assert report.keys == ("net.user", "net.shop")
    assert report.rows == 60
    assert export_store(store, tmp_path / "one", tables=["user"], key="weight", state=True).keys == ("weight",)
    source = make_store(tmp_path / "other", config(optimizer=OPTIMIZERS["rowwise_adagrad"]))
    names = {"weight": "sum", "a.weight": "a.sum", "aweight": "aweight.sum", "{table}": "item.sum"}
    for key, expected in names.items():
        report = export_store(source, tmp_path / "out", key=key, state=True, force=True)
        assert report.keys[1] == expected
        assert safetensors.torch.load_file(tmp_path / "out")[expected].shape == (500,)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"format": "pickle"}, ValueError, "format='pickle' is not one of safetensors, parquet"),
        ({"out": "rows.csv"}, ValueError, "the file's ending='.csv' is not one of .safetensors, .parquet"),
        ({"out": "rows.pt"}, ValueError, r"rows.pt: torch checkpoints are not written.*safetensors.torch.load_file"),
        ({"format": "torch"}, ValueError, r"out: torch checkpoints are not written.*torch.save"),
        ({"tables": ["usr"]}, errors.TableError, "did you mean 'user'?"),
        ({"key": "weight"}, ValueError, r"names both 'item' and 'user' 'weight'; put \{table\} in it"),
        ({"tables": []}, ValueError, "nothing to export"),
        ({"key": "{table}", "dense": True}, None, ""),
        ({"tables": ["user"], "key": "count", "dense": True}, ValueError, "two tensors would be named 'count'"),
        ({"tables": ["user"], "key": "__metadata__"}, ValueError, "named '__metadata__'"),
        ({"ddr": "1KiB"}, errors.BudgetError, "give at least"),
    ],
)
def test_wrong_arguments_leave_nothing(store, tmp_path, arguments, error, message):
    if error is None:
        export_store(store, tmp_path / "out", **arguments)
        assert names(tmp_path) == ["out", "store"]
        return
    with pytest.raises(error, match=message):
        export_store(**{"directory": store, "out": tmp_path / "out", **arguments})
    assert names(tmp_path) == ["store"]


def test_a_partial_file_is_written_over_unless_it_is_anothers(store, tmp_path):
    partial = tmp_path / "out.partial"
    with partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(errors.TierstoreError, match=r"out\.partial is being written by another process"):
            export_store(store, tmp_path / "out")
    partial.unlink()
    (tmp_path / "precious").write_bytes(b"mine")
    partial.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"out\.partial"):
        export_store(store, tmp_path / "out")
    assert (tmp_path / "precious").read_bytes() == b"mine"
    partial.unlink()
    partial.write_bytes(b"x" * 100_000)
    export_store(store, tmp_path / "out")
    assert len(safetensors.torch.load_file(tmp_path / "out")) == 3
    assert names(tmp_path) == ["out", "precious", "store"]


def test_an_existing_file_is_replaced_only_if_so_asked(store, tmp_path):
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="exists; choose another name, or overwrite it with --force"):
        export_store(store, out)
    assert out.read_bytes() == b"mine"
    export_store(store, out, force=True)
    assert len(safetensors.torch.load_file(out)) == 3
    with pytest.raises(FileExistsError, match="choose the name of a file"):
        export_store(store, store, force=True)
    with pytest.raises(FileNotFoundError, match="is not a directory; make it first"):
        export_store(store, tmp_path / "no" / "out")
    assert names(tmp_path) == ["out", "store"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_device_that_refuses_leaves_nothing(store, tmp_path, monkeypatch, code, call):
    def refuse(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(system_files.os, call, refuse)
    with pytest.raises((errors.DiskFullError, OSError)) as caught:
        export_store(store, tmp_path / "out")
    monkeypatch.undo()
    assert isinstance(caught.value, errors.DiskFullError) == (code != errno.EIO)
    if code != errno.EIO:
        assert str(tmp_path / "out") in str(caught.value)
    assert names(tmp_path) == ["store"]


def test_a_disk_too_small_is_told_before_anything_is_written(store, tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize, f_blocks = 1, 4096, 2**20

    monkeypatch.setattr(system_files.os, "statvfs", lambda path: Full)
    monkeypatch.setattr(system_files.os, "pwrite", None)
    with pytest.raises(errors.DiskFullError, match=r"out: .* are needed and 4\.0 KiB are free"):
        export_store(store, tmp_path / "out")
    assert names(tmp_path) == ["store"]


def test_damaged_rows_are_an_error_and_no_file(store, tmp_path):
    path = store / "rows.lmdb"
    data = bytearray(path.read_bytes())
    needle = bits(weights(store)[:1])
    at = data.find(needle)
    assert at > 0
    while at >= 0:
        data[at] ^= 1
        at = data.find(needle, at + 1)
    path.write_bytes(data)
    with pytest.raises(errors.ChecksumError, match=r"rows\.lmdb: row 0 of table 0"):
        export_store(store, tmp_path / "out")
    assert names(tmp_path) == ["store"]


def test_a_kept_version_is_exported(tmp_path):
    rows = []
    with tierstore.open(tmp_path / "store", ddr="8MiB", keep=2) as store:
        table = store.create_table(config())
        for _ in range(3):
            table.write(torch.arange(100), torch.randn(100, 5))
            rows.append(table.read(torch.arange(500)))
            store.commit()
    for version in (2, 3):
        report = export_store(tmp_path / "store", tmp_path / f"out{version}", version=version)
        assert report.version == version
        (found,) = safetensors.torch.load_file(tmp_path / f"out{version}").values()
        assert bits(found) == bits(rows[version - 1])
    with pytest.raises(errors.StoreNotFoundError, match="version 1 is not kept; kept: 2, 3"):
        export_store(tmp_path / "store", tmp_path / "out1", version=1)
    assert names(tmp_path) == ["out2", "out3", "store"]


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_were_written_are_rows_of_a_parquet_file(tmp_path, monkeypatch, rule, dtype):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 1000)
    store = make_store(tmp_path / "store", config(optimizer=OPTIMIZERS[rule], dtype=dtype), config("other"))
    report = export_store(store, tmp_path / "rows.parquet", format="parquet", tables=["item"], state=True)
    file = parquet.read_table(tmp_path / "rows.parquet")
    assert file.column_names == list(report.keys) == ["id", "weight", *STATES[rule]]
    ids = torch.tensor(file["id"].to_pylist())
    assert ids.tolist() == sorted({row for step in range(3) for row in range(step, 500, 7)})
    assert report.rows == len(ids)
    with tierstore.open(store, mode="r", ddr="8MiB") as opened:
        item = opened["item"]
        assert torch.equal(torch.tensor(file["weight"].to_pylist()), item.read(ids).float())
        state = [torch.tensor(file[name].to_pylist()).reshape(len(ids), -1) for name in STATES[rule]]
        assert torch.equal(torch.cat([torch.empty(len(ids), 0), *state], dim=1), item.read_state(ids))
    for arguments in ({}, {"tables": ["item"], "dense": True}):
        with pytest.raises(ValueError, match="is of one table, without dense tensors"):
            export_store(store, tmp_path / "no.parquet", format="parquet", **arguments)

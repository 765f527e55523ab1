"""Exports: the same bits when imported again, whole files or none, what others read; and the page's examples."""

import errno
import fcntl
import json
import os
import re
import shlex
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import tierstore
from bench.data import ROOT, examples
from tierstore import errors
from tierstore.cli import entry as cli
from tierstore.exchange import export_store, import_files
from tierstore.exchange.tensor_files import SafetensorsFile, TensorSpec
from tierstore.system import files as system_files

from .support import DTYPES, OPTIMIZERS, STATES, bits, config, contents, make_store

DENSE = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
DENSE += [torch.uint8, torch.bool]
GIB = 2**30


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return make_store(folder / "store", config(rows=90), config("user", 40, 3), config("shop", 20, 3))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("dtype", DTYPES)
def test_export_and_import_give_the_same_bits(tmp_path, dtype):
    tables = [config(kind, 300, 5, dtype=dtype, optimizer=each) for kind, each in OPTIMIZERS.items()]
    source = make_store(tmp_path / "source", *tables)
    report = export_store(source, tmp_path / "out", state=True)
    assert (report.rows, report.version) == (1200, 1)
    expected = [f"embedding_bags.{kind}.{name}" for kind in OPTIMIZERS for name in ["weight", *STATES[kind]]]
    assert list(report.keys) == expected
    assert (tmp_path / "out").stat().st_size == report.size_bytes
    imported = import_files(tmp_path / "copy", [tmp_path / "out"])
    assert contents(tmp_path / "copy") == contents(source)
    assert [table.with_state for table in imported.tables] == [bool(STATES[kind]) for kind in OPTIMIZERS]
    # Rows never written stay so: each table had 3 of 7 rows written.
    assert {table.changed_rows for table in imported.tables} == {129}
    assert export_store(tmp_path / "copy", tmp_path / "again", state=True).keys == report.keys
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()


@pytest.mark.parametrize(("ids", "dtype"), [(None, "bfloat16"), (tierstore.DynamicIds(), "float32")])
def test_rows_of_one_table_are_read_by_numpy_and_arrow(tmp_path, monkeypatch, ids, dtype):
    monkeypatch.setattr("tierstore.exchange.rows.CHUNK_BYTES", 1000)
    known = torch.arange(50) if ids is None else torch.tensor([5, 2**40, 7, -3])
    with tierstore.open(tmp_path / "store", ddr="8MiB") as store:
        table = store.create_table(config("user", 50, 3, dtype=dtype, ids=ids))
        if ids is not None:
            table.admit(known)
        table.write(known[:4], torch.tensor([[1 / 3, -0.0, 1e-30], [3e38, float("inf"), 5], [1, 2, 3], [4, 5, 6]]))
        store.commit()
        known = known.sort().values
        expected = table.read(known).float().numpy()

    def export(name):
        assert export_store(tmp_path / "store", tmp_path / name)[2:4] == ((), len(known))
        return tmp_path / name

    if ids is None:
        np.testing.assert_array_equal(np.load(export("a.npy")), expected)
    else:
        with pytest.raises(ValueError, match="no dynamic ids: name one of user"):
            export("a.npy")
    with pytest.raises(ValueError, match="no key, state and dense"):
        export_store(tmp_path / "store", tmp_path / "b.csv", key="{table}")
    pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    with monkeypatch.context() as full:
        full.setattr("tierstore.system.files.free_bytes", lambda _: 1)
        for name in ("b.csv", "b"):
            with pytest.raises(errors.DiskFullError, match="are needed and 1 B are free; nothing"):
                export(name)
        assert names(tmp_path) == (["a.npy", "store"] if ids is None else ["store"])
    found = parquet.read_table(export("a.parquet")).to_pydict()
    assert found["id"] == known.tolist()
    np.testing.assert_array_equal(np.array(found["vector"], np.float32), expected)
    columns = csv.read_csv(export("a.csv")).to_pydict()
    assert columns.pop("id") == known.tolist()
    np.testing.assert_array_equal(np.array([columns[f"c{i}"] for i in range(3)], np.float32).T, expected)


def test_a_table_may_get_another_name_and_come_without_its_state(tmp_path):
    source = make_store(tmp_path / "source", config(optimizer=OPTIMIZERS["adam"]))
    (_, *was) = contents(source)["item"]
    for state in (True, False):
        export_store(source, tmp_path / f"{state}", state=state)
        import_files(tmp_path / f"{state}-copy", [tmp_path / f"{state}"], mapping={"embedding_bags.item.weight": "it"})
        found, *now = contents(tmp_path / f"{state}-copy")["it"]
        assert (found.name, found.feature_names, found.optimizer) == ("it", ("it",), OPTIMIZERS["adam"])
        if state:
            assert now == was
        else:
            assert (tuple(now[0]), now[1], any(now[2])) == ((0, 0.0625), was[1], False)


def test_many_chunks_and_a_small_budget_change_nothing(tmp_path, monkeypatch):
    source = make_store(tmp_path / "store", config(rows=3000, dim=8, optimizer=OPTIMIZERS["adam"]))
    export_store(source, tmp_path / "whole", state=True)
    monkeypatch.setattr("tierstore.exchange.rows.CHUNK_BYTES", 20_000)
    shown = []
    export_store(source, tmp_path / "parts", state=True, ddr="450KiB", progress=lambda *pair: shown.append(pair))
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert shown == sorted(shown)
    assert len(shown) > 10
    assert {total for _, total in shown} == {3000 * 24 * 4} == {shown[-1][0]}


def test_tables_and_keys_are_chosen_and_state_lies_beside_its_weights(store, tmp_path):
    report = export_store(store, tmp_path / "out", tables=["user", "shop", "user"], key="net.{table}")
    assert (report.keys, report.rows) == (("net.user", "net.shop"), 60)
    assert export_store(store, tmp_path / "one", tables=["user"], key="weight", state=True).keys == ("weight",)
    export_store(store, tmp_path / "all", key="{table}", dense=True)
    source = make_store(tmp_path / "other", config(optimizer=OPTIMIZERS["rowwise_adagrad"]))
    states = {"weight": "sum", "a.weight": "a.sum", "aweight": "aweight.sum", "{table}": "item.sum"}
    for key, expected in states.items():
        assert export_store(source, tmp_path / "out", key=key, state=True, force=True).keys[1] == expected
        assert safetensors.torch.load_file(tmp_path / "out")[expected].shape == (500,)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"out": "rows.csv"}, ValueError, r"one table, .*: name one of item, user, shop \(--table\), or choose .safet"),
        ({"out": "a.npy", "tables": ["user"], "state": True}, ValueError, "no key, state and dense"),
        ({"out": "rows.pt"}, ValueError, r"rows.pt: an export.*safetensors.torch.load_file .* torch.save"),
        ({"tables": ["usr"]}, errors.TableError, "did you mean 'user'?"),
        ({"key": "weight"}, ValueError, r"names both 'item' and 'user' 'weight'; put \{table\} in it"),
        ({"tables": []}, ValueError, "nothing to export"),
        ({"tables": ["user"], "key": "count", "dense": True}, ValueError, "two tensors would be named 'count'"),
        ({"tables": ["user"], "key": "__metadata__"}, ValueError, "named '__metadata__'"),
        ({"ddr": "1KiB"}, errors.BudgetError, "give at least"),
        ({"out": "no/out"}, FileNotFoundError, "is not a directory; make it first"),
        ({"version": 9}, errors.StoreNotFoundError, "version 9 is not kept; kept: 1"),
    ],
)
def test_wrong_arguments_leave_nothing(store, tmp_path, monkeypatch, arguments, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        export_store(**{"directory": store, "out": tmp_path / "out", **arguments})
    assert names(tmp_path) == []


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
    partial.unlink()
    with pytest.raises(FileExistsError, match="exists; choose another name, or overwrite it with --force"):
        export_store(store, tmp_path / "precious")
    assert (tmp_path / "precious").read_bytes() == b"mine"
    with pytest.raises(FileExistsError, match="choose the name of a file"):
        export_store(store, store, force=True)
    partial.write_bytes(b"x" * 100_000)
    (tmp_path / "out").touch()
    export_store(store, tmp_path / "out", force=True)
    assert len(safetensors.torch.load_file(tmp_path / "out")) == 3
    assert names(tmp_path) == ["out", "precious"]


@pytest.mark.parametrize(("call", "code"), [("pwrite", errno.ENOSPC), ("fsync", errno.EDQUOT), ("fsync", errno.EIO)])
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
    assert names(tmp_path) == []


def test_a_kept_version_is_exported(tmp_path):
    rows = []
    with tierstore.open(tmp_path / "store", ddr="8MiB", keep=2) as store:
        table = store.create_table(config())
        for step in range(2):
            table.write(torch.arange(100), torch.full((100, 5), step + 0.5))
            rows.append(table.read(torch.arange(500)))
            store.commit()
    for version in (1, 2):
        assert export_store(tmp_path / "store", tmp_path / f"out{version}", version=version).version == version
        (found,) = safetensors.torch.load_file(tmp_path / f"out{version}").values()
        assert bits(found) == bits(rows[version - 1])


def test_dense_tensors_of_every_usual_dtype_lie_aligned_and_without_gaps(tmp_path):
    store = make_store(tmp_path / "store", config(rows=9, dim=1, optimizer=OPTIMIZERS["rowwise_adagrad"]))
    tensors = {}
    for dtype in DENSE:
        odd = torch.arange(15).reshape(3, 5).to(dtype)
        tensors |= {f"{dtype}.scalar": odd[1, 1].clone(), f"{dtype}.empty": odd[:0].clone(), f"{dtype}.odd": odd}
    with tierstore.open(store, ddr="8MiB") as opened:
        opened.commit(tensors=tensors)
    export_store(store, tmp_path / "out", state=True, dense=True)
    found = safetensors.torch.load_file(tmp_path / "out")
    assert found.keys() == tensors.keys() | {"embedding_bags.item.weight", "embedding_bags.item.sum"}
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    data = (tmp_path / "out").read_bytes()
    length, end = int.from_bytes(data[:8], "little"), 0
    assert (8 + length) % 64 == 0
    for name, tensor in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            assert tensor["data_offsets"][0] == end
            assert end % found[name].itemsize == 0
            end = tensor["data_offsets"][1]
    assert 8 + length + end == len(data)
    with tierstore.open(store, ddr="8MiB") as opened:
        opened.commit(tensors={"eighth": torch.zeros(3, dtype=torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=r"'eighth' is torch\.float8_e4m3fn"):
        export_store(store, tmp_path / "no", dense=True)
    assert names(tmp_path) == ["out", "store"]


def test_tensors_beyond_four_gib_are_found(tmp_path):
    specs = [TensorSpec("first", torch.float32, (5 * GIB // 16, 4)), TensorSpec("last", torch.float32, (3 * GIB, 1))]
    file, path = SafetensorsFile(specs, {"a": 1}), tmp_path / "large"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, file.size_bytes)
        os.pwrite(descriptor, file.head, 0)
        for spec in specs:
            file.places[spec.name] += spec.size_bytes - 16
            file.append(descriptor, spec.name, torch.ones(4).numpy())
    finally:
        os.close(descriptor)
    assert path.stat().st_size == file.size_bytes > 17 * GIB - 16
    with safetensors.safe_open(path, framework="pt") as opened:
        found = [opened.get_slice(spec.name)[spec.shape[0] - 4 :].clone() for spec in specs]
    assert found[0].tolist() == [[0.0] * 4] * 3 + [[1.0] * 4]
    assert found[1].tolist() == [[1.0]] * 4


PAGE = (ROOT / "docs" / "exchange.md").read_text()


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_store(tmp_path / "shop", config(optimizer=OPTIMIZERS["adam"]), config("user", 40, 3))


def test_commands(shop, tmp_path, capsys):
    commands = re.findall(r"^    tierstore (.*?)(?:\s+#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) == 8
    for command in commands:
        assert cli.main(shlex.split(command)) == 0, command
    assert "other: new (sum, RowWiseAdagrad lr 0.05), 500 rows" in capsys.readouterr().out
    assert contents(tmp_path / "shop-compact") == contents(shop)
    copied = contents(tmp_path / "copy")
    assert copied["item"] == contents(shop)["item"]
    assert copied["other"][0].optimizer == tierstore.optim.RowWiseAdagrad(lr=0.05)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = "".join(examples("docs/exchange.md"))
    names: dict[str, Any] = {}
    exec(compile(example, "exchange.md", "exec"), names)
    assert names["state"]["embedding_bags.item.exp_avg"].shape == (1000, 8)
    assert names["report"].version == 2
    with tierstore.open("small", mode="r", ddr="8MiB") as store:
        assert torch.equal(store["bag"].read(torch.arange(1000)), names["bag"].weight.detach())

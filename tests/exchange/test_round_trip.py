"""What is exported and imported again has the same bits, weights and optimizer state; and what others read of it."""

import json
import os

import pytest
import safetensors.torch
import torch

import tierstore
from tierstore.exchange import export_store, import_files
from tierstore.exchange.tensor_files import SafetensorsFile, TensorSpec

from .support import DTYPES, OPTIMIZERS, STATES, bits, config, contents, earlier_checkpoint, make_store, weights

DENSE = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
DENSE += [torch.uint8, torch.bool]
GIB = 2**30


@pytest.mark.parametrize("dtype", DTYPES)
def test_export_and_import_give_the_same_bits(tmp_path, dtype):
    tables = [config(kind, 300, 5, dtype=dtype, optimizer=each) for kind, each in OPTIMIZERS.items()]
    source = make_store(tmp_path / "source", *tables)
    report = export_store(source, tmp_path / "out", state=True)
    assert report.rows == 1200
    assert report.version == 1
    expected = [f"embedding_bags.{kind}.{name}" for kind in OPTIMIZERS for name in ["weight", *STATES[kind]]]
    assert list(report.keys) == expected
    assert (tmp_path / "out").stat().st_size == report.size_bytes

    for copy, file in (
        (tmp_path / "copy", tmp_path / "out"),
        (tmp_path / "other", earlier_checkpoint(tmp_path / "out")),
    ):
        imported = import_files(copy, [file])
        assert contents(copy) == contents(source)
        assert [table.with_state for table in imported.tables] == [bool(STATES[kind]) for kind in OPTIMIZERS]
        # Rows never written stay so: each table had 3 of 7 rows written.
        assert {table.changed_rows for table in imported.tables} == {129}
        assert export_store(copy, tmp_path / "again", state=True, force=True).keys == report.keys
        assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()


def test_a_plain_embedding_bag_loads_an_export_and_is_imported(tmp_path):
    source = make_store(tmp_path / "source", config(rows=50, dim=4))
    export_store(source, tmp_path / "out", tables=["item"], key="weight")
    bag = torch.nn.EmbeddingBag(50, 4, mode="sum")
    bag.load_state_dict(safetensors.torch.load_file(tmp_path / "out"))
    ids, offsets = torch.tensor([3, 4, 3, 49]), torch.tensor([0, 3])
    with tierstore.open(source, mode="r", ddr="8MiB") as store:
        assert torch.equal(bag(ids, offsets), tierstore.TieredEmbeddingBag(store["item"], mode="sum")(ids, offsets))

    trained = torch.nn.EmbeddingBag(50, 4, mode="sum")
    torch.save(trained.state_dict(), tmp_path / "theirs")
    report = import_files(source, [tmp_path / "theirs"], mapping={"weight": "item"})
    assert bits(weights(source)) == bits(trained.weight.detach())
    assert report.version == 2


def test_a_table_may_get_another_name_on_the_way(tmp_path):
    source = make_store(tmp_path / "source", config(optimizer=OPTIMIZERS["adam"]))
    export_store(source, tmp_path / "out", state=True)
    import_files(tmp_path / "copy", [tmp_path / "out"], mapping={"embedding_bags.item.weight": "thing"})
    (_, *was), (found, *now) = contents(source)["item"], contents(tmp_path / "copy")["thing"]
    assert now == was
    assert (found.name, found.feature_names, found.optimizer) == ("thing", ("thing",), OPTIMIZERS["adam"])


def test_weights_alone_come_with_fresh_state_and_the_rate_in_force(tmp_path):
    source = make_store(tmp_path / "source", config(optimizer=OPTIMIZERS["adam"]))
    export_store(source, tmp_path / "out")
    report = import_files(tmp_path / "copy", [tmp_path / "out"])
    assert not report.tables[0].with_state
    found, state, rows, moments = contents(tmp_path / "copy")["item"]
    assert rows == contents(source)["item"][2]
    assert found == contents(source)["item"][0]
    assert not any(moments)
    assert tuple(state) == (0, 0.0625)


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
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0
    for name, tensor in header.items():
        if name != "__metadata__":
            assert tensor["data_offsets"][0] == end
            assert end % found[name].itemsize == 0
            end = tensor["data_offsets"][1]
    assert 8 + length + end == len(data)
    with tierstore.open(store, ddr="8MiB") as opened:
        opened.commit(tensors={"eighth": torch.zeros(3, dtype=torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=r"'eighth' is torch\.float8_e4m3fn"):
        export_store(store, tmp_path / "no", dense=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_tensors_beyond_four_gib_are_found(tmp_path):
    """A sparse file: only the head and the last rows are written."""
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

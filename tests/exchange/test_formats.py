"""The two file formats, seen by others' readers."""

import json
import os
import zipfile

import pytest
import safetensors
import torch

from tierstore.exchange import export_store
from tierstore.exchange.tensor_file import SafetensorsFile, TensorSpec, TorchFile

from .support import OPTIMIZERS, config, make_store

DENSE = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
DENSE += [torch.uint8, torch.bool]
GIB = 2**30


@pytest.fixture
def store(tmp_path):
    return make_store(
        tmp_path / "store",
        config(rows=7, dim=3, dtype="float16", optimizer=OPTIMIZERS["adagrad"]),
        config("user", 9, 1, optimizer=OPTIMIZERS["rowwise_adagrad"]),
    )


def test_safetensors_data_is_aligned_and_without_gaps(store, tmp_path):
    export_store(store, tmp_path / "out", state=True, dense=True)
    data = (tmp_path / "out").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0
    end = 0
    sizes = {"F32": 4, "F16": 2, "I64": 8}
    for name, tensor in header.items():
        if name != "__metadata__":
            assert tensor["data_offsets"][0] == end
            assert end % sizes[tensor["dtype"]] == 0
            end = tensor["data_offsets"][1]
    assert 8 + length + end == len(data)


def test_torch_checkpoint_is_a_sound_archive_with_aligned_storages(store, tmp_path):
    export_store(store, tmp_path / "out", format="torch", state=True, dense=True)
    with zipfile.ZipFile(tmp_path / "out") as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "archive/data.pkl"
        assert archive.read("archive/version") == b"3\n"
        assert json.loads(archive.read("archive/tierstore.json"))["store_version"] == 1
    mapped = torch.load(tmp_path / "out", weights_only=True, mmap=True)
    copied = torch.load(tmp_path / "out", weights_only=True)
    assert len(mapped) == 6
    for name, tensor in copied.items():
        assert torch.equal(tensor, mapped[name])
        assert tensor.is_contiguous()
        assert mapped[name].data_ptr() % 64 == 0
    again = tmp_path / "again"
    torch.save(copied, again)
    assert torch.load(again, weights_only=True).keys() == copied.keys()


@pytest.mark.parametrize("dtype", DENSE, ids=str)
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_dense_tensors_of_every_usual_dtype(store, tmp_path, form, dtype):
    import tierstore

    tensors = {"scalar": torch.ones((), dtype=dtype), "empty": torch.ones(0, 3, dtype=dtype)}
    tensors["odd"] = torch.arange(15).reshape(3, 5).to(dtype)
    with tierstore.open(store, ddr="8MiB") as opened:
        opened.commit(tensors=tensors)
    export_store(store, tmp_path / "out", format=form, tables=["user"], dense=True)
    if form == "torch":
        found = torch.load(tmp_path / "out", weights_only=True, mmap=True)
    else:
        with safetensors.safe_open(tmp_path / "out", framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_unusual_dense_tensors_are_refused_and_nothing_is_left(store, tmp_path, form):
    import tierstore

    with tierstore.open(store, ddr="8MiB") as opened:
        opened.commit(tensors={"eighth": torch.zeros(3, dtype=torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match=r"'eighth' is torch\.float8_e4m3fn"):
        export_store(store, tmp_path / "out", format=form, dense=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


@pytest.mark.parametrize("plan", [SafetensorsFile, TorchFile])
def test_tensors_beyond_four_gib_are_found(tmp_path, plan):
    """Sparse files: only frames and the last rows are written."""
    specs = [TensorSpec("first", torch.float32, (5 * GIB // 16, 4)), TensorSpec("last", torch.float32, (3 * GIB, 1))]
    file = plan(specs, {"a": 1})
    path = tmp_path / "large"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(descriptor, file.size_bytes)
        for spec in specs:
            file.places[spec.name] += spec.size_bytes - 16
            file.append(descriptor, spec.name, torch.ones(4).numpy())
        file.finish(descriptor)
    finally:
        os.close(descriptor)
    assert path.stat().st_size >= file.size_bytes > 17 * GIB - 16
    if plan is TorchFile:
        tensors = torch.load(path, weights_only=True, mmap=True)
        found = [tensors[spec.name][-4:].clone() for spec in specs]
    else:
        with safetensors.safe_open(path, framework="pt") as opened:
            found = [opened.get_slice(spec.name)[spec.shape[0] - 4 :].clone() for spec in specs]
    assert found[0].tolist() == [[0.0] * 4] * 3 + [[1.0] * 4]
    assert found[1].tolist() == [[1.0]] * 4

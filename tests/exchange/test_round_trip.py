"""What is exported and imported again has the same bits, weights and optimizer state."""

import pytest
import safetensors.torch
import torch

import tierstore
from tierstore.exchange import export_store, import_files

from .support import DTYPES, OPTIMIZERS, STATES, bits, config, contents, make_store, weights

FORMATS = ("safetensors", "torch")


def load(path, form):
    if form == "torch":
        return torch.load(path, weights_only=True, mmap=True)
    return safetensors.torch.load_file(path)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_export_and_import_give_the_same_bits(tmp_path, form, dtype):
    tables = [config(kind, 300, 5, dtype=dtype, optimizer=each) for kind, each in OPTIMIZERS.items()]
    source = make_store(tmp_path / "source", *tables)
    report = export_store(source, tmp_path / "out", format=form, state=True)
    assert report.rows == 1200
    assert report.version == 1
    expected = [f"embedding_bags.{kind}.{name}" for kind in OPTIMIZERS for name in ["weight", *STATES[kind]]]
    assert list(report.keys) == expected
    assert (tmp_path / "out").stat().st_size == report.size_bytes

    imported = import_files(tmp_path / "copy", [tmp_path / "out"])
    assert contents(tmp_path / "copy") == contents(source)
    assert [table.with_state for table in imported.tables] == [bool(STATES[kind]) for kind in OPTIMIZERS]
    # Rows never written stay so: each table had 3 of 7 rows written.
    assert {table.changed_rows for table in imported.tables} == {129}
    assert export_store(tmp_path / "copy", tmp_path / "again", format=form, state=True).keys == report.keys
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()


@pytest.mark.parametrize("form", FORMATS)
def test_a_plain_embedding_bag_loads_an_export_and_is_imported(tmp_path, form):
    source = make_store(tmp_path / "source", config(rows=50, dim=4))
    export_store(source, tmp_path / "out", format=form, tables=["item"], key="weight")
    bag = torch.nn.EmbeddingBag(50, 4, mode="sum")
    bag.load_state_dict(load(tmp_path / "out", form))
    ids, offsets = torch.tensor([3, 4, 3, 49]), torch.tensor([0, 3])
    with tierstore.open(source, mode="r", ddr="8MiB") as store:
        assert torch.equal(bag(ids, offsets), tierstore.TieredEmbeddingBag(store["item"], mode="sum")(ids, offsets))

    trained = torch.nn.EmbeddingBag(50, 4, mode="sum")
    if form == "torch":
        torch.save(trained.state_dict(), tmp_path / "theirs")
    else:
        safetensors.torch.save_file(trained.state_dict(), tmp_path / "theirs")
    report = import_files(source, [tmp_path / "theirs"], mapping={"weight": "item"})
    assert bits(weights(source)) == bits(trained.weight.detach())
    assert report.version == 2


@pytest.mark.parametrize("form", FORMATS)
def test_a_table_may_get_another_name_on_the_way(tmp_path, form):
    source = make_store(tmp_path / "source", config(optimizer=OPTIMIZERS["adam"]))
    export_store(source, tmp_path / "out", format=form, state=True)
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

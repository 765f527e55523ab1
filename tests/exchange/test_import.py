"""Imports: files of others, what does not fit, files that mean harm; nothing half done, and in bounded memory."""

import json
import math
import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

import tierstore
from tests.children import run
from tests.stored import segments_of
from tierstore import errors
from tierstore.exchange import export_store, import_files
from tierstore.exchange.tensor_files import ExportedTable, metadata_of
from tierstore.store.version import TableState

from .support import OPTIMIZERS, bits, config, contents, make_store, weights

ITEM = "embedding_bags.item"
KEY = f"{ITEM}.weight"


def saved(path, tensors, form="safetensors"):
    if form == "torch":
        torch.save(tensors, path)
    else:
        safetensors.torch.save_file(tensors, path)
    return path


def some(rows=6, dim=3, dtype=torch.float32):
    return torch.linspace(-1, 1, rows * dim).reshape(rows, dim).to(dtype)


@pytest.mark.parametrize(("form", "prefix"), [("safetensors", ""), ("torch", "module.model.sparse_arch.ebc.")])
def test_torchrec_keys_are_tables_under_any_prefix(tmp_path, form, prefix):
    tensors = {f"{prefix}embedding_bags.{name}.weight": some(rows) for name, rows in (("a", 4), ("t_b", 9))}
    tensors |= {"over.weight": some(), "over.bias": torch.ones(3)}
    report = import_files(tmp_path / "store", [saved(tmp_path / "file", tensors, form)])
    assert sorted((each.name, each.rows, each.created) for each in report.tables) == [("a", 4, True), ("t_b", 9, True)]
    assert sorted(report.left_out) == ["over.bias", "over.weight"]
    assert torch.equal(weights(tmp_path / "store", "t_b"), some(9))


def test_tables_may_be_spread_over_files(tmp_path):
    one = saved(tmp_path / "one", {"embedding_bags.a.weight": some(4), "embedding_bags.b.sum": torch.ones(5)})
    two = saved(tmp_path / "two", {"embedding_bags.b.weight": some(5)}, "torch")
    report = import_files(tmp_path / "store", [one, two, one], optimizer=tierstore.optim.RowWiseAdagrad())
    assert [(table.name, table.with_state) for table in report.tables] == [("a", False), ("b", True)]
    assert (report.version, report.left_out) == (1, ())
    three = saved(tmp_path / "three", {"embedding_bags.a.weight": some(4)})
    with pytest.raises(ValueError, match=r"both .*one and .*three have .*; give one of the two files"):
        import_files(tmp_path / "other", [one, three])


@pytest.mark.parametrize(("form", "count"), [("safetensors", torch.tensor([10])), ("torch", torch.tensor(10.0))])
def test_adam_goes_on_as_torch_does_where_its_count_of_updates_is_given(tmp_path, form, count):
    bag = torch.nn.EmbeddingBag.from_pretrained(some(), freeze=False, mode="sum", sparse=True)
    rule = torch.optim.SparseAdam(bag.parameters(), lr=0.01)

    def train(module, steps):
        for step in steps:
            rule.zero_grad()
            (module(torch.tensor([[0, step % 6], [1, 2]])) - 1).square().sum().backward()
            if module is bag:
                rule.step()

    train(bag, range(10))
    parts = {"weight": bag.weight.detach(), "step": count}
    parts |= {name: rule.state[bag.weight][name] for name in ("exp_avg", "exp_avg_sq")}
    file = saved(tmp_path / "file", {f"embedding_bags.item.{name}": part for name, part in parts.items()}, form)
    report = import_files(tmp_path / "store", [file], optimizer=tierstore.optim.Adam(lr=0.01))
    assert (report.left_out, report.tables[0].notes) == ((), ())
    with tierstore.open(tmp_path / "store", ddr="1MiB") as store:
        train(tierstore.TieredEmbeddingBag(store["item"]), range(10, 13))
        train(bag, range(10, 13))
        store.commit()
        torch.testing.assert_close(store["item"].read(torch.arange(6)), bag.weight.detach())


STATE = {"exp_avg": some() / 8, "exp_avg_sq": some().square() / 8, "step": 10}


def test_of_a_checkpoint_of_torch_the_named_tensors_are_taken(tmp_path):
    """As ``torch.save`` of model and optimizer writes it; nothing is a table for its name."""
    checkpoint = {
        "model": {"item": {"weight": some(), **STATE}, "over.weight": some()},
        "optim": {"state": {0: STATE}, "param_groups": [{"lr": 0.1}]},
        "epoch": 3,
    }
    file, mapping = saved(tmp_path / "file", checkpoint, "torch"), {"model.item.weight": "item"}
    report = import_files(tmp_path / "store", [file], mapping=mapping, optimizer=OPTIMIZERS["adam"])
    assert [table.name for table in report.tables] == ["item"]
    others = {"epoch", "model.over.weight", "optim.param_groups", *(f"optim.state.0.{name}" for name in STATE)}
    assert set(report.left_out) == others
    _, state, _, moments = contents(tmp_path / "store")["item"]
    assert state.step == 10
    assert moments == bits(torch.cat([STATE["exp_avg"], STATE["exp_avg_sq"]], 1))


def test_what_state_a_table_lacks_is_told(tmp_path):
    def notes(parts, optimizer):
        file = saved(tmp_path / "file", {f"embedding_bags.item.{name}": part for name, part in parts.items()}, "torch")
        return import_files(tmp_path / optimizer, [file], optimizer=OPTIMIZERS[optimizer]).tables[0].notes

    alone, moments = {"weight": some()}, {"weight": some(), **STATE}
    del moments["step"]
    wanted = "no step: {}; give embedding_bags.item.step"
    assert notes(moments, "adam") == (wanted.format("bias correction starts from 0"),)
    assert notes(moments | {"step": 7}, "adam") == ()
    assert notes(moments, "adam") == (wanted.format("the count of updates stays 7"),)
    assert notes(alone, "adam") == ("no optimizer state in the file: the table keeps its own",)
    (note,) = notes(moments, "sgd")
    assert note.startswith("exp_avg, exp_avg_sq not taken, as the table's optimizer is SGD: import into a new table")
    assert notes(alone, "sgd") == ()
    assert notes(alone, "adagrad") == ("no optimizer state in the file: it starts at its initial value",)


def test_an_existing_table_keeps_its_configuration_state_and_the_commit_its_rest(tmp_path):
    store = make_store(tmp_path / "store", config(rows=6, dim=3, pooling="max", optimizer=OPTIMIZERS["adagrad"]))
    was = contents(store)["item"]
    file = saved(tmp_path / "file", {KEY: some()})
    assert import_files(store, [file]).version == 2
    found, state, rows, sums = contents(store)["item"]
    assert (found, state, sums) == (was[0], was[1], was[3])
    assert rows == bits(some()) != was[2]
    with tierstore.open(store, mode="r", ddr="8MiB") as opened:
        assert opened.extra == {"step": 3}
        assert torch.equal(opened.tensors()["dense.weight"], torch.ones(2, 3))
        opened.verify()


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_many_chunks_and_a_small_budget_change_nothing(tmp_path, monkeypatch, form):
    tensors = {KEY: some(5000, 9), "embedding_bags.item.sum": some(5000, 9).abs()}
    file = saved(tmp_path / "file", tensors, form)
    monkeypatch.setattr("tierstore.exchange.rows.CHUNK_BYTES", 30_000)
    shown = []
    small = {"optimizer": OPTIMIZERS["adagrad"], "ddr": "500KiB"}
    import_files(tmp_path / "store", [file], **small, progress=lambda *pair: shown.append(pair))
    assert contents(tmp_path / "store")["item"][2:] == (bits(tensors[KEY]), bits(tensors["embedding_bags.item.sum"]))
    again = import_files(tmp_path / "store", [file])
    assert (again.version, again.tables[0].changed_rows, again.tables[0].created) == (2, 0, False)
    assert len(shown) > 10
    assert shown == sorted(shown)
    assert {total for _, total in shown} == {2 * 5000 * 9 * 4} == {shown[-1][0]}


@pytest.mark.parametrize("ddr", ["6MiB", "64MiB"])
def test_rows_are_appended_once_in_key_order_in_full_segments(tmp_path, ddr):
    """Whether they leave memory meanwhile, or at the commit, which may begin with the newest of them."""
    tensors = {"embedding_bags.a.weight": some(20_000, 64), "embedding_bags.b.weight": some(10_000, 64)}
    import_files(tmp_path / "store", [saved(tmp_path / "file", tensors)], ddr=ddr)
    found = segments_of(tmp_path / "store")
    keys = np.concatenate(found.keys)
    assert np.array_equal(np.sort(keys), np.concatenate([np.arange(20_000), np.arange(10_000) + (1 << 40)]))
    assert (np.diff(keys) < 0).sum() <= 1
    assert len(found.partial()) < 0.02 * len(found.keys)


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float16"), ("float64", "float32"), ("bfloat16", "float32")]
)
def test_conversion_is_asked_for_and_rounds_as_torch_does(tmp_path, source, target):
    rows = some(40, 7, getattr(torch, source)) / 3
    rows[1, 2], rows[4, 0], rows[5, 1] = float("nan"), float("inf"), 1e30
    file = saved(tmp_path / "file", {KEY: rows})
    for _ in range(2):
        assert import_files(tmp_path / "store", [file], dtype=target).tables[0].nonfinite == 2 + (target == "float16")
    assert bits(weights(tmp_path / "store")) == bits(rows.to(getattr(torch, target)))
    with pytest.raises(
        errors.TableError, match=f"is 40 x 7 {source}, table 'item' is 40 x 7 {target}; convert it with dtype="
    ):
        import_files(tmp_path / "store", [file])


ADAM, ADAGRAD = {"optimizer": OPTIMIZERS["adam"]}, {"optimizer": OPTIMIZERS["adagrad"]}
PARTS = {"a.weight": some(), **{f"a.{name}": torch.as_tensor(part) for name, part in STATE.items()}}


@pytest.mark.parametrize(
    ("tensors", "arguments", "message"),
    [
        ({}, {}, "embedding_bags.TABLE.weight; there are none"),
        ({"weight": some()}, {}, r"there are weight\. .* mapping={KEY: TABLE}"),
        ({"weight": some()}, {"mapping": {"wieght": "a"}}, "no tensor 'wieght' in .*did you mean 'weight'?"),
        ({KEY: some().to(torch.int32)}, {}, f"'{KEY}' is not of float64, float32"),
        *(({KEY: torch.ones(*shape)}, {}, r"has shape \[") for shape in ((3,), (3, 0), (2, 2, 2))),
        ({KEY: torch.ones(2, 2).double()}, {}, 'dtype="float32"'),
        ({KEY: some(), f"a.{KEY}": some()}, {}, "would be table 'item'; choose with mapping={KEY: TABLE}"),
        ({KEY: torch.ones(1, 2**17)}, {}, "needs"),
        ({KEY: some(), f"{ITEM}.exp_avg": some()}, ADAM, f"{ITEM}.exp_avg_sq; give all of them or none"),
        ({KEY: some(), f"{ITEM}.step": torch.ones(2)}, ADAM, r"item.step' has shape \[2\]"),
        ({KEY: some(), f"{ITEM}.step": torch.tensor(float("nan"))}, ADAM, "item.step' is nan"),
        ({KEY: some(), f"{ITEM}.sum": some(6, 2)}, ADAGRAD, r"of table 'item' needs torch.float32 \[6, 3\]"),
        ({KEY: some(), f"{ITEM}.sum": some().half()}, ADAGRAD, "is torch.float16"),
        (PARTS, ADAM | {"mapping": {"a.exp_avg": "item.exp_avg"}}, "exp_avg only from its place beside the weights"),
    ],
)
def test_what_cannot_be_a_table_is_named_and_makes_no_store(tmp_path, tensors, arguments, message):
    file = saved(tmp_path / "file", tensors, "torch" if tensors is PARTS else "safetensors")
    with pytest.raises(ValueError, match=message):
        import_files(tmp_path / "store", [file], **arguments)
    assert os.listdir(tmp_path) == ["file"]


def test_what_does_not_fit_an_existing_table_names_both_and_changes_nothing(tmp_path):
    store = make_store(tmp_path / "store", config(rows=6, dim=3), config("user", 5, 3))
    was = contents(store)
    tensors = {"embedding_bags.user.weight": some(5), KEY: some(7)}
    file = saved(tmp_path / "file", tensors)
    with pytest.raises(
        errors.TableError, match=rf"file, tensor '{KEY}' is 7 x 3 float32, table 'item' is 6 x 3 float32"
    ):
        import_files(store, [file])
    file = saved(tmp_path / "file", tensors | {KEY: some().half()})
    with pytest.raises(errors.TableError, match="is 6 x 3 float16, table 'item' is 6 x 3 float32; convert it with"):
        import_files(store, [file])
    assert contents(store) == was
    assert not [path for path in store.iterdir() if path.name.endswith("partial")]


def test_an_import_cut_short_changes_nothing_and_may_be_repeated(tmp_path):
    store = make_store(tmp_path / "store", config(rows=6, dim=3))
    was = contents(store)
    file = saved(tmp_path / "file", {KEY: some(), "embedding_bags.new.weight": some(50)})

    def interrupt(done, total):
        raise KeyboardInterrupt

    (tmp_path / "folder").mkdir()
    for target in (store, tmp_path / "new", tmp_path / "folder"):
        with pytest.raises(KeyboardInterrupt):
            import_files(target, [file], progress=interrupt)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "store"]
    assert not os.listdir(tmp_path / "folder")
    assert contents(store)["item"] == was["item"]
    assert import_files(store, [file]).version == 2
    assert torch.equal(weights(store), some())
    assert torch.equal(weights(store, "new"), some(50))


@pytest.mark.parametrize("rule", [OPTIMIZERS["sgd"], OPTIMIZERS["adam"]])
def test_fewer_rows_than_an_existing_table_has_leave_the_others(tmp_path, rule):
    def rows_of(directory):
        with tierstore.open(directory, mode="r", ddr="8MiB", threads=1) as store:
            ids = torch.arange(store["item"].config.num_embeddings)
            return torch.cat([store["item"].read(ids), store["item"].read_state(ids)], dim=1)

    small = make_store(tmp_path / "small", config(rows=6, dim=3, optimizer=rule))
    export_store(small, tmp_path / "file", state=True)
    store = make_store(tmp_path / "store", config(rows=9, dim=3, optimizer=rule))
    was = rows_of(store)
    (table,) = import_files(store, [tmp_path / "file"]).tables
    assert (table.rows, table.config.num_embeddings) == (6, 9)
    assert "rows from 6 on are not in the file: they stay as they are" in table.notes
    assert torch.equal(rows_of(store), torch.cat([rows_of(small), was[6:]]))


TABLE = metadata_of(3, {"weight": ExportedTable(config(), TableState(4, 0.5))})["tables"][0]
WRONG = [("step", -1), ("learning_rate", math.nan), ("config", {"name": "x"})]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 9}, "format version 9; this release reads version 1"),
        ({"tables": 3}, "cannot be read"),
        ({"tables": [{}]}, "cannot be read"),
        ({"store_version": 1e999}, "cannot be read"),
        *(({"tables": [TABLE | {name: value}]}, "cannot be read") for name, value in WRONG),
    ],
)
def test_metadata_that_is_not_ours_is_an_error(tmp_path, change, message):
    export_store(make_store(tmp_path / "store", config()), tmp_path / "file")
    with safetensors.safe_open(tmp_path / "file", framework="pt") as file:
        metadata, tensors = file.metadata(), {KEY: file.get_tensor(KEY)}
    metadata["tierstore"] = json.dumps(json.loads(metadata["tierstore"]) | change)
    safetensors.torch.save_file(tensors, tmp_path / "other", metadata)
    with pytest.raises(errors.FormatError, match=message) as caught:
        import_files(tmp_path / "copy", [tmp_path / "other"])
    assert str(tmp_path / "other") in str(caught.value)
    assert not (tmp_path / "copy").exists()


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    directory = tmp_path_factory.mktemp("exports")
    export_store(make_store(directory / "store", config(rows=40, dim=3)), directory / "safetensors")
    torch.save(safetensors.torch.load_file(directory / "safetensors"), directory / "torch")
    return directory


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_checkpoint_does_not_run(tmp_path, legacy):
    ran = tmp_path / "ran"
    torch.save({KEY: torch.ones(2, 2), "x": Evil(ran)}, tmp_path / "file", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(errors.FormatError, match="file"):
        import_files(tmp_path / "store", [tmp_path / "file"])
    (tmp_path / "bare").write_bytes(pickle.dumps(Evil(ran), protocol=4))
    with pytest.raises(errors.FormatError, match="bare"):
        import_files(tmp_path / "store", [tmp_path / "bare"])
    assert not ran.exists()
    assert not (tmp_path / "store").exists()


def test_a_tensor_larger_than_its_file_is_no_table(tmp_path):
    torch.save({KEY: torch.ones(1, 1).expand(2**36, 4)}, tmp_path / "file")
    with pytest.raises(ValueError, match="stored row by row; it is no table"):
        import_files(tmp_path / "store", [tmp_path / "file"])
    torch.save({KEY: torch.ones(4, 4).to_sparse()}, tmp_path / "file")
    with pytest.raises(ValueError, match="it is no table"):
        import_files(tmp_path / "store", [tmp_path / "file"])
    assert not (tmp_path / "store").exists()


def test_what_is_no_such_file_is_said(tmp_path):
    zips = [b"PK\x03\x04", b"PK\x03\x04" + bytes(500)]
    for content in (*zips, b"", b"x", bytes(100), b"\xff" * 100, b"{}", b"\x80\x02}."):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(errors.FormatError, match="file"):
            import_files(tmp_path / "store", [tmp_path / "file"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.FormatError, match="is no plain file"):
        import_files(tmp_path / "store", [tmp_path / "pipe"])
    with pytest.raises(FileNotFoundError, match="nosuch: no such file; give a safetensors file"):
        import_files(tmp_path / "store", [tmp_path / "nosuch"])
    with pytest.raises(IsADirectoryError, match="is a directory; give a safetensors file"):
        import_files(tmp_path / "store", [tmp_path])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_file_cut_short_is_refused_and_one_with_flipped_bytes_is_or_gives_a_table(tmp_path, exports, form):
    """No reader looks at checksums of these formats: a flip may give other rows, but no crash and no odd error."""
    data, refused = bytearray((exports / form).read_bytes()), 0
    for at in range(0, len(data), 131):
        (tmp_path / "file").write_bytes(data[:at])
        with pytest.raises(errors.FormatError, match="file"):
            import_files(tmp_path / "store", [tmp_path / "file"])
        data[at] ^= 0x11
        (tmp_path / "file").write_bytes(data)
        data[at] ^= 0x11
        try:
            import_files(tmp_path / f"store{at}", [tmp_path / "file"])
        except (errors.TierstoreError, ValueError):
            refused += 1
        else:
            assert len(contents(tmp_path / f"store{at}")) == 1
    assert refused
    assert not (tmp_path / "store").exists()


def test_names_in_files_cannot_flood_or_steer_the_terminal(tmp_path):
    names = {f"\x1b[2J{number}" + "n" * 5000: torch.ones(1, 1) for number in range(200)}
    safetensors.torch.save_file(names, tmp_path / "file")
    with pytest.raises(ValueError, match="there are ") as caught:
        import_files(tmp_path / "store", [tmp_path / "file"])
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 10_000
    safetensors.torch.save_file({"\x1b" + "n" * 5000: torch.ones(3)}, tmp_path / "file")
    with pytest.raises(ValueError, match="has shape") as caught:
        import_files(tmp_path / "store", [tmp_path / "file"], mapping={"\x1b" + "n" * 5000: "t"})
    assert "\x1b" not in str(caught.value)


def test_memory_does_not_grow_with_the_table(tmp_path):
    """The budget and 64 MiB, as promised: less than the tensors take."""
    code = """
    from safetensors.torch import load_file
    from tierstore.exchange import export_store, import_files

    def private():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def peak(work, *given, **options):
        base, seen = private(), []
        work(*given, ddr="8MiB", progress=lambda *_: seen.append(private()), **options)
        return max(seen) - base

    def peaks(rows):
        folder, rule = Path(sys.argv[1], str(rows)), tierstore.optim.RowWiseAdagrad()
        with tierstore.open(folder / "store", ddr="8MiB") as store:
            table = store.create_table(table_config(num_embeddings=rows, embedding_dim=64, optimizer=rule))
            for ids in torch.arange(rows).split(10_000):
                table.write(ids, ids[:, None] + torch.arange(64) / 64)
            store.commit()
        found = [peak(export_store, folder / "store", folder / "t.safetensors", state=True)]
        torch.save(load_file(folder / "t.safetensors"), folder / "t.pt")
        return found + [peak(import_files, folder / form, [folder / f"t.{form}"]) for form in ("safetensors", "pt")]

    peaks(1000)  # compiles kernels
    print(*peaks(300_000))
    """
    assert max(map(int, run(code, tmp_path).split())) < 72 * 2**20 < (tmp_path / "300000" / "t.pt").stat().st_size
    for form in ("safetensors", "pt"):
        with tierstore.open(tmp_path / "300000" / form, mode="r", ddr="8MiB") as store:
            assert store.verify().rows == 300_000
            assert torch.equal(store["t"].read(torch.tensor([299_999]))[0], 299_999 + torch.arange(64) / 64)

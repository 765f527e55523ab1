"""What commands do to stores and files: inspect, repair, compact, export, import, train, trace."""

import contextlib
import errno
import json
import os
import re
import struct
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import tierstore
from tests.plan.hosts import shop_workload
from tierstore.cli import commands
from tierstore.cli import entry as cli
from tierstore.io.meta import PlainTree
from tierstore.io.records import item_key, version_item
from tierstore.plan.workload import workload_toml
from tierstore.settings.sections import to_dict
from tierstore.store.directory import require_outside
from tierstore.store.manifest import Manifest
from tierstore.store.version import Version, tensor_sizes
from tierstore.train import RunConfig
from tierstore.train.config import load


@pytest.fixture
def store_with_rows(store_dir):
    with tierstore.open(store_dir, ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=1000, embedding_dim=8))
        table.write(torch.arange(10), torch.ones(10, 8))
        store.commit(extra={"note": "hello"}, tensors={"dense": torch.zeros(3, 2)})
    return store_dir


def test_inspect_says_what_a_store_holds(store_with_rows, capsys):
    assert cli.main(["inspect", str(store_with_rows)]) == 0
    output = capsys.readouterr().out
    assert f"{store_with_rows}: version 1, 1 table\n" in output
    assert "item  1,000 x 8 float32, sgd, 31.2 KiB if all in memory" in output
    assert "manifest.json" in output
    assert "1 tensor, 24 B" in output
    assert '{"note": "hello"}' in output


def test_inspect_reads_as_an_open_does_with_dates_as_json(tmp_path, capsys, monkeypatch):
    """Trees of several levels, payloads of several chunks; while a writer goes on."""
    began = time.time()
    with tierstore.open(tmp_path / "shop", ddr="8MiB", keep=200) as store:
        for name in ("item", "gone", "user"):
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=9_000_000, embedding_dim=8))
        for number in range(150):
            store["user"].write(torch.arange(40) + 30 * number, torch.ones(40, 8))
            store.commit(extra={"n": number}, tensors={"w": torch.zeros(300_000 if number > 147 else 1)})
        store.drop_table("gone")
        tree = PlainTree(store.directory / "rows.lmdb")
        assert tree.meta.main.depth > 1
        assert tree.is_whole()
        said = []
        for name in ("store.directory.open_files", "offline.inspection.PlainTree.is_whole"):
            with monkeypatch.context() as without:
                without.setattr(f"tierstore.{name}", lambda *_: False)
                assert cli.main(["inspect", str(store.directory)]) == 0
            said.append(capsys.readouterr().out)
        assert said[0] == said[1]
        assert cli.main(["inspect", str(store.directory), "--json"]) == 0
        store.commit()
        store.commit()
        assert not tree.is_whole()
        tree.close()
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["extra"]) == (150, {"n": 149})
    assert (found["tensors"], found["tensor_bytes"]) == (1, 1_200_000)
    dates = [began - 1, *(datetime.fromisoformat(each["date"]).timestamp() for each in found["versions"]), time.time()]
    assert len(dates) == 152
    assert sorted(dates) == dates


def edit(data, found, form, value):
    for each in found:
        struct.pack_into(form, data, each, value)


CHUNK = re.escape(item_key(version_item(1, 0)))
DAMAGE = {
    "an empty tree": lambda data, metas: [edit(data, metas(94), "<H", 0), edit(data, metas(128), "<Q", 2**64 - 1)],
    "a page number": lambda data, _: edit(data, [each.end() for each in re.finditer(CHUNK, data)], "<Q", 2**61),
    "a size": lambda data, _: edit(data, [each.start() - 8 for each in re.finditer(CHUNK, data)], "<I", 2**32 - 1),
    "a manifest's page size": lambda *_: None,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_inspect_says_of_a_damaged_store_what_an_open_says(store_dir, capsys, kind):
    with tierstore.open(store_dir, ddr="8MiB") as store:
        store.commit(tensors={"w": torch.zeros(10_000)})
    (store_dir / "rows.anchor").unlink()
    path = store_dir / "rows.lmdb"
    data, found = bytearray(path.read_bytes()), Manifest.read(store_dir)
    DAMAGE[kind](data, lambda at: (at, found.page_bytes + at))
    path.write_bytes(data)
    if "manifest" in kind:
        replace(found, page_bytes=2 * found.page_bytes).write(store_dir)
    assert cli.main(["inspect", str(store_dir)]) == 1
    with pytest.raises(tierstore.errors.TierstoreError) as opened:
        tierstore.open(store_dir, mode="r", ddr="1MiB")
    assert capsys.readouterr().err == f"tierstore: {opened.value}\n"


@pytest.mark.parametrize(
    "header", ["[]", "{", '{"w": {}}', '{"w": {"data_offsets": [9, 3]}}', '{"w": {"data_offsets": "xy"}}']
)
def test_sizes_of_damaged_tensors_are_an_error_of_ours(header):
    version = Version(3, {}, {}, len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(tierstore.errors.DamagedError, match="the tensors of version 3 cannot be read"):
        tensor_sizes(version)


def test_tables_change_in_place(store_with_rows, capsys):
    store = str(store_with_rows)
    for words, said in (
        ("grow STORE item 2000", "<Table 'item' 2000 x 8 float32>\n"),
        ("rename STORE item thing", "<Table 'thing' 2000 x 8 float32>\n"),
        ("grow STORE item 3000", "no table 'item' in "),
        ("grow NONE item 3000", "no store at NONE"),
        ("drop STORE thing", "the rows of 'thing' would be gone from all versions that are kept; add --yes"),
        ("reset STORE thing", "unknown table command 'reset'"),
    ):
        status = ("<" not in said) + ("--yes" in said or "unknown" in said)
        assert cli.main(["table", *words.replace("STORE", store).split()]) == status
        assert said in "".join(capsys.readouterr())
    assert cli.main(["table", "drop", store, "thing", "--yes"]) == 0
    assert not os.path.exists("NONE")


def damage(store, step):
    (path,) = store.glob("*.lmdb")
    data = bytearray(path.read_bytes())
    place = data.find(b"\x00\x00\x80\x3f" * 8)
    assert place > 0
    while place >= 0:
        data[place] ^= 1
        place = data.find(b"\x00\x00\x80\x3f" * 8, place + step)
    path.write_bytes(data)
    return path


def test_verify_finds_damage_and_repair_saves_what_is_sound(store_with_rows, tmp_path, capsys):
    store = str(store_with_rows)
    assert cli.main(["verify", store]) == 0
    assert "version 1 is sound: 10 rows in 1 segment of 1 table, " in capsys.readouterr().out
    assert cli.main(["repair", store, str(tmp_path / "whole")]) == 0
    assert "version 1, 10 rows saved and verified; nothing was lost" in capsys.readouterr().out
    path = damage(store_with_rows, 32)
    assert cli.main(["verify", store]) == 1
    assert str(path) in capsys.readouterr().err
    assert cli.main(["repair", store, str(tmp_path / "part")]) == 1
    said = capsys.readouterr().out
    assert f"all listed in {tmp_path / 'part' / 'lost.txt'}" in said
    assert "table 'item': rows 0 to " in said
    with tierstore.open(tmp_path / "part", mode="r", ddr="1MiB") as opened:
        assert opened.extra == {"note": "hello"}


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_backup_goes_to_a_url_and_comes_back(store_with_rows, tmp_path, capsys, monkeypatch, kind):
    pytest.importorskip("fsspec")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    url = f"{kind}://{tmp_path}/there/monday"
    (tmp_path / "there").mkdir()
    assert cli.main(["backup", str(store_with_rows), url]) == 0
    assert capsys.readouterr().out.startswith(f"{url}: version 1, ")
    assert cli.main(["backup", str(store_with_rows), url]) == 1
    assert "there/monday is not empty" in capsys.readouterr().err
    assert cli.main(["backup", url, str(tmp_path / "back")]) == 0
    assert cli.main(["verify", str(tmp_path / "back")]) == 0
    assert cli.main(["backup", f"{url}/nix", str(tmp_path / "none")]) == 1
    assert {"memory": "/nix is no finished backup", "file": "no store at "}[kind] in capsys.readouterr().err
    assert cli.main(["backup", f"file://{store_with_rows}", str(tmp_path / "copy")]) == 0, "of a store in use, too"
    for command in ("verify", "inspect"):
        assert cli.main([command, url]) == 1
        assert "is a URL, and a store is a folder of this machine: bring it here by " in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} <= {store_with_rows.name, "back", "copy", "there"}


@pytest.mark.parametrize("kind", ["cut short", "not whole", "killed", "others"])
def test_a_backup_that_did_not_reach_its_url_does_not_block_the_next(store_with_rows, tmp_path, capsys, kind):
    there, url = pytest.importorskip("fsspec").filesystem("memory"), f"memory://{tmp_path}"
    put, backup = type(there).put_file, ["backup", str(store_with_rows), url]

    def failing(self, source, target):
        put(self, source, target)
        if target.endswith("manifest.json" if kind == "cut short" else "rows.lmdb"):
            there.pipe(target, b"{")
            if kind == "cut short":
                raise KeyboardInterrupt

    if kind in ("killed", "others"):
        there.pipe(f"{tmp_path}/{'rows.lmdb' if kind == 'killed' else 'sub/rows.lmdb'}", b"{")
        assert cli.main(["backup", url, str(tmp_path / "back")]) == 1
        assert "is no finished backup, which is rows.lmdb and manifest.json: it holds" in capsys.readouterr().err
        assert cli.main(backup) == (kind == "others")
    else:
        with patch.object(type(there), "put_file", failing):
            assert cli.main(backup) == (130 if kind == "cut short" else 1)
        assert there.find(str(tmp_path)) == []
        assert cli.main(backup) == 0
    assert cli.main(["backup", url, str(tmp_path / "back")]) == (kind == "others")
    there.rm(str(tmp_path), recursive=True)


def test_a_store_without_a_commit_says_so_and_long_extra_is_cut(store_dir, capsys):
    with tierstore.open(store_dir, ddr="8MiB") as store:
        for command in ("inspect", "verify"):
            assert cli.main([command, str(store_dir)]) == 0
            assert "nothing committed yet" in capsys.readouterr().out
        store.commit(extra={"note": "x" * 1000})
    assert cli.main(["inspect", str(store_dir)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 210


def test_rollback_of_the_command_line(tmp_path, capsys):
    with tierstore.open(tmp_path / "shop", keep=3) as store:
        for number in range(4):
            store.commit(extra={"n": number})
    assert cli.main(["inspect", str(tmp_path / "shop")]) == 0
    assert "version 4 (kept too: 2, 3)" in capsys.readouterr().out
    assert cli.main(["rollback", str(tmp_path / "shop"), "1"]) == 2
    assert "is not kept; kept: 2, 3, 4." in capsys.readouterr().err
    assert cli.main(["rollback", str(tmp_path / "shop"), "2"]) == 0
    assert "version 2 is the current one" in capsys.readouterr().out
    with tierstore.open(tmp_path / "shop", mode="r") as store:
        assert (store.versions, store.extra) == ((2,), {"n": 1})


def test_tables_go_to_a_file_and_into_another_store(store_with_rows, tmp_path, capsys):
    store, out, copy = str(store_with_rows), str(tmp_path / "out.safetensors"), str(tmp_path / "copy")
    assert cli.main(["export", store, out, "--dense", "--table", "item"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: version 1, 1,000 rows in 2 tensors, {Path(out).stat().st_size / 1024:.1f} KiB",
        "  embedding_bags.item.weight",
        "  dense",
    ]
    assert cli.main(["export", store, out]) == 1
    assert "out.safetensors exists; choose another name, or overwrite it with --force\n" in capsys.readouterr().err
    assert cli.main(["export", store, out, "--table", "itm", "--force"]) == 1
    assert "did you mean 'item'?" in capsys.readouterr().err
    assert cli.main(["export", store, out.replace("safetensors", "pt")]) == 2
    assert "an export's name ends in .safetensors, " in capsys.readouterr().err
    assert cli.main(["import", copy, out]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{copy}: version 1",
        "  item: new (sum, SGD lr 0.01), 1,000 rows, 10 changed",
        "  not taken: dense",
    ]


def test_foreign_tensors_become_tables_with_the_optimizer_asked_for(tmp_path, capsys):
    rows = torch.ones(20, 4)
    rows[3, 1] = float("nan")
    torch.save({"weight": rows, **{f"other{number}": torch.ones(2) for number in range(30)}}, tmp_path / "bag.pt")
    arguments = ["import", str(tmp_path / "new"), str(tmp_path / "bag.pt"), "--map"]
    for words, message in (
        (["weigth=item"], "--map weigth=item: no tensor 'weigth' in "),
        ([], "expected one argument"),
    ):
        with contextlib.suppress(SystemExit):  # of argparse
            assert cli.main([*arguments, *words]) != 0
        assert message in capsys.readouterr().err
    arguments.append("weight=item")
    optimizer = ["--optimizer", "adagrad", "--lr", "0.25"]
    assert cli.main([*arguments, *optimizer, "--pooling", "max", "--dtype", "float16", "--ddr", "8MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "  item: new (max, Adagrad lr 0.25), 20 rows, 20 changed",
        "    no optimizer state in the file: it starts at its initial value",
        "    1 values are NaN or infinite",
    ]
    assert lines[-1] == "  not taken: 20 more"
    with tierstore.open(tmp_path / "new", mode="r", ddr="8MiB") as store:
        config = store["item"].config
    assert config.optimizer == tierstore.optim.Adagrad(lr=0.25)
    assert (config.pooling, config.dtype) == ("max", "float16")


def listing(directory):
    return sorted(str(path) for path in directory.rglob("*"))


MAKERS = {"backup": [], "compact": [], "repair": [], "quantize": ["--dtype", "int8"]}


@pytest.fixture(params=[*MAKERS, "export"])
def make(request, store_with_rows):
    """Runs a command that makes something of the store at the path it is given; leaves nothing if it fails."""

    def run(path):
        before = listing(store_with_rows.parent)
        status = cli.main([request.param, str(store_with_rows), str(path), *MAKERS.get(request.param, [])])
        assert status == 0 or listing(store_with_rows.parent) == before
        return status

    return run


REFUSED = {errno.EROFS: "the file system is read-only; ", errno.EACCES: "this user lacks the permission; "}


def test_an_interrupted_command_leaves_nothing(store_with_rows, tmp_path, capsys, monkeypatch):
    def interrupt(done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "byte_bar", lambda what: contextlib.nullcontext(interrupt))
    for command in ("export", "compact"):
        assert cli.main([command, str(store_with_rows), str(tmp_path / "out")]) == 130
        assert "interrupted" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == [store_with_rows.name]


@pytest.mark.parametrize("number", REFUSED)
def test_a_place_that_is_not_there_or_that_the_system_refuses(make, tmp_path, monkeypatch, capsys, number):
    assert make(tmp_path / "none" / "new") == 1
    assert capsys.readouterr().err == f"tierstore: {tmp_path / 'none'} is not a directory; make it first\n"
    mkdir, plain_open = os.mkdir, os.open

    def refuse(call):
        def refusing(path, *arguments, **keywords):
            if str(path).startswith(str(tmp_path / "new")):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *arguments, **keywords)

        return refusing

    monkeypatch.setattr(os, "mkdir", refuse(mkdir))
    monkeypatch.setattr(os, "open", refuse(plain_open))
    assert make(tmp_path / "new") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"tierstore: {tmp_path / 'new'}")
    assert REFUSED[number] in said
    assert said.endswith("choose another place.\n")


def test_no_store_is_made_within_its_source(store_with_rows, capsys):
    before = listing(store_with_rows)
    for command, flags in MAKERS.items():
        assert cli.main([command, str(store_with_rows), str(store_with_rows / "new"), *flags]) == 2
        assert f"is inside the store {store_with_rows}; choose a directory outside" in capsys.readouterr().err
    assert listing(store_with_rows) == before
    same = store_with_rows.parent / "x" / ".." / store_with_rows.name
    with pytest.raises(ValueError, match="is the store itself; choose another directory"):
        require_outside(store_with_rows, same)


def test_flags_stand_for_keys_and_keys_is_a_run_file_of_all_defaults(capsys, tmp_path):
    known = to_dict(RunConfig())
    for name, *_ in cli._TRAIN_FLAGS.values():
        section, _, key = name.partition(".")
        assert key in known[section]
    assert cli.main(["train", "--keys"]) == 0
    path = tmp_path / "run.toml"
    path.write_text(capsys.readouterr().out)
    assert load(path) == RunConfig()


def overrides(*arguments):
    options = cli.build_parser().parse_args(["train", "run.toml", *arguments])
    return [(section, key, value) for section, key, value, _ in cli._overrides(options)]


def test_flags_become_overrides_and_win_over_set():
    assert overrides("--epochs", "3", "--set", "train.epochs=2", "--ddr", "1024", "--data", "7") == [
        ("train", "epochs", 2),
        ("data", "path", "7"),
        ("store", "ddr", "1024"),
        ("train", "epochs", 3),
    ]
    assert overrides("--prefetch-depth", "0") == [("train", "prefetch_depth", 0)]


def test_a_wrong_flag_is_named_with_its_key(tmp_path, capsys):
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    assert cli.main(["train", str(run_file), "--epochs", "0"]) == 2
    expected = f"expected a whole number from 1 to {2**63 - 1:,}"
    assert capsys.readouterr().err == f"tierstore: --epochs 0: train.epochs=0: {expected}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.toml").write_text(workload_toml(shop_workload()))
    return tmp_path


def test_traces_are_drawn_and_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "shop.toml", "shop.npz", "--samples", "500", "--scale", "0.1"]
    assert cli.main(["trace", *words]) == 0
    assert capsys.readouterr().out == "shop.npz: 4,000 lookups of 2 tables in 500 samples\n"
    assert cli.main(["trace", *words]) == 1
    assert "--force" in capsys.readouterr().err
    assert cli.main(["trace", *words, "--force"]) == 0
    assert cli.main(["trace", "describe", "shop.npz"]) == 0
    said = capsys.readouterr().out
    assert "\n4,000 accesses of " in said
    assert "batches: 2" in said


def test_what_cannot_be_changes_nothing(folder: Path) -> None:
    before = (folder / "shop.toml").read_bytes()
    for words, status in {
        "generate shop.toml shop.toml --samples 5 --force": 1,
        "generate shop.toml x.npz --samples 0": 2,
        "describe shop.toml": 2,
        "describe no.npz": 1,
        "x": 2,
    }.items():
        assert cli.main(["trace", *words.split()]) == status
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"shop.toml": before}

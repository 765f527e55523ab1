"""export and import; what an interrupted command leaves."""

import contextlib
from pathlib import Path

import pytest

import tierstore
from tierstore.cli import entry as cli


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
    assert "torch checkpoints are not written. Export to a .safetensors file" in capsys.readouterr().err
    assert cli.main(["import", copy, out]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{copy}: version 1",
        "  item: new (sum, SGD lr 0.01), 1,000 rows, 10 changed",
        "  not taken: dense",
    ]


def test_foreign_tensors_become_tables_with_the_optimizer_asked_for(tmp_path, capsys):
    import torch

    rows = torch.ones(20, 4)
    rows[3, 1] = float("nan")
    torch.save({"weight": rows, **{f"other{number}": torch.ones(2) for number in range(30)}}, tmp_path / "bag.pt")
    arguments = ["import", str(tmp_path / "new"), str(tmp_path / "bag.pt"), "--map", "weight=item"]
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


def test_messages_of_an_import_name_flags(tmp_path, capsys):
    import torch

    tensors = {f"a.{name}": torch.ones(20, 4) for name in ("weight", "exp_avg", "exp_avg_sq")}
    torch.save(tensors | {"b.weight": torch.ones(2, 2, dtype=torch.float64)}, tmp_path / "a.pt")

    def told(*flags):
        code = cli.main(["import", str(tmp_path / "new"), str(tmp_path / "a.pt"), *flags])
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    assert told().endswith("Say which to take: --map KEY=TABLE\n")
    assert told("--map", "a.weigth=item").startswith("tierstore: --map a.weigth=item: no tensor 'a.weigth' in ")
    assert "--map a.exp_avg=item.exp_avg: exp_avg is optimizer" in told("--map", "a.exp_avg=item.exp_avg")
    assert "store it as with --dtype float32" in told("--map", "b.weight=item")
    assert "new table with --optimizer adam\n" in told("--map", "a.weight=item")


@pytest.mark.parametrize("command", ["export", "compact"])
def test_an_interrupted_command_leaves_nothing(command, store_with_rows, tmp_path, capsys, monkeypatch):
    from tierstore.cli import commands

    def interrupt(done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "byte_bar", lambda what: contextlib.nullcontext(interrupt))
    assert cli.main([command, str(store_with_rows), str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [store_with_rows.name]

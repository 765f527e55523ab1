"""Errors are one line and say the way out; what a command does not need is not loaded."""

import runpy

import pytest

import tierstore
from tierstore.cli import entry as cli


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["trian"], 2, "tierstore: unknown command 'trian'; did you mean 'train'?\n"),
        (["qqq"], 2, "tierstore: unknown command 'qqq'; commands are train, sweep, demo, inspect, verify, "),
        (["train"], 2, "tierstore: give a run file: tierstore train FILE.toml; --keys prints one with all keys\n"),
        (["train", "nosuch.toml"], 2, "tierstore: nosuch.toml: there is no such run file\n"),
        (["inspect", "nosuch"], 1, "tierstore: no store at "),
        (["verify", "nosuch"], 1, "tierstore: no store at "),
        (["rollback", "nosuch", "1"], 1, "tierstore: no store at "),
        (["compact", "nosuch", "new"], 1, "tierstore: no store at "),
        (["export", "nosuch", "out"], 1, "tierstore: no store at "),
        (["export", "nosuch", "out", "--at", "0"], 2, "tierstore: version=0 must be in "),
        (["import", "new", "nosuch"], 1, "tierstore: /"),
        (["import", "new", "f", "--map", "weight"], 2, "tierstore: --map weight: write KEY=TABLE, as --map model.item"),
        (["import", "new", "f", "--map", "a=b", "--map", "a=c"], 2, "tierstore: --map names 'a' twice, as 'b' and 'c'"),
        (["import", "new", "f", "--lr", "0.1"], 2, "tierstore: --lr goes with --optimizer NAME; give both\n"),
        (["import", "new", "f", "--optimizer", "sgd", "--lr", "-1"], 2, "tierstore: SGD: lr=-1.0 must be finite"),
    ],
)
def test_errors_are_one_line_with_a_status(arguments, status, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == status
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1


@pytest.mark.parametrize("words", ["export s out --format x", "import s f --optimizer x", "train --policy x"])
def test_values_of_closed_sets_are_listed(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split(" "))
    assert "invalid choice: 'x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["train f", "serve", "demo", "inspect s", "shard plan", "trace describe t", "plan run f"]
)
def test_an_unknown_flag_shows_the_usage_of_its_command(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*words.split(" "), "--nosuch"])
    errors = capsys.readouterr().err
    command = " ".join(word for word in words.split(" ") if len(word) > 1)
    assert errors.startswith(f"usage: tierstore {command} [-h]")
    if command != "shard plan":  # which wants more first
        assert errors.endswith(f"tierstore {command}: error: unrecognized arguments: --nosuch\n")


def test_traceback_shows_where_an_error_arose(tmp_path):
    with pytest.raises(tierstore.errors.StoreNotFoundError):
        cli.main(["inspect", str(tmp_path / "nosuch"), "--traceback"])


def test_the_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tierstore", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tierstore", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out == f"tierstore {tierstore.__version__}\n"

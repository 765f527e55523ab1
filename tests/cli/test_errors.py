"""Errors are one line and say the way out; what a command does not need is not loaded."""

import os
import re
import runpy
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import get_args
from unittest.mock import Mock

import pytest

import tierstore
from tierstore.cli import commands
from tierstore.cli import entry as cli
from tierstore.config import Pooling
from tierstore.layout import FloatName
from tierstore.optim.configs import RULES, RuleName
from tierstore.system import late, terminal


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["trian"], 2, "tierstore: unknown command 'trian'; did you mean 'train'?\n"),
        (["train"], 2, "tierstore: give a run file: tierstore train FILE.toml; --keys prints one with all keys\n"),
        (["inspect", "nosuch"], 1, "tierstore: no store at "),
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


def test_wrong_words_show_the_usage(capsys):
    for words in ("quantize s t --dtype x", "import s f --optimizer x", "train --policy x"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(words.split(" "))
        assert "invalid choice: 'x'" in capsys.readouterr().err
    for command, rest in (("train", "f"), ("serve", ""), ("inspect", "s"), ("trace describe", "t"), ("plan run", "f")):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*command.split(), *rest, "--nosuch"])
        errors = capsys.readouterr().err
        assert errors.startswith(f"usage: tierstore {command} [-h]")
        assert errors.endswith(f"tierstore {command}: error: unrecognized arguments: --nosuch\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "publish s --to http://x",
            "--to is no more: servers pull: leave it out, and start them with tierstore serve --",
        ),
        ("publish s --fan-out=3", "--fan-out is no more: servers pull: "),
        ("serve --peers http://x", "--peers is no more: a replica follows its sources: give --from URL"),
        ("serve --body-bytes 9", "--body-bytes is no more: it is 64 MiB; leave it out"),
        ("publish s --tok x", "unrecognized arguments: --tok x"),  # is not --token-file
        ("train f --to x", "unrecognized arguments: --to x"),
    ],
)
def test_flags_that_went_say_the_new_way_and_none_is_cut_short(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(ValueError, 2), (ImportError, 130), (KeyboardInterrupt, 130)])
def test_after_ctrl_c_errors_of_imports_are_its_own_and_others_are_said(error, status, capsys, monkeypatch):
    monkeypatch.setattr("tierstore.offline.inspection.describe", Mock(side_effect=error("of the command")))
    assert cli.main(["inspect", "x"], [signal.SIGINT]) == status
    assert ("of the command" in capsys.readouterr().err) == (status != 130)


def test_commands_run_in_any_thread(capsys):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(tierstore.cli.main, ["inspect", "nosuch"]).result() == 1
    assert "no store at " in capsys.readouterr().err


def test_progress_is_lines_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("time.monotonic", iter([0, 9, 10, 10, 11, 20, 20]).__next__)
    with terminal.byte_bar("export") as show:
        for done in (1, 1000, 2000, 3000):
            show(done, 5000, "verify" if done == 3000 else None)
    assert capsys.readouterr().err == "export: 1,000 of 5,000\nverify: 3,000 of 5,000\n"


def test_names_that_load_late_are_listed_and_none_stands_for_another():
    find, names = late({"__name__": "tierstore", "__all__": ["Config"]}, {"Config": "config"})
    assert names() == ["Config", "__all__", "__name__"]
    with pytest.raises(AttributeError, match="no attribute 'Config'"):
        find("Config")
    assert set(tierstore.optim.__all__) <= {*dir(tierstore.optim)}


def test_traceback_shows_where_an_error_arose(tmp_path):
    with pytest.raises(tierstore.errors.StoreNotFoundError):
        cli.main(["inspect", str(tmp_path / "nosuch"), "--traceback"])


def test_help_and_completion_know_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help", "plan", "curve"])
    assert capsys.readouterr().out.startswith("usage: tierstore plan curve ")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["-V"])
    assert capsys.readouterr().out == f"tierstore {tierstore.__version__}\n"
    pytest.importorskip("shtab")
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        assert {"canary-silent", "rollback"} <= {*re.findall(r"\w[-\w]+", capsys.readouterr().out)}


def test_the_module_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tierstore", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tierstore", run_name="__main__")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # it ends at once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not ended.value.code
    assert capsys.readouterr().out == f"tierstore {tierstore.__version__}\n"
    assert cli.main([]) == 2
    assert "usage: tierstore" in capsys.readouterr().out


INTERRUPTED = """
import os, signal, sys
from tierstore import cli

class Interrupt:
    def __init__(self, left):
        self.left = left

    def find_spec(self, *_):
        self.left -= 1
        if self.left == -1:
            signal.raise_signal(signal.SIGINT)

for left in range(0, 1000, 13):
    child = os.fork()
    if not child:
        sys.meta_path.insert(0, Interrupt(left))
        try:
            status = cli.main(["--version"])
        except SystemExit as end:
            status = end.code
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, file=sys.stderr)
    if not status:
        break
"""


def test_ctrl_c_while_the_command_line_loads_ends_it_without_a_traceback():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    *said, last = done.stderr.splitlines()
    assert last == "0"
    assert len(said) > 5
    assert set(said) == {"tierstore: interrupted", "130"}


def test_what_is_written_out_so_that_help_loads_little_is_true():
    assert tuple(RULES) == get_args(RuleName) == commands.OPTIMIZERS
    assert (get_args(Pooling), get_args(FloatName)) == (commands._POOLINGS, commands._DTYPES)

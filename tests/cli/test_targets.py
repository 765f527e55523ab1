"""Commands that make a store or a file somewhere say what is wrong with the place before they work, or at once."""

import errno
import os
from pathlib import Path

import pytest

from tierstore.cli import entry as cli
from tierstore.store import copies

MAKERS = {"backup": [], "compact": [], "repair": [], "quantize": ["--dtype", "int8"]}


def listing(directory):
    return sorted(str(path) for path in directory.rglob("*"))


@pytest.fixture(params=[*MAKERS, "export"])
def make(request, store_with_rows):
    """Runs a command that makes something of the store at the path it is given; leaves nothing if it fails."""

    def run(path):
        before = listing(store_with_rows.parent)
        status = cli.main([request.param, str(store_with_rows), str(path), *MAKERS.get(request.param, [])])
        assert status == 0 or listing(store_with_rows.parent) == before
        return status

    return run


def test_the_directory_above_must_be_there(make, tmp_path, capsys):
    assert make(tmp_path / "none" / "new") == 1
    assert capsys.readouterr().err == f"tierstore: {tmp_path / 'none'} is not a directory; make it first\n"


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.EROFS, "the file system is read-only; "), (errno.EACCES, "this user lacks the permission; ")],
)
def test_a_place_that_the_system_refuses(make, tmp_path, monkeypatch, capsys, number, message):
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
    assert message in said
    assert said.endswith("choose another place.\n")


@pytest.mark.parametrize("command", MAKERS)
def test_no_store_is_made_within_its_source(command, store_with_rows, capsys):
    before = listing(store_with_rows)
    assert cli.main([command, str(store_with_rows), str(store_with_rows / "new"), *MAKERS[command]]) == 2
    assert f"is inside the store {store_with_rows}; choose a directory outside" in capsys.readouterr().err
    assert listing(store_with_rows) == before
    with pytest.raises(ValueError, match="shop is the store itself; choose another directory"):
        copies.require_outside(Path("shop"), Path("x/../shop"))
    copies.require_outside(Path("shop-copy"), Path("shop"))

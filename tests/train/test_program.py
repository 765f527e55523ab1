"""How this program is started again."""

import sys

import pytest

from tierstore.train.terminal import command_name


@pytest.mark.parametrize(
    ("started", "path", "said"),
    [("bin/tierstore", "", "bin/tierstore"), ("bin/tierstore", "bin", "tierstore"), ("bin/pytest", "", "tierstore")],
)
def test_the_command_is_named_so_that_it_is_found(tmp_path, monkeypatch, started, path, said):
    (tmp_path / "bin").mkdir()
    for name in ("tierstore", "pytest"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / started)])
    assert command_name() == said

"""Progress bars on a terminal."""

import io
import sys

import pytest

from tierstore.system.terminal import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_what_is_done_and_changes_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("plan", bar_format="{desc}: {n_fmt}/{total_fmt};", mininterval=0) as show:
        show(1, 5)
        show(3, 5, "plan: curves")
    assert [text.strip() for text in terminal.getvalue().replace("\r", "").split(";")] == [
        *("plan: 0/?", "plan: 1/5", "plan: curves: 3/5"),
        "",
    ]


def test_a_bar_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("plan") as show:
        show(1, 5)
    assert capsys.readouterr() == ("", "")

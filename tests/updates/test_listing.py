"""A folder of updates and its list: what is deleted there, who may write, and what a list may say."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.updates.support import change
from tierstore import errors
from tierstore.cli import entry as cli
from tierstore.updates.listing import MAX_NAMED, Folder, Listing, Offered, Verdict

FILE = Offered("a" * 16, 9, 0, "", 2, "1" * 16)


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_only_files_of_updates_are_deleted(tmp_path: Path) -> None:
    others = {"index.html", "made.html", "madeleine", "b" * 17, "B" * 16, "list.json.bad", "b" * 16 + ".gz"}
    folder = Folder(tmp_path)
    folder.put(Listing(files=(FILE,)))
    for name in (*others, FILE.id, "b" * 16, f"{FILE.id}.partial", "c" * 16 + ".partial", "made", "made.partial"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    folder.put(Listing(files=(FILE,), serial=1))
    assert names(tmp_path) == others | {"folder", "list.json", FILE.id, f"{FILE.id}.partial"}


def site(folder: Path) -> Path:
    folder.mkdir()
    (folder / "index.html").touch()
    return folder


def site_with_list(folder: Path) -> Path:
    (site(folder) / "list.json").write_text("[]")
    return folder


def store(folder: Path) -> Path:
    change(folder, 1)
    return folder


def sharded(folder: Path) -> Path:
    change(folder / "0-of-2", 1)
    return folder


PLACES: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "a site": (site, "", "choose an empty folder"),
    "a site with a list": (site_with_list, "", "choose an empty folder"),
    "a store": (store, "", "is in the store"),
    "within a store": (store, "a/b", "is in the store"),
    "a sharded store": (sharded, "", "is in the store"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_of_others_is_refused_and_stays(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, below, why = PLACES[place]
    change(source := tmp_path / "source", 1)
    before = names(made := make(tmp_path / "place"))
    assert cli.main(["publish", str(source), "--once", "--into", str(made / below)]) != 0
    assert why in capsys.readouterr().err
    assert names(made) == before


def test_one_publisher_at_a_time_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(source := tmp_path / "source", 1)
    words = ["publish", str(source), "--once"]
    with Folder(tmp_path / "source.updates").held():
        assert cli.main(words) != 0
    assert "another tierstore publish" in capsys.readouterr().err
    assert [cli.main(words), cli.main(words)] == [0, 0]
    assert "nothing is new" in capsys.readouterr().out

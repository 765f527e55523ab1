"""A folder of updates and its list: what is deleted there, who may write, and what a list may say."""

import contextlib
import http.client
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.updates.support import change
from tierstore import errors
from tierstore.cli import entry as cli
from tierstore.updates import fetch
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


def site(folder: Path, text: str = "") -> Path:
    folder.mkdir()
    (folder / "index.html").touch()
    if text:
        (folder / "list.json").write_text(text)
    return folder


def store(folder: Path, part: str = "") -> Path:
    change(folder / part, 1)
    return folder


PLACES: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "a site": (site, "", "choose an empty folder"),
    "a site with a list": (lambda folder: site(folder, "[]"), "", "choose an empty folder"),
    "within a store": (store, "a/b", "is in the store"),
    "a sharded store": (lambda folder: store(folder, "0-of-2"), "", "is in the store"),
}


@pytest.mark.parametrize("place", PLACES)
def test_folders_of_others_are_refused_and_stay(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def verdict(number: int, *, is_approved: bool = True, version: int = 0) -> Verdict:
    return Verdict(version or number, f"{number:016x}", is_approved)


def test_the_newest_verdicts_stay_whatever_their_numbers_are() -> None:
    known = Listing().judged(verdict(number) for number in range(100, 200))
    assert [each.version for each in known.verdicts] == [*range(200 - MAX_NAMED, 200)]
    known = known.judged([verdict(7)])
    assert [each.version for each in known.verdicts] == [*range(201 - MAX_NAMED, 200), 7]
    declined = known.judged([verdict(180, is_approved=False)])
    assert declined.verdicts[-1] == verdict(180, is_approved=False)
    assert declined.judged(known.verdicts) == declined.judged(declined.verdicts) == declined


@pytest.mark.parametrize("seed", range(8))
def test_lists_that_are_merged_come_to_rest(seed: int) -> None:
    draw = random.Random(seed)
    made = [verdict(number, is_approved=draw.random() < 0.7) for number in range(1, 90)]
    ends = [draw.sample(made, 80) if seed % 2 else made[: draw.randrange(60, 90)] for _ in range(3)]
    lists, before = [Listing().judged(each) for each in ends], list[Listing]()
    for _ in range(40):
        before = lists.copy()
        for place, other in itertools.permutations(range(3), 2):
            lists[place] = lists[place].judged(lists[other].verdicts)
    assert lists == before
    assert seed % 2 or {*lists[0].verdicts} == {*lists[1].verdicts} == {*lists[2].verdicts}


def test_what_a_source_says_never_makes_the_own_list_unreadable(tmp_path: Path) -> None:
    said = Listing(verdicts=(Verdict(1, "1" * 16, False, "because", (0.5,)),), trial_before=(0.25,)).to_json().decode()
    said = said.replace("0.5", "1e999").replace("0.25", "-1e999").replace("because", "\U0001f600" * 9000)
    heard = Listing.from_json(said.encode())
    folder = Folder(tmp_path)
    folder.put(heard.judged(Verdict(1, f"{number:016x}", False, "\0" * 9000) for number in range(99)))
    folder.put(own := Listing(verdicts=(Verdict(1, "2" * 16, False, "", (float("nan"),)),), trial_before=(1e999,)))
    again = Folder(tmp_path)
    again.open()
    assert again.listing == own
    for wrong in (Listing(files=(FILE,) * 320), Listing(trial_of="x" * (1 << 20))):
        with pytest.raises(errors.FormatError):
            folder.put(wrong)
    again.open()
    assert again.listing == own
    with pytest.raises(errors.FormatError):
        Listing.from_json(Listing(files=(FILE,)).to_json().replace(b'"version": 2', b'"version": ' + b"9" * 4000))


def test_a_list_that_cannot_be_read_now_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := Folder(tmp_path)).put(known := Listing(files=(FILE,), left=("1" * 16,)))
    (tmp_path / FILE.id).touch()

    def fail(*_: object) -> bytes:
        raise errors.TierstoreError("out of file descriptors")

    folder = Folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.updates.listing.read_plain_file", fail)
        for call in (folder.open, lambda: folder.put(Listing(serial=1))):
            with pytest.raises(errors.TierstoreError, match="out of file"):
                call()
    with pytest.raises(errors.TierstoreError, match="could not be read at first"):
        folder.put(Listing(serial=1))  # made from nothing
    assert folder.listing == known
    assert names(tmp_path) == {"list.json", FILE.id}


@pytest.mark.parametrize("text", ["", "{", "[]", "x" * (2 << 20)], ids=len)
def test_what_is_no_list_is_put_aside(text: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(text)
    folder = Folder(tmp_path)
    with folder.held():
        folder.put(Listing(serial=1))
    assert (tmp_path / "list.json.bad").read_text() == text
    assert Listing.from_json((tmp_path / "list.json").read_bytes()).serial == 1


def drip(listener: socket.socket, head: bytes) -> None:
    """Answer each request without an end."""
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(head)
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.02)
        except OSError:
            if listener.fileno() < 0:
                return


DRIPS = {
    "head": ("http", b"HTTP/1.1 200 OK\r\nA: "),
    "body": ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"),
    "length of a part": ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
    "handshake": ("https", b"\x16\x03\x03\x40\x00"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", DRIPS)
def test_a_source_that_drips_is_left(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold the list, or a file, for as long as it likes."""
    scheme, head = DRIPS[name]
    monkeypatch.setattr(fetch, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener, head), daemon=True).start()
        source = fetch.Source(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
        assert source.poll() == Listing()
        assert source.error
        with contextlib.suppress(OSError, fetch.FetchError, http.client.HTTPException):
            assert sum(map(len, source.read(FILE, 0))) < 1000

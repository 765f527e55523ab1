"""Urgent rows go first; a publisher that is killed, has no space, hears nonsense goes on; what a folder of updates and
its list may hold."""

import contextlib
import http.client
import itertools
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.updates.support import ROWS, SMALL, change, contents, extra_of, make, same, source_of, table_config
from tierstore import errors
from tierstore.cli import entry as cli
from tierstore.layout import KEY_ROW_BITS, ROW_MASK
from tierstore.system import killpoints
from tierstore.updates import Origin, Update, apply_update, fetch, origin_of, roll_back_replica
from tierstore.updates.listing import MAX_NAMED, Folder, Listing, Offered, Verdict, way
from tierstore.updates.publish import Publisher, urgent_rows


def values(directory: Path, version: int) -> dict[str, Any]:
    with tierstore.open(directory, mode="r", version=version, **SMALL) as store:
        tables = {name: table for name, table in store.tables.items() if name != "ids"}
        return {name: table.read(torch.arange(ROWS)).double().numpy() for name, table in tables.items()}


@pytest.mark.parametrize(("share", "is_kept"), [(0.001, True), (0.1, True), (0.9, False)])
def test_the_most_urgent_rows_are_those_of_another_ranking(tmp_path, share, is_kept):
    source, random = tmp_path / "source", np.random.default_rng(3)
    written = change(source, 1, keep=4)
    with tierstore.open(source, keep=4, **SMALL) as store:
        store.create_table(table_config("ids", ids=tierstore.DynamicIds())).admit(torch.arange(9))
        store.commit()
    changed = change(source, 2, keep=4)
    before, after = values(source, 1), values(source, 3)
    with tierstore.open(source, keep=4 if is_kept else 1, **SMALL) as store:
        store.commit()
    lookups, ranked = {}, []
    for index, name in enumerate(("item", "user")):
        for row in changed[name]:
            key = index << KEY_ROW_BITS | row
            if random.random() < 0.5:
                lookups[key] = int(random.integers(1, 50))
            size = float(np.sqrt(((after[name][row] - before[name][row]) ** 2).sum())) if is_kept else 1.0
            is_old = row in written[name] or not is_kept
            ranked.append((is_old, -(1 + lookups.get(key, 0)) * size, key))
    total = sum(make(source, 1).header.rows_of_tables().values())
    assert total > len(ranked) == 120
    expected = sorted(key for _, _, key in sorted(ranked)[: max(1, int(share * total))])
    assert urgent_rows(source, 1, share, lookups).tolist() == expected


class Told:
    def __init__(self, folder: Path) -> None:
        self.source, self.replica, self.folder = folder / "source", folder / "replica", folder
        change(self.source, 1, keep=4)
        apply_update(self.replica, self.update().path)
        shutil.copytree(self.source, folder / "fork")
        self.before = contents(self.replica)
        change(self.source, 2, keep=4)
        self.rows = urgent_rows(self.source, 1, 0.2, {})
        self.urgent = self.update(1, only=self.rows)

    def update(self, since: int = 0, **settings: Any) -> Update:
        return make(self.source, since, **settings)

    def shown(self) -> Origin:
        return origin_of(extra_of(self.replica)[0])

    def mixed(self) -> dict[str, Any]:
        """The first version with the urgent rows of the second."""
        after, made = contents(self.source), {name: rows.clone() for name, rows in self.before.items()}
        for index, name in enumerate(made):
            own = torch.from_numpy(self.rows[self.rows >> KEY_ROW_BITS == index] & ROW_MASK)
            made[name].view(ROWS, -1)[own] = after[name].view(ROWS, -1)[own]
        return made


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_an_urgent_version_is_the_one_before_with_those_rows(told):
    first, applied = told.shown(), apply_update(told.replica, told.urgent.path)
    assert applied == (1, 24, False)
    assert same(contents(told.replica), told.mixed())
    assert told.shown() == first._replace(urgent=source_of(told.source).origin.commit_id)
    extra, tensors = extra_of(told.replica)
    assert (extra["step"], tensors["model.w"].tolist()) == (1, [1.0] * 3), "the dense part follows with the rest"
    assert apply_update(told.replica, told.urgent.path).was_there
    whole = told.update(1)
    apply_update(told.replica, whole.path)
    assert same(contents(told.replica), contents(told.source))
    assert apply_update(told.replica, told.urgent.path).was_there
    assert told.shown() == whole.header.origin
    assert roll_back_replica(told.replica) == first, "nobody goes back to a part of what was gone back from"
    assert same(contents(told.replica), told.before)
    apply_update(told.replica, told.urgent.path)
    assert roll_back_replica(told.replica) == first
    assert same(contents(told.replica), told.before)


def test_the_versions_kept_are_two_again_after_the_next(told):
    for update in (told.urgent, told.update(1)):
        apply_update(told.replica, update.path)
    change(told.source, 3, keep=4)
    apply_update(told.replica, told.update(2).path)
    with tierstore.open(told.replica, mode="r", **SMALL) as store:
        assert len(store.versions) == 2
    assert roll_back_replica(told.replica).version == 2


def test_only_what_has_the_urgent_rows_too_is_taken_after_them(told):
    whole, fork = told.update(1), told.folder / "fork"
    apply_update(told.replica, told.urgent.path)
    change(fork, 20, keep=4)
    assert not source_of(fork).has_grown_from(told.shown())
    for settings in ({}, {"only": urgent_rows(fork, 1, 0.2, {})}):
        with pytest.raises(errors.TierstoreError, match=r"with urgent rows of commit \w+ .*a full copy"):
            apply_update(told.replica, make(fork, 1, **settings).path)
    assert same(contents(told.replica), told.mixed())
    change(told.source, 3, keep=4)
    assert source_of(told.source).has_grown_from(told.shown())
    ways = {"all at once": [told.update(1)], "one by one": [whole, told.update(2)], "fork": [make(fork)]}
    for name, updates in ways.items():
        twin = Path(shutil.copytree(told.replica, told.folder / name.replace("fork", "twin")))
        for update in updates:
            apply_update(twin, update.path)
        assert same(contents(twin), contents(fork if name == "fork" else told.source))


def test_tables_come_with_the_whole(told):
    with tierstore.open(told.source, keep=4, **SMALL) as store:
        store.create_table(table_config("new")).write(torch.arange(5), torch.ones(5, 6))
        store.commit()
    with pytest.raises(errors.TableError, match="lacks 'new': tables come with the whole update"):
        apply_update(told.replica, told.update(1, only=told.rows).path)
    assert same(contents(told.replica), told.before)


class Killed(BaseException):
    pass


class Server:
    """Of lookups, or a canary."""

    url, error = "http://server", ""

    def __init__(self, found: Any = None) -> None:
        self.found, self.listing = found, Listing()

    def poll(self) -> Listing:
        return self.listing

    def lookups(self) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def publisher_of(source: Path, **settings: Any) -> Publisher:
    publisher = Publisher(source, say=lambda _: None, **{"urgent": 0.3} | settings)
    publisher.folder.open()
    return publisher


def take(replica: Path, publisher: Publisher, own: Origin | None, *, has_urgent: bool = True) -> Origin:
    listing = publisher.folder.listing
    wanted = (listing.trial if not has_urgent else None) or listing.target
    files = way([each for each in listing.files if has_urgent or not each.is_urgent], own, wanted)
    for each in files:
        apply_update(replica, publisher.folder.path / each.id)
    return wanted


@pytest.mark.parametrize("with_canary", [False, True], ids=["", "canary"])
@pytest.mark.parametrize("then", ["again", "full", "commit", "restore"])
def test_a_version_whose_rest_was_not_offered_is_offered_yet(then, with_canary, tmp_path, monkeypatch):
    why = errors.DiskFullError("full") if then == "full" else Killed()
    source, replica = tmp_path / "source", tmp_path / "replica"
    settings: dict[str, Any] = {"canary": Server()} if with_canary else {}
    change(source, 1, keep=4)
    first = publisher_of(source, **settings)
    assert first.step()
    own = take(replica, first, None, has_urgent=not with_canary)
    shutil.copytree(source, tmp_path / "copy")
    change(source, 2, keep=4)

    def fail(*_: Any, **__: Any) -> None:
        raise why

    def die(name: str) -> None:
        if name == "publish: urgent rows offered":
            monkeypatch.setattr(first, "_make", fail)

    monkeypatch.setattr(killpoints, "hook", die)
    with pytest.raises(type(why)):
        first.step()
    monkeypatch.undo()
    (some,) = (each for each in first.folder.listing.files if each.is_urgent)
    if not with_canary:
        apply_update(replica, first.folder.path / some.id)
        own = own._replace(urgent=some.commit_id)
    if then == "restore":
        shutil.rmtree(source)
        (tmp_path / "copy").rename(source)
    if then in ("commit", "restore"):
        change(source, 3, keep=4)
    again = publisher_of(source, **settings)
    assert again.step()
    assert not again.step()
    kept = again.folder.listing
    shown = take(replica, again, own, has_urgent=not with_canary)
    assert same(contents(replica), contents(source))
    assert len({each.id for each in kept.files}) == len(kept.files)
    if with_canary:
        assert kept.target == own
        settings["canary"].listing = Listing().judged([Verdict(shown.version, shown.commit_id, True)])
        assert not again.step()
    assert again.folder.listing.target == shown
    assert again.folder.listing.before == own._replace(urgent="")
    change(source, 4, keep=4)
    assert again.step()


ANSWERS = {
    "no key": KeyError("lookups"),
    "deep": RecursionError(),
    "huge key": {10**30: 1},
    "huge count": {1: 10**30},
    "below": {-1: 1},
    "no numbers": {"a": "b"},
    "no table": [],
}


def test_a_server_that_answers_nonsense_counts_for_nothing(tmp_path, caplog):
    change(source := tmp_path / "source", 1, keep=4)
    servers = [*map(Server, ANSWERS.values()), Server({5: 2}), Server({5: 1, 6: 1})]
    publisher = publisher_of(source, lookups=servers)
    assert publisher._counts() == {5: 3, 6: 1}
    assert caplog.text.count("count for nothing") == len(ANSWERS)
    publisher.step()
    change(source, 2, keep=4)
    publisher.step()
    assert any(each.is_urgent for each in publisher.folder.listing.files)


def test_no_error_of_a_commit_ends_the_publisher(tmp_path, monkeypatch, caplog):
    publisher = Publisher(tmp_path / "source")
    raised = [ValueError("extra"), ValueError("extra"), RecursionError(), None, ValueError("extra"), KeyError("x")]

    def step() -> bool:
        if not raised:
            publisher.stop()
        elif error := raised.pop(0):
            raise error
        return False

    monkeypatch.setattr("tierstore.updates.publish.LOOK_SECONDS", 0.0)
    monkeypatch.setattr(publisher, "step", step)
    publisher.run()
    said = [each.getMessage().removeprefix("nothing new is published: ") for each in caplog.records]
    assert said == ["extra", "RecursionError", "extra", "'x'"]


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

"""What is offered, to whom and by which flags; replicas that meet a full disk, damage or a slow source."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import tierstore
from tests.serve.admin.test_follow import require_same
from tests.serve.loops import wait_for
from tests.serve.replicas import following, publishing, publishing_changes
from tests.updates.support import change
from tierstore import errors
from tierstore.cli import entry as cli
from tierstore.serve import replica as updates
from tierstore.serve.offer import UpdateError
from tierstore.updates.fetch import Source
from tierstore.updates.listing import MAX_FILES, Listing, Offered, way

WRONG_FLAGS = [
    (["serve", "--store", "s", "--store", "t"], "a file lists several stores, as [[stores]]"),
    (["serve", "--store", "a=s,ddr=1GiB"], "a file lists several stores, as [[stores]]"),
    (["publish", "store", "--urgent", "1"], "above 0 and below 1"),
    (["publish", "store", "--host", "0.0.0.0"], "give --token-file"),
    (["publish", "store", "--tls-key", "k"], "--tls-certificate"),
    (["publish", "store", "--canary", "ftp://a"], "write http"),
]


def test_wrong_flags_name_the_way(capsys):
    for words, why in WRONG_FLAGS:
        with contextlib.suppress(SystemExit):  # of argparse
            assert cli.main(words) == 2
        assert why in capsys.readouterr().err


def test_only_a_holder_of_the_token_has_anything(source, tmp_path, stack):
    publisher = stack.enter_context(publishing(source, token="secret"))
    publisher.step()
    (file,) = publisher.folder.listing.files
    base, bearer = f"{publisher.url}/updates", {"Authorization": "Bearer secret"}
    for name in ("list.json", file.id):
        assert httpx.get(f"{base}/{name}").status_code == 401
    with httpx.Client(headers=bearer) as client:
        answer = client.get(f"{base}/list.json")
        assert Listing.from_json(answer.content) == publisher.folder.listing
        again = client.get(f"{base}/list.json", headers={"If-None-Match": answer.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        data = client.get(f"{base}/{file.id}").content
        assert data == (publisher.folder.path / file.id).read_bytes()
        cases = [("bytes=100-", 206), ("bytes=0-1", 400), ("x", 400), (f"bytes={file.size_bytes}-", 416)]
        for given, status in cases:
            found = client.get(f"{base}/{file.id}", headers={"Range": given})
            assert found.status_code == status
            assert status > 206 or found.content == data[100:]
        for name in ("0" * 16, "made", "..%2Fmanifest.json", "list.json.partial"):
            assert client.get(f"{base}/{name}").status_code == 404
        for method in ("POST", "PATCH", "PUT", "DELETE"):
            assert client.request(method, f"{base}/{file.id}", headers={"X-Tierstore-Admin": "1"}).status_code == 405
    with following(tmp_path / "replica", [publisher.url], token="another") as replica:
        assert replica.follow() == 0
        assert "401" in replica.taker._sources[0].error


FILE = Offered("0" * 16, 9, 0, "", 2, "1" * 16)
GOOD = Listing(files=(FILE,), serial=7, target=tierstore.updates.Origin("0" * 32, 2, "1" * 16)).to_json().decode()
WRONG = {
    "id": ('"id": "0000000000000000"', '"id": "../../../../etc/x"'),
    "size": ('"size_bytes": 9', '"size_bytes": -1'),
    "huge": ('"size_bytes": 9', '"size_bytes": 9e99'),
    "base": ('"since": 0', '"since": 1'),
    "serial": ('"serial": 7', '"serial": true'),
    "target": ('"target": [', '"target": ["x", '),
    "more": ('"serial"', '"more": 1, "serial"'),
    "deep": ('"left": []', '"left": ' + "[" * 100_000),
    "long": ('"left": []', '"left": [] ' + " " * (1 << 20)),
    "many": ('"left": []', '"left": ' + str(["1" * 16] * 65).replace("'", '"')),
    "no json": ("{", ""),
}


def test_a_hostile_list_is_no_list():
    assert Listing.from_json(GOOD.encode()).serial == 7
    for name, (old, new) in WRONG.items():
        assert old in GOOD, name
        with pytest.raises(errors.FormatError, match="no list of updates"):
            Listing.from_json(GOOD.replace(old, new, 1).encode())
    with pytest.raises(errors.FormatError, match="too many"):
        Listing.from_json(Listing(files=(FILE,) * (MAX_FILES + 1)).to_json())


def test_the_way_to_a_version_is_by_changes_where_they_lead_there():
    def file(number: int, since: int, version: int, *, urgent: bool = False) -> Offered:
        return Offered(
            f"{number:016x}", 10, since, f"{since:016x}" if since else "", version, f"{version:016x}", urgent
        )

    def at(version: int, urgent: str = "") -> tierstore.updates.Origin:
        return tierstore.updates.Origin("0" * 32, version, f"{version:016x}", urgent)

    files = [file(1, 0, 2), file(2, 2, 3), file(3, 3, 4), file(4, 3, 5), file(5, 4, 5), file(6, 1, 2)]
    files += [file(7, 4, 5, urgent=True), file(8, 8, 9), file(9, 0, 4)]

    def ids(own: Any, target: int, here: tuple[int, ...] = ()) -> list[int] | None:
        found = way(files, own, at(target), {f"{each:016x}" for each in here})
        return None if found is None else [int(each.id, 16) for each in found]

    assert ids(at(2), 4) == [2, 3]
    assert ids(at(2), 5) == [2, 4]
    assert ids(at(1), 3) == [6, 2]
    assert ids(None, 4) == [9]
    assert ids(None, 4, (1,)) == [1, 2, 3], "a copy that has begun to arrive goes on"
    assert ids(at(7), 3) == [1, 2], "another branch's"
    assert ids(at(5), 5) == []
    assert ids(at(2), 9) is None
    assert ids(at(4), 5) == [7]
    assert ids(at(4), 5, (5,)) == [5], "what has arrived needs no urgent rows"
    assert ids(at(4, "5" * 16), 5) == [5]


def test_a_token_that_is_sent_in_plain_text_is_told_of(caplog):
    for token, url in ((None, "http://far"), ("t", "https://far"), ("t", "http://localhost"), ("t", "http://far")):
        Source(url, token)
    assert [each.getMessage().partition(" ")[0] for each in caplog.records] == ["http://far"]
    for url in ("ftp://somewhere", "http://user:secret@far", "http://far?x=1", "far:8002"):
        with pytest.raises(ValueError) as refused:
            Source(url)
        assert "secret" not in str(refused.value)


# Replicas that meet a full disk, damage, or a slow source: what is kept, and what is tried again.


def test_what_has_arrived_outlives_a_full_disk_and_a_restart(source, tmp_path, monkeypatch, stack):
    publisher = stack.enter_context(publishing_changes(source))
    copy, delta = publisher.folder.listing.files
    arrived = tmp_path / "replica" / "incoming" / copy.id

    def require_room(*_: Any) -> None:
        if arrived.exists():
            raise errors.DiskFullError("no space left")

    async def refuse(*_: str) -> Any:
        raise UpdateError(507, "no space left", is_passing=True)

    with following(tmp_path / "replica", [publisher.url]) as replica:
        with monkeypatch.context() as patch:
            patch.setattr(updates, "require_room", require_room)
            for _ in range(2):
                with pytest.raises(errors.DiskFullError):
                    replica.follow()
        assert arrived.exists()
        replica.taker._writer.ask = refuse
        with pytest.raises(UpdateError, match="no space left"):
            replica.follow()
    with following(tmp_path / "replica", [publisher.url]) as replica:
        assert replica.follow() == 2
    assert publisher.given_bytes == copy.size_bytes + delta.size_bytes


def test_a_file_that_lost_a_bit_here_is_fetched_again(source, tmp_path, monkeypatch, stack):
    publisher = stack.enter_context(publishing_changes(source))
    replica = stack.enter_context(following(tmp_path / "replica", [publisher.url]))
    copy, delta = publisher.folder.listing.files
    ask = replica.taker._writer.ask

    async def damage(*request: str) -> Any:
        (file,) = (Path(each) for each in request if each.endswith(delta.id))
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        monkeypatch.setattr(replica.taker._writer, "ask", ask)
        return await ask(*request)

    monkeypatch.setattr(replica.taker._writer, "ask", damage)
    with pytest.raises(UpdateError, match="does not match its checksum"):
        replica.follow()
    assert replica.follow() == 2
    require_same(replica, source)
    assert publisher.given_bytes == copy.size_bytes + 2 * delta.size_bytes


def test_a_slow_source_does_not_delay_another(source, tmp_path, monkeypatch, stack, publisher):
    publisher.step()
    monkeypatch.setattr(updates, "_LISTS_SECONDS", 0.5)
    replica = stack.enter_context(following(tmp_path / "replica", ["http://127.0.0.1:1", publisher.url]))
    slow, go_on, polls = replica.taker._sources[0], threading.Event(), list[float]()
    stack.callback(go_on.set)

    def poll() -> Listing:
        polls.append(time.monotonic())
        go_on.wait(60)
        return Listing()

    monkeypatch.setattr(slow, "poll", poll)
    assert replica.follow() == 1
    change(source, 2, keep=4)
    publisher.step()
    assert replica.follow() == 2
    assert len(polls) == 1
    go_on.set()
    wait_for(lambda: replica.step() or len(polls) > 1)

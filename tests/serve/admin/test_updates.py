"""Updates over real sockets: sent, cut off, resumed, applied by a process of their own, and taken back."""

import errno
import http.client
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

import tierstore
from tests.serve.loops import WAIT_SECONDS, wait_for
from tests.serve.replicas import serving
from tests.updates.support import change, contents, same
from tierstore.cli import entry as cli
from tierstore.serve.admin import updates as admin_updates
from tierstore.updates import Update, apply_update, write_update
from tierstore.updates import client as clients
from tierstore.updates.client import AdminClient, Kept
from tierstore.updates.delta import source_of
from tierstore.updates.publish import publish

pytestmark = pytest.mark.usefixtures("warm_writer")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, both kept."""
    directory = tmp_path_factory.mktemp("source") / "store"
    change(directory, 1, keep=2)
    change(directory, 2, keep=2)
    return directory


@pytest.fixture(scope="module")
def updates(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Update]:
    """By the version that they begin at."""
    folder = tmp_path_factory.mktemp("updates")
    return {since: write_update(source, folder / str(since), since=since) for since in (0, 1)}


@pytest.fixture
def replica_dir(tmp_path: Path) -> Path:
    return tmp_path / "replica"


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_PAUSE_SECONDS", 0.02)


def upload(url: str, update: Update, *, first: int = 0, data: bytes | None = None) -> httpx.Response:
    """The bytes from ``first`` on, or others."""
    data = update.path.read_bytes()[first:] if data is None else data
    headers = {"Content-Range": f"bytes {first}-{first + len(data) - 1}/{update.size_bytes}"}
    return httpx.patch(f"{url}/admin/updates/{update.id}", content=data, headers=headers)


def listed(url: str) -> Any:
    return httpx.get(f"{url}/admin/updates").raise_for_status().json()


def apply(url: str, update_id: str) -> httpx.Response:
    return httpx.post(f"{url}/admin/updates/{update_id}/apply", json={}, timeout=WAIT_SECONDS)


def test_a_server_follows_its_trainer_and_goes_back_by_one_call(
    tmp_path: Path, replica_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # each change is written by a process of its own
    trainer = tmp_path / "trainer"
    change(trainer, 1, keep=2)
    before = contents(trainer)
    apply_update(replica_dir, write_update(trainer, tmp_path / "first").path)
    change(trainer, 2, keep=2)
    with serving(replica_dir) as (url, replica):
        (second,) = publish(trainer, [url])
        assert (second.version, second.rows, second.error) == (2, 120, "")
        assert second.size_bytes > 0
        (again,) = publish(trainer, [url])
        assert (again.version, again.rows, again.size_bytes, again.error) == (2, 0, 0, "")
        told = source_of(trainer).origin
        state = listed(url)
        assert [Kept.of_name(each)[2:5:2] for each in state.pop("kept")] == [(1, 2)]
        known = {"is_applying": False, "uploads": {}, "fetch": None, "declined": [], "trial": None}
        assert state == {**told._asdict(), **known}
        assert replica.refreshed == 1
        answer = httpx.post(f"{url}/admin/updates/rollback", json={}, timeout=WAIT_SECONDS)
        assert answer.json() == {"version": 1}
        assert listed(url)["version"] == 1
        replica.close()
        assert same(contents(replica_dir), before)


def test_an_upload_goes_on_where_the_connection_broke(replica_dir: Path, updates: dict[int, Update]) -> None:
    """Also in a server that was started again meanwhile."""
    update, cut = updates[0], 1000
    with serving(replica_dir) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = (
                f"PATCH /admin/updates/{update.id} HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {update.size_bytes}\r\n"
                f"Content-Range: bytes 0-{update.size_bytes - 1}/{update.size_bytes}\r\n\r\n"
            )
            connection.sendall(head.encode() + update.path.read_bytes()[:cut])
        wait_for(lambda: listed(url)["uploads"].get(update.id, {}).get("received_bytes") == cut)
    with serving(replica_dir) as (url, replica):
        assert "1000 of" in apply(url, update.id).json()["error"]
        shown: list[tuple[int, int]] = []
        with AdminClient(url) as admin:
            admin.send(update, lambda *pair: shown.append(pair))
            assert listed(url)["uploads"][update.id]["received_bytes"] == update.size_bytes
            assert admin.apply(update).version == 2
        assert shown[-1] == (update.size_bytes, update.size_bytes)
        assert replica.store.version == 1
        assert [path.suffix for path in (replica_dir / "incoming").iterdir()] == [".update"]


def test_a_publisher_goes_on_after_broken_connections(
    replica_dir: Path, updates: dict[int, Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In heads and in bodies of parts; what had arrived stays."""
    monkeypatch.setattr(clients, "PART_BYTES", 2048)
    send, cuts = http.client.HTTPConnection.send, [150, None, None, 900, None, None, 1900, 40, None, None, None, 7]

    def cut(connection: http.client.HTTPConnection, data: Any) -> None:
        size = cuts.pop(0) if cuts else None
        send(connection, data if size is None else bytes(data)[:size])
        if size is not None:
            connection.close()
            raise ConnectionResetError

    monkeypatch.setattr(http.client.HTTPConnection, "send", cut)
    with serving(replica_dir) as (url, _):
        with AdminClient(url) as admin:
            admin.send(updates[0])
        assert not cuts
        (path,) = (replica_dir / "incoming").iterdir()
        assert path.read_bytes() == updates[0].path.read_bytes()


def test_a_damaged_upload_changes_nothing_and_is_sent_anew(replica_dir: Path, updates: dict[int, Update]) -> None:
    update = updates[0]
    data = bytearray(update.path.read_bytes())
    data[len(data) // 2] ^= 1
    with serving(replica_dir) as (url, replica):
        assert upload(url, update, data=bytes(data)).json()["received_bytes"] == update.size_bytes
        answer = apply(url, update.id)
        assert answer.status_code == 422
        assert "damaged on its way" in answer.json()["error"]
        assert not (replica_dir / "manifest.json").exists()
        assert listed(url)["uploads"] == {}
        assert replica.refreshed == 0


def test_a_refused_update_leaves_its_place_to_others_and_an_older_one_is_not_taken_for_newer(
    replica_dir: Path, source: Path, updates: dict[int, Update]
) -> None:
    ahead = replica_dir.with_name("ahead")
    shutil.copytree(source, ahead)
    change(ahead, 3, keep=2)
    with serving(replica_dir) as (url, _):
        upload(url, updates[1])
        assert apply(url, updates[1].id).status_code == 422
        assert listed(url)["uploads"] == {}
        assert [publish(each, [url])[0].version for each in (source, ahead)] == [2, 3]
        upload(url, updates[0])
        answer = apply(url, updates[0].id)
        assert answer.status_code == 422
        assert "the update is of version 2, before that" in answer.json()["error"]
        (done,) = publish(source, [url])
        assert (done.error, done.version) == ("", 2), "its publisher knows what it replaces"


def test_a_server_that_cannot_show_an_update_goes_back_by_what_it_applied_and_no_more(
    replica_dir: Path, tmp_path: Path
) -> None:
    updates = []
    for version in (1, 2):
        change(tmp_path / "source", version, keep=2)
        updates.append(write_update(tmp_path / "source", tmp_path / str(version), since=version - 1))
        apply_update(replica_dir, updates[-1].path)
    with serving(replica_dir) as (url, replica):

        async def refuse() -> None:
            raise OSError(errno.EMFILE, "too many open files")

        replica.refresh = refuse  # type: ignore[method-assign]
        with tierstore.open(replica_dir, mode="r", ddr="1MiB") as store:
            before = store.version
        upload(url, updates[1])
        assert apply(url, updates[1].id).status_code == 500
        with tierstore.open(replica_dir, mode="r", ddr="1MiB") as store:
            assert store.version == before


def test_wrong_requests_are_refused_in_words(replica_dir: Path, updates: dict[int, Update]) -> None:
    update = updates[0]
    with serving(replica_dir) as (url, _):
        one = f"{url}/admin/updates/{update.id}"
        for answer, status, words in [
            (httpx.patch(f"{url}/admin/updates/x", content=b"1"), 400, "16 hex digits"),
            (httpx.patch(f"{url}/admin/updates/..%2Fx", content=b"1"), 404, ""),
            (httpx.patch(one, content=b"1"), 400, "Content-Range"),
            (httpx.patch(one, content=b"1", headers={"Content-Range": "bytes 5-4/9"}), 400, "no range"),
            (httpx.patch(one, content=b"1", headers={"Content-Range": "bytes 0-0/9999999999999"}), 413, "at most"),
            (httpx.patch(one, content=b"1", headers={"Content-Range": "bytes 7-7/9"}), 409, "goes on at byte 0"),
            (httpx.patch(one, content=b"123", headers={"Content-Range": "bytes 0-1/9"}), 400, "longer"),
            (httpx.patch(one, content=b"12", headers={"Content-Range": "bytes 0-1/8"}), 409, "was to have 9 bytes"),
            (apply(url, "0" * 16), 409, "nothing of update"),
            (apply(url, "zz"), 400, "16 hex digits"),
        ]:
            assert answer.status_code == status, answer.text
            assert words in (answer.json()["error"] if words else answer.text)
        assert listed(url)["uploads"][update.id] == {"received_bytes": 0, "size_bytes": 9}


def test_one_update_is_sent_at_a_time_and_an_abandoned_one_gives_way(
    replica_dir: Path, updates: dict[int, Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(replica_dir) as (url, _):
        upload(url, updates[0], data=b"begun")
        refused = upload(url, updates[1])
        assert (refused.status_code, "is being sent" in refused.json()["error"]) == (409, True)
        assert upload(url, updates[0], first=5).json()["received_bytes"] == updates[0].size_bytes
        monkeypatch.setattr(admin_updates, "IDLE_SECONDS", 0.0)
        assert upload(url, updates[1]).json()["received_bytes"] == updates[1].size_bytes
        assert list(listed(url)["uploads"]) == [updates[1].id]


def test_some_of_the_disk_stays_free(
    replica_dir: Path, updates: dict[int, Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = updates[0]
    with serving(replica_dir) as (url, _):
        upload(url, update, data=b"begun")
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 9, 9, 64 << 20, 9, 9, 9, 0, 9)))
        refused = upload(url, update, first=5)
        assert (refused.status_code, "Free some space" in refused.json()["error"]) == (507, True)
        monkeypatch.undo()
        assert upload(url, update, first=5).json()["received_bytes"] == update.size_bytes


def test_the_command_serves_all_that_can_be_reached(
    source: Path, replica_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret\n")
    arguments = ["publish", str(source), "--token-file", str(tmp_path / "token")]
    with serving(replica_dir, token="secret") as (url, replica):
        assert cli.main(["publish", str(source), "--to", url]) == 1
        assert "admin token is needed" in capsys.readouterr().out
        assert cli.main([*arguments, "--to", url, "--dry-run"]) == 0
        assert "version 2," in capsys.readouterr().out
        with socket.create_server(("127.0.0.1", 0)) as listener:
            gone = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert cli.main([*arguments, "--to", gone, "--to", url]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"{gone}: failed: ")
        assert lines[1].startswith(f"{url}: version 2, ")
        assert cli.main([*arguments, "--to", url, "--dry-run"]) == 0
        assert capsys.readouterr().out == f"{url}: has version 2 already\n"
        replica.close()
        assert same(contents(replica_dir), contents(source))


def test_a_refused_rollback_declines_nothing(source: Path, replica_dir: Path, updates: dict[int, Update]) -> None:
    """Nor does one that the server did not see: what is gone back from is what it shows."""
    apply_update(replica_dir, write_update(source, replica_dir.with_name("first"), version=1).path)
    with serving(replica_dir) as (url, replica):
        shown = listed(url)
        for _ in range(2):
            answer = httpx.post(f"{url}/admin/rollback", json={}, timeout=WAIT_SECONDS)
            assert (answer.status_code, listed(url)) == (422, shown)
        apply_update(replica_dir, updates[1].path)
        answer = httpx.post(f"{url}/admin/rollback", json={}, timeout=WAIT_SECONDS)
        assert "and the server shows commit" in answer.json()["error"]
        assert listed(url) == shown
        replica.show()
        left = listed(url)["commit_id"]
        assert httpx.post(f"{url}/admin/rollback", json={}, timeout=WAIT_SECONDS).json()["version"] == shown["version"]
        assert listed(url) == shown | {"declined": [left]}


def test_long_bodies_are_refused_and_long_answers_read(replica_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(replica_dir) as (url, replica):
        long = {"peers": ["http://replica:8002"] * 50_000}
        for path in ("trial", f"{'0' * 16}/apply"):
            assert httpx.post(f"{url}/admin/updates/{path}", json=long).status_code == 413
        monkeypatch.setattr(replica.taker, "_lookups", lambda: [(number, 1) for number in range(200_000)])
        with AdminClient(url) as client:
            assert len(client.lookups()) == 200_000


def test_a_token_that_is_sent_in_plain_text_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever sends it: a publisher or a replica."""
    for token, url in (
        (None, "http://far"),
        ("t", "https://far"),
        ("t", "http://localhost"),
        *[("t", "http://far")] * 3,
    ):
        AdminClient(url, token=token)
    assert [each.getMessage().partition(" ")[0] for each in caplog.records] == ["http://far"]

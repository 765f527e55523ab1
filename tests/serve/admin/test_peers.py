"""Updates from replica to replica: one upload for all; peers that die, stall or lie; what a replica missed."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.children import run
from tests.serve import whole
from tests.serve.loops import WAIT_SECONDS, wait_for
from tests.serve.replicas import Shown, serving
from tests.updates.support import change, contents, same
from tierstore.serve.admin import incoming
from tierstore.serve.admin import updates as admin_updates
from tierstore.serve.config import ServeConfig
from tierstore.system.killpoints import UPDATE_POINTS
from tierstore.updates import apply_update, write_update
from tierstore.updates import client as clients
from tierstore.updates import fetch as fetching
from tierstore.updates.client import AdminClient, Kept, PublishError
from tierstore.updates.delta import source_of
from tierstore.updates.publish import publish

pytestmark = pytest.mark.usefixtures("warm_writer")
TOKEN = "secret"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the parts that publishers send, which are small; short pauses."""
    parts: list[int] = []
    ask = AdminClient._try

    def count(client: AdminClient, method: str, path: str, body: Any, *rest: Any) -> Any:
        parts.extend([len(body)] if method == "PATCH" else [])
        return ask(client, method, path, body, *rest)

    monkeypatch.setattr(AdminClient, "_try", count)
    monkeypatch.setattr(clients, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(clients, "PART_BYTES", 512)
    monkeypatch.setattr(fetching, "WINDOW_SECONDS", 0.5)
    return parts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    change(tmp_path / "source", 1, keep=4)
    return tmp_path / "source"


class Fleet(contextlib.ExitStack):
    """Replicas in threads."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.urls: list[str] = []
        self.replicas: list[Shown] = []
        self._stacks: list[contextlib.ExitStack] = []

    def begin(self, count: int = 1, **settings: Any) -> Shown:
        for _ in range(count):
            self._stacks.append(self.enter_context(contextlib.ExitStack()))
            directory = self._folder / f"replica {len(self.urls)}"
            url, replica = self._stacks[-1].enter_context(serving(directory, token=TOKEN, **settings))
            self.urls.append(url)
            self.replicas.append(replica)
        return replica

    def stop(self, place: int) -> None:
        self._stacks[place].close()

    def publish(self, source: Path, places: slice = slice(None), **settings: Any) -> list[str]:
        """The errors."""
        return [each.error for each in publish(source, self.urls[places], token=TOKEN, **settings)]

    def require_same(self, source: Path, places: slice = slice(None)) -> None:
        """All show the source's version and rows."""
        for replica in self.replicas[places]:
            assert replica.store.extra["tierstore.update"] == source_of(source).origin._asdict()
            replica.close()
            assert same(contents(replica.directory), contents(source))
            replica.show()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as made:
        yield made


def listed(url: str) -> Any:
    return httpx.get(f"{url}/admin/updates", headers=BEARER).raise_for_status().json()


def received(url: str) -> int:
    return sum(each["received_bytes"] for each in listed(url)["uploads"].values())


def size_of(source: Path, since: int = 0) -> int:
    update = write_update(source, source.with_name("to be measured"), since=since)
    update.path.unlink()
    return update.size_bytes


def at_half(url: str, act: Callable[[], object]) -> Any:
    """Bars; when half is sent to a server, the publisher waits there until something is done."""
    acted: list[bool] = []

    @contextlib.contextmanager
    def bar(label: str) -> Iterator[Callable[[int, int], None]]:
        def show(done: int, total: int) -> None:
            if label == url and done >= total // 2 and not acted:
                acted.append(True)
                act()

        yield show

    return bar


def test_each_server_has_what_came_so_far_while_the_first_still_receives(
    fleet: Fleet, source: Path, sent: list[int]
) -> None:
    def all_have_half() -> None:
        half = received(fleet.urls[0])
        assert 0 < half < size_of(source)
        for url in fleet.urls:
            wait_for(lambda url=url: received(url) >= half)

    fleet.begin(6)
    assert fleet.publish(source, bar=at_half(fleet.urls[0], all_have_half)) == [""] * 6
    assert sum(sent) == size_of(source)
    fleet.require_same(source)
    assert fleet.publish(source) == [""] * 6
    assert [replica.refreshed for replica in fleet.replicas] == [1] * 6


def test_servers_of_one_version_get_one_file(fleet: Fleet, source: Path, sent: list[int]) -> None:
    fleet.begin(6)
    for version, places in ((1, slice(4)), (2, slice(2))):
        assert not any(fleet.publish(source, places))
        change(source, version + 1, keep=4)
    sent.clear()
    assert fleet.publish(source, fan_out=2) == [""] * 6
    assert sum(sent) == 2 * sum(size_of(source, since) for since in range(3))
    fleet.require_same(source)


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_the_others_go_on_where_one_dies(fleet: Fleet, source: Path, sent: list[int], dying: int) -> None:
    """Also the first, whose place the next one takes. What it missed, it gets from the others."""

    def die() -> None:
        wait_for(lambda: received(fleet.urls[3]))
        fleet.stop(dying)

    fleet.begin(4)
    errors = fleet.publish(source, bar=at_half(fleet.urls[0], die))
    assert [bool(error) for error in errors] == [place == dying for place in range(4)], errors
    assert sum(sent) <= 2 * size_of(source)
    peers = [url for place, url in enumerate(fleet.urls) if place != dying]
    with serving(fleet.replicas[dying].directory, token=TOKEN, peers=peers) as (_, fleet.replicas[dying]):
        fleet.replicas[dying].catch_up()
        fleet.require_same(source)


def test_damaged_bytes_are_refused_and_had_from_another(
    fleet: Fleet, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaging, growing = {"replica 1"}, admin_updates._growing

    async def damage(path: Path, offset: int, stop: int) -> Any:
        async for data in growing(path, offset, stop):
            yield data[:-1] + bytes([data[-1] ^ (path.parents[1].name in damaging)])

    monkeypatch.setattr(admin_updates, "_growing", damage)
    fleet.begin(3)
    assert fleet.publish(source) == [""] * 3
    assert f"was damaged on its way; next from {fleet.urls[0]}" in caplog.text
    fleet.require_same(source)
    change(source, 2, keep=4)
    damaging.add("replica 0")
    assert fleet.publish(source) == [""] * 3
    assert "damaged on its way from each of 1 peers; the rest is sent from here" in caplog.text
    fleet.require_same(source)
    assert [replica.refreshed for replica in fleet.replicas] == [2] * 3


def test_a_peer_that_stalls_is_left_for_one_that_is_ahead(
    fleet: Fleet, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing, stalled = admin_updates._growing, threading.Event()

    async def stall(path: Path, offset: int, stop: int) -> Any:
        async for data in growing(path, offset, stop):
            if path.parents[1].name == "replica 1":
                if not stalled.is_set():
                    stalled.set()
                    yield data[:100]
                await asyncio.sleep(WAIT_SECONDS)
            yield data

    monkeypatch.setattr(admin_updates, "_growing", stall)
    fleet.begin(3)
    assert fleet.publish(source) == [""] * 3
    assert stalled.is_set()
    fleet.require_same(source)


KILLED = """
    from tests.serve.replicas import serving
    from tierstore.system import killpoints

    def kill(name):
        if name == sys.argv[3]:
            os._exit(0)

    killpoints.hook = kill
    with serving(Path(sys.argv[1]), token="secret") as (url, _):
        (partial := Path(sys.argv[2] + ".partial")).write_text(url)
        partial.rename(sys.argv[2])
        time.sleep(200)
    """


@pytest.mark.parametrize("point", UPDATE_POINTS)
def test_a_replica_that_is_killed_at_any_step_catches_up(
    fleet: Fleet, source: Path, tmp_path: Path, point: str
) -> None:
    fleet.begin(2)
    fleet.publish(source)
    killed, told = tmp_path / "killed", tmp_path / "url"
    apply_update(killed, write_update(source, tmp_path / "first").path)
    change(source, 2, keep=4)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run, KILLED, killed, told, point)
        wait_for(told.exists)
        fleet.urls.insert(1, told.read_text())
        assert [bool(error) for error in fleet.publish(source)] == [False, True, False]
        ended.result()
    with serving(killed, token=TOKEN) as (_, replica):
        replica.catch_up()
        fleet.replicas.append(replica)
        fleet.require_same(source)
        assert replica.store.version == 2, "each version was applied once"


def test_a_replica_gets_each_version_that_it_missed_as_far_as_peers_keep_them(
    fleet: Fleet, source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.begin()
    for version in (2, 3, 4):
        fleet.publish(source)
        change(source, version, keep=4)
    for limit in (1 << 30, 0):
        monkeypatch.setattr(incoming, "_MAX_KEPT_BYTES", limit)
        missed = fleet.begin(peers=fleet.urls[:1])
        missed.catch_up()
        assert missed.refreshed == 3
    assert [len(listed(url)["kept"]) for url in fleet.urls] == [3, 3, 1]
    waiting = fleet.begin(peers=fleet.urls[2:])
    for _ in range(2):
        waiting.catch_up()
    assert caplog.text.count("waiting for the next publish") == 1
    assert waiting.store is None
    assert fleet.publish(source) == [""] * 4
    fleet.require_same(source)


def test_a_server_catches_up_when_it_starts(source: Path, tmp_path: Path) -> None:
    with whole.serving(tmp_path / "first", updates=True) as first:
        assert not publish(source, [first.admin], token=whole.ADMIN_TOKEN)[0].error
        with whole.serving(tmp_path / "second", updates=True, peers=f"{first.admin}, {first.admin}") as second:
            wait_for(lambda: second.engine.version == 1)
            wait_for(lambda: second.engine.is_ready)
    with pytest.raises(ValueError, match="write http"):
        ServeConfig(store="s", updates=True, admin_token_file="t", peers="ftp://somewhere")
    with pytest.raises(ValueError, match="give updates"):
        ServeConfig(store="s", peers="http://somewhere")


def test_a_version_that_was_gone_back_from_does_not_come_back(fleet: Fleet, source: Path) -> None:
    fleet.begin(2)
    away = fleet.begin(peers=fleet.urls[:1])
    fleet.publish(source)
    change(source, 2, keep=4)
    fleet.publish(source, slice(2))
    back = httpx.post(f"{fleet.urls[0]}/admin/updates/rollback", json={}, headers=BEARER, timeout=WAIT_SECONDS)
    assert back.json() == {"version": 1}
    for replica in (fleet.replicas[0], away):
        replica.catch_up()
        assert replica.store.extra["step"] == 1, "a peer shows it, or showed it"
    change(source, 3, keep=4)
    fleet.publish(source, slice(1, 2))
    fleet.replicas[0].catch_up()
    assert fleet.replicas[0].store.extra["step"] == 1, "its way leads through what was gone back from"
    fleet.publish(source, slice(2))
    away.catch_up()
    fleet.require_same(source)


def test_an_update_that_is_applied_gives_way_to_none(fleet: Fleet, source: Path) -> None:
    taker = fleet.begin().taker
    update = write_update(source, source.with_name("update"))
    with AdminClient(fleet.urls[0], token=TOKEN) as client:
        client.send(update)
    taker._received_at, taker._is_applying = -1e9, True
    other = f"{fleet.urls[0]}/admin/updates/{'0' * 16}/fetch"
    assert httpx.post(other, json={"size_bytes": 9, "from": []}, headers=BEARER).status_code == 409
    assert received(fleet.urls[0]) == update.size_bytes


def test_an_empty_replica_takes_no_store_where_peers_show_several(fleet: Fleet, source: Path, tmp_path: Path) -> None:
    change(tmp_path / "another", 1, keep=4)
    fleet.begin(2)
    fleet.publish(source, slice(1))
    fleet.publish(tmp_path / "another", slice(1, 2))
    new = fleet.begin(peers=fleet.urls[:2])
    new.catch_up()
    assert new.store is None
    fleet.stop(1)
    new.catch_up()
    assert new.store.extra["tierstore.update"] == source_of(source).origin._asdict()


def test_only_a_holder_of_the_token_has_anything_and_names_peers(fleet: Fleet, source: Path) -> None:
    fleet.begin()
    fleet.publish(source)
    (kept,) = map(Kept.of_name, listed(fleet.urls[0])["kept"])
    known, new = (f"{fleet.urls[0]}/admin/updates/{name}" for name in (kept.id, "0" * 16))
    for method, url in [("GET", known), ("POST", new + "/fetch")]:
        assert httpx.request(method, url, json={}).status_code == 401
    with httpx.Client(headers=BEARER) as client:
        whole, last = client.get(known).content, {"Range": f"bytes={kept.size_bytes - 1}-"}
        assert (len(whole), client.get(known, headers=last).content) == (kept.size_bytes, whole[-1:])
        for asked, status in [("0-1", 400), (f"{kept.size_bytes}-", 416)]:
            assert client.get(known, headers={"Range": f"bytes={asked}"}).status_code == status
        for size, peers, status in [
            (9, ["file:///etc/passwd"], 400),
            (9, ["http://127.0.0.1:1/?x"], 400),
            (9, None, 400),
            ("many", [], 400),
            (1 << 41, [], 413),
        ]:
            refused = client.post(new + "/fetch", json={"size_bytes": size, "from": peers})
            assert (refused.status_code, bool(refused.json()["error"])) == (status, True)
    assert listed(fleet.urls[0])["uploads"] == {}
    with serving(source.with_name("other"), token="another", peers=fleet.urls) as (_, replica):
        with pytest.raises(PublishError, match="no peer answers"):
            replica.catch_up()
        assert replica.store is None

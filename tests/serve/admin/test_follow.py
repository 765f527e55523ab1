"""Replicas that pull: from publishers, each other and plain folders; broken transfers, kills, and what is refused."""

import asyncio
import contextlib
import functools
import http.server
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import tierstore
from tests.following import Child
from tests.serve import whole
from tests.serve.loops import wait_for
from tests.serve.replicas import Shown, following, publishing
from tests.updates.support import change, contents, make, same, source_of
from tierstore import errors
from tierstore.cli import entry as cli
from tierstore.serve import offer
from tierstore.serve.offer import UpdateError
from tierstore.system import killpoints
from tierstore.updates import fetch
from tierstore.updates.fetch import FetchError, Transfer
from tierstore.updates.listing import Offered


def require_same(replica: Shown, source: Path) -> None:
    assert replica.store.extra["tierstore.update"] == source_of(source).origin._asdict()
    replica.close()
    assert same(contents(replica.directory), contents(source))
    replica.show()


class KilledError(BaseException):
    """Stands for the end of a process: nothing but the disk is left of it."""


class Fleet:
    """A publisher, and replicas of drawn sources, each of which may be killed at any of its steps."""

    def __init__(self, source: Path, seed: int, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> None:
        self.source, self.draw, self._stack = source, random.Random(seed), stack
        self._versions, self.kills, self._doom, self.is_broken = 1, 0, 0, True
        self.publisher = stack.enter_context(publishing(source, urgent=0.3, say=lambda _: None))
        self._urls = [self.draw.sample(range(-1, place), self.draw.randint(1, place + 1)) for place in range(3)]
        self._stacks = [stack.enter_context(contextlib.ExitStack()) for _ in range(3)]
        self.replicas: list[Shown] = []
        for place in range(3):
            self.replicas.append(self._start(place))
        monkeypatch.setattr(killpoints, "hook", self._hook)
        self._parts = offer._parts
        monkeypatch.setattr(offer, "_parts", self._broken)

    def _start(self, place: int) -> Shown:
        urls = [self.publisher.url if each < 0 else self.replicas[each].url for each in self._urls[place]]
        return self._stacks[place].enter_context(following(self.source.with_name(f"replica {place}"), urls))

    def _hook(self, _name: str) -> None:
        self._doom -= 1
        if self._doom == 0:
            raise KilledError

    async def _broken(self, *arguments: Any) -> Any:
        async for data in self._parts(*arguments):
            chance = self.draw.random() if self.is_broken else 1.0
            if chance < 0.2:
                yield data[:-1] + bytes([data[-1] ^ 1])
            elif chance < 0.4:
                yield data[: len(data) // 2]
                raise OSError("broken off")
            else:
                yield data

    def commit(self) -> None:
        self._versions += 1
        change(self.source, self._versions, keep=4, names=[("item",), ("item", "user"), ("new",)][self._versions % 3])

    def go_back(self, place: int | None = None) -> None:
        with tierstore.open(self.source, keep=4, ddr="4MiB", threads=1) as store:
            store.rollback(self.draw.choice(store.versions) if place is None else store.versions[place])

    def restore(self) -> None:
        """Have the source be its copy of before, or make one: numbers of versions are used again."""
        copy = self.source.with_name("copy")
        if is_restored := copy.exists() and self.draw.random() < 0.7:
            shutil.rmtree(self.source)
        else:
            shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(*((copy, self.source) if is_restored else (self.source, copy)))

    def publish(self) -> None:
        self._doom = self.draw.choice([0, self.draw.randint(1, 5)])
        with contextlib.suppress(KilledError):
            self.publisher.step()
        self.publisher.folder.open()  # as the next process does
        self._doom = 0

    def follow(self, place: int) -> None:
        self._doom = self.draw.choice([0, *[self.draw.randint(1, 5)] * 3])
        try:
            self.replicas[place].follow()
        except KilledError:
            self.kills += 1
            self._restart(place)
        except (errors.TierstoreError, OSError):
            assert self.is_broken
        self._doom = 0

    def _restart(self, place: int) -> None:
        for each in range(place, 3):  # those that follow it, too, as its port is another
            self._stacks[each].close()
        for each in range(place, 3):
            self._stacks[each] = self._stack.enter_context(contextlib.ExitStack())
            self.replicas[each] = self._start(each)


@pytest.mark.parametrize("seed", range(2))
def test_replicas_of_drawn_sources_end_at_the_version_of_the_source(source, seed, monkeypatch, stack):
    """Bit for bit, whatever is killed, broken off, damaged or gone back from."""
    fleet = Fleet(source, seed, monkeypatch, stack)
    for _ in range(35):
        action = fleet.draw.choice(
            [*[fleet.commit] * 3, *[fleet.publish] * 3, fleet.go_back, fleet.restore, fleet.restore, *[None] * 7]
        )
        if action is not None:
            action()
        elif fleet.draw.random() < 0.1:
            with contextlib.suppress(UpdateError):
                fleet.draw.choice(fleet.replicas).roll_back()
        else:
            fleet.follow(fleet.draw.randrange(3))
    assert fleet.kills
    fleet.is_broken = False
    monkeypatch.setattr(killpoints, "hook", None)
    for action in (fleet.commit, fleet.commit, lambda: fleet.go_back(-2)):
        action()
        fleet.publish()
        for replica in fleet.replicas:
            with contextlib.suppress(UpdateError):  # after urgent rows of a commit that is lost: then a full copy
                replica.follow()
            replica.follow()
            require_same(replica, source)
    for replica in fleet.replicas:
        assert len(list((replica.directory / "incoming").iterdir())) <= 1 + len(replica.listing.files)


def test_a_replica_follows_version_by_version_and_goes_back_for_good(source, tmp_path, stack):
    publisher = stack.enter_context(publishing(source, say=(said := list[str]()).append))
    replica = stack.enter_context(following(tmp_path / "replica", [publisher.url]))
    assert replica.follow() == 0, "nothing is offered"
    assert publisher.step()
    assert not publisher.step()
    assert replica.follow() == 1
    before = contents(source)
    change(source, 2, keep=4)
    publisher.step()
    assert replica.follow() == 2
    assert replica.refreshed == 2
    require_same(replica, source)
    assert [said[0].startswith("version 1: "), "whole" in said[0], "since version 1" in said[1]] == [True] * 3
    left = replica.taker.own.commit_id
    assert replica.roll_back() == 1
    assert replica.listing.left == (left,)
    assert replica.follow() == 1
    replica.close()
    assert same(contents(replica.directory), before)
    replica.show()
    change(source, 3, keep=4)
    publisher.step()
    assert replica.follow() == 3, "what it went back from is not shown on the way"
    assert replica.refreshed == 4
    require_same(replica, source)


@pytest.mark.parametrize("point", ["update: applied", "update: shown", "rollback: declined", "rollback: written"])
def test_a_killed_server_declines_what_it_left_and_no_more(source, tmp_path, point, monkeypatch, publisher):
    directory = tmp_path / "replica"

    def die(name: str) -> None:
        if name == point:
            raise KilledError

    for version in (1, 2, 3):
        publisher.step()
        with following(directory, [publisher.url]) as replica:
            monkeypatch.setattr(killpoints, "hook", die if version == 3 else None)
            with contextlib.suppress(KilledError):
                replica.follow()
                replica.roll_back() if version == 3 else None
                assert version < 3
        change(source, version + 1, keep=4)
    monkeypatch.setattr(killpoints, "hook", None)
    with following(directory, [publisher.url]) as replica:
        is_rollback = point.startswith("rollback")
        assert replica.follow() == (2 if is_rollback else 3)
        assert len(replica.listing.left) == is_rollback
        if not is_rollback:
            left = replica.taker.own.commit_id
            assert replica.roll_back() == 2
            assert replica.listing.left == (left,)
        assert replica.taker.own.commit_id not in replica.listing.left
        assert replica.taker.own.commit_id in {each.commit_id for each in replica.listing.files}


def test_an_update_passes_through_a_replica_while_it_arrives_there(tmp_path, monkeypatch, stack, publisher):
    publisher.step()
    parts, go_on, half = offer._parts, threading.Event(), list[int]()

    async def slow(file: Any, *rest: Any) -> Any:
        is_publishers = str(publisher.folder.path) in os.readlink(f"/proc/self/fd/{file.fileno()}")
        async for data in parts(file, *rest):
            if not is_publishers:
                yield data
                continue
            half.append(len(data) // 2)
            yield data[: half[0]]
            await asyncio.to_thread(go_on.wait, 20)
            yield data[half[0] :]

    monkeypatch.setattr(offer, "_parts", slow)
    monkeypatch.setattr(fetch, "SILENT_SECONDS", 20.0)
    first = stack.enter_context(following(tmp_path / "first", [publisher.url]))
    second = stack.enter_context(following(tmp_path / "second", [first.url]))
    while not first.taker._transfer:
        first.step()
    wait_for(lambda: half)
    (file_id,) = [each.id for each in first.listing.files]
    partial = second.directory / "incoming" / f"{file_id}.partial"
    while not (partial.exists() and partial.stat().st_size >= half[0]):
        assert not second.step()
    assert partial.stat().st_size == half[0]
    go_on.set()
    assert first.follow() == second.follow() == 1
    assert publisher.given_bytes == sum(each.size_bytes for each in first.listing.files)


def test_a_transfer_goes_on_where_it_broke_and_leaves_who_is_silent(source, tmp_path, monkeypatch, caplog):
    update, asked = make(source), list[tuple[str, int]]()
    offered = Offered.of(update.id, update.size_bytes, update.header)
    data = update.path.read_bytes()

    class Fake:
        def __init__(self, url: str) -> None:
            self.url = url

        def read(self, _: Offered, start: int) -> Any:
            asked.append((self.url, start))
            gives = {"breaks": [data[start : start + 1000]], "silent": [], "lies": [bytes(len(data) - start)]}
            return iter(gives[self.url])

    def run(*urls: str) -> None:
        monkeypatch.setattr("random.sample", lambda found, _count: list(found))
        asked.clear()
        (tmp_path / update.id).unlink(missing_ok=True)
        Transfer(tmp_path, offered, [Fake(url) for url in urls]).run()  # type: ignore[arg-type]
        assert (tmp_path / update.id).read_bytes() == data

    (tmp_path / f"{update.id}.partial").write_bytes(data[:500])
    run("silent", "breaks")
    assert asked[:3] == [("silent", 500), ("breaks", 500), ("silent", 1500)]
    run("lies", "breaks")
    assert "was damaged on its way" in caplog.text
    for url, why in (("lies", "damaged on its way from each of 1"), ("silent", "it has no more")):
        with pytest.raises(FetchError, match=why):
            run(url)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 9, 9, 64 << 20, 9, 9, 9, 0, 9)))
    with pytest.raises(errors.DiskFullError, match="Free some space"):
        run("breaks")


def test_what_a_server_cannot_show_is_passed_over(source, publisher, replica):
    publisher.step()
    assert replica.follow() == 1
    before, show = contents(replica.directory), replica.refresh

    async def refuse() -> int:
        raise ValueError("holds NaN")

    change(source, 2, keep=4)
    publisher.step()
    replica.refresh = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="holds NaN"):
        replica.follow()
    assert replica.follow() == 1
    replica.close()
    assert same(contents(replica.directory), before)
    replica.refresh = show  # type: ignore[method-assign]
    replica.show()
    change(source, 3, keep=4)
    publisher.step()
    assert replica.follow() == 3
    require_same(replica, source)


def test_any_file_server_can_offer_a_folder(source, tmp_path, capsys):
    folder = tmp_path / "offered"

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    command = ["publish", str(source), "--into", str(folder), "--once"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.startswith("version 1: ")
    assert cli.main(command) == 0
    assert capsys.readouterr().out == "nothing is new\n"
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with following(tmp_path / "replica", [f"http://127.0.0.1:{server.server_port}/offered"]) as replica:
            for version in (1, 2):
                assert replica.follow() == version
                require_same(replica, source)
                change(source, version + 1, keep=4)
                assert cli.main(command) == 0
        server.shutdown()


def test_rows_of_one_store_only(source, tmp_path, stack):
    change(tmp_path / "another", 1, keep=4)
    one, other = (stack.enter_context(publishing(each)) for each in (source, tmp_path / "another"))
    one.step()
    other.step()
    replica = stack.enter_context(following(tmp_path / "new", [one.url, other.url]))
    with pytest.raises(UpdateError, match="offer several stores"):
        replica.follow()
    assert replica.store is None
    with following(tmp_path / "replica", [one.url]) as replica:
        replica.follow()
    with following(tmp_path / "replica", [other.url]) as replica:
        with pytest.raises(UpdateError, match="takes updates of one store"):
            replica.follow()
        assert replica.version == 1
    with (
        pytest.raises(errors.TierstoreError, match="choose another folder"),
        publishing(source, folder=other.folder.path) as wrong,
    ):
        wrong.step()


_NOTED: dict[int, list[str]] = {}
"""What threads do that they wait for, by their numbers."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if (noted := _NOTED.get(threading.get_ident())) is not None:
        is_of_file = event.partition(".")[0] in ("open", "os") and "incoming" in str(arguments[:1])
        noted.extend([event] if is_of_file or event == "subprocess.Popen" else [])


def noting(call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        _NOTED.get(threading.get_ident(), []).append(call.__name__)
        return call(*arguments, **named)

    return noted


def test_one_process_writes_all_updates_of_a_server_whose_loop_never_waits(source, tmp_path, monkeypatch):
    """Nor is the loop held by 50 ms of processor time."""
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", noting(os.fsync))
    monkeypatch.setattr(subprocess.Popen, "wait", noting(subprocess.Popen.wait))
    sys.addaudithook(_audit)
    held = last = 0.0
    with publishing(source) as publisher, whole.serving(tmp_path / "replica", sources=(publisher.url,)) as server:
        publisher.step()
        wait_for(lambda: server.engine.version == 1)

        def beat() -> None:
            nonlocal held, last
            now = time.thread_time()
            held, last = max(held, now - last if last else 0.0), now
            server.loop.call_later(0.002, beat)

        noted = _NOTED[server._thread.ident] = []
        server.loop.call_soon_threadsafe(beat)
        server.engine.row_counts._counts.update(range(2 * 16_384))
        writer: Any = server.server._replica._writer
        pids = [writer._process.pid]
        for version in (2, 3, 4):
            change(source, version, keep=4)
            publisher.step()
            wait_for(lambda version=version: server.engine.version == version)
            pids.append(writer._process.pid)
            for shown in ("lookups", "list.json"):
                httpx.get(f"{server.admin}/updates/{shown}", headers=whole.ADMIN).raise_for_status()
            if version == 3:
                writer._process.kill()
        assert server.metric("tierstore_update_failures_total") == 0
    _NOTED.clear()
    assert pids[0] == pids[1] == pids[2] != pids[3]
    assert noted == []
    assert held < 0.05


@pytest.mark.slow
def test_commands_of_two_processes(source, tmp_path, stack):
    (token := tmp_path / "token").write_text("secret\n")
    code = "import sys; from tierstore.cli import main; main(sys.argv[1:])"
    words = ["publish", str(source), "--port", "0", "--token-file", str(token)]
    publisher = Child(code, *words)
    stack.callback(publisher.kill)
    said = [publisher._process.stdout.readline() for _ in range(2)]
    (url,) = [line.split()[1] for line in said if line.startswith("ready: ")]
    assert any(line.startswith("version 1: ") for line in said)
    flags = ["--store", str(tmp_path / "replica"), "--from", url, "--admin-token-file", str(token)]
    server = stack.enter_context(whole.command(tmp_path / "log", *whole.FREE_PORTS, *flags))
    with socket.create_connection(("127.0.0.1", int(server.admin.rpartition(":")[2]))):
        wait_for(lambda: httpx.get(f"{server.url}/v2/health/ready").status_code == 200)

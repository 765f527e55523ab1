"""Replicas that meet a full disk, a shortage, damage, or a slow source: what is kept, and what is tried again."""

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serve.admin.test_follow import require_same
from tests.serve.loops import wait_for
from tests.serve.replicas import following, publishing, publishing_changes
from tests.updates.support import change
from tierstore import errors
from tierstore.serve.admin import updates
from tierstore.serve.admin.offer import UpdateError
from tierstore.updates.listing import Listing


def test_what_has_arrived_outlives_a_full_disk_and_a_restart(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
) -> None:
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
    assert publisher.folder.given_bytes == copy.size_bytes + delta.size_bytes


def test_a_file_that_lost_a_bit_here_is_fetched_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
) -> None:
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
    assert publisher.folder.given_bytes == copy.size_bytes + 2 * delta.size_bytes


def test_what_fails_for_a_while_is_tried_again_and_again_later(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
) -> None:
    publisher = stack.enter_context(publishing(source))
    publisher.step()
    replica = stack.enter_context(following(tmp_path / "replica", [publisher.url]))
    now, tried, ask = [0.0], list[float](), replica.taker._writer.ask
    monkeypatch.setattr(updates, "_RETRY_SECONDS", 2.0)
    monkeypatch.setattr(updates, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def refuse(*request: str) -> Any:
        tried.append(now[0])
        if now[0] < 250:
            raise UpdateError(500, "out of file descriptors", is_passing=True)
        return await ask(*request)

    monkeypatch.setattr(replica.taker._writer, "ask", refuse)
    while replica.version == 0:
        with contextlib.suppress(UpdateError):
            replica.follow()
        now[0] += 1.0
    assert tried == [0, 2, 6, 14, 30, 62, 126, 190, 254]
    require_same(replica, source)


def test_a_slow_source_does_not_delay_another(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
) -> None:
    publisher = stack.enter_context(publishing(source))
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

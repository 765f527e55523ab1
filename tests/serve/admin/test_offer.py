"""What is offered, to whom and by which flags; replicas that meet a full disk, damage or a slow source. A canary shows
a version first; its verdict decides whether others do, and nobody ends at one that it declined."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.serve import whole
from tests.serve.admin.test_follow import KilledError, require_same
from tests.serve.loops import wait_for
from tests.serve.replicas import Shown, following, publishing, publishing_changes
from tests.updates.support import change, contents, same
from tierstore import errors
from tierstore.cli import entry as cli
from tierstore.serve import replica as replicas
from tierstore.serve import replica as updates
from tierstore.serve.hot_rows import COUNTED_ROWS, RowCounts
from tierstore.serve.messages import ServeError, Status
from tierstore.serve.offer import UpdateError
from tierstore.system import killpoints
from tierstore.updates.fetch import Source
from tierstore.updates.listing import MAX_FILES, Canary, Listing, Measures, Offered, way

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


BOUNDS = Canary(seconds=5, loss=0.25, errors=0.125, p99=0.5)
FINE, WORST = Measures(0.5, 0.02, 0.008), Measures(0.625, 0.145, 0.012)
BAD = {
    "the log loss is 0.63, was 0.5, and --canary-loss 0.25 allows 0.625": WORST._replace(log_loss=0.63),
    "the log loss is no number, was 0.5": WORST._replace(log_loss=math.inf),
    "loss is no number, was 0.5": WORST._replace(log_loss=math.nan),
    "failed requests is 0.15, was 0.02, and --canary-errors 0.125 allows 0.145": WORST._replace(failed_share=0.15),
    "in seconds, is 0.0121, was 0.008, and --canary-p99 0.5 allows 0.012": WORST._replace(seconds_p99=0.0121),
}


def test_each_measure_has_its_bound():
    for why, bad in BAD.items():
        assert why in BOUNDS.worse(FINE, bad)
    assert BOUNDS.worse(FINE, WORST) == "", "what is at its bound passes"
    assert BOUNDS.worse(Measures(), FINE) == "", "there is nothing to be worse than"
    broken = Measures(sys.float_info.max)
    assert BOUNDS.worse(broken, FINE) == ""
    for before in (broken, Measures()):
        assert "is no number, was no number" in BOUNDS.worse(before, broken), "a loss that is no number is never good"
    for name in FINE._fields:
        assert not BOUNDS.worse(FINE, FINE._replace(**{name: None})), "silence decides nothing"


class Site:
    def __init__(self, source: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self._stack = source, stack
        self.fares: dict[int, Measures | None] = {1: FINE}
        self.said: list[str] = []
        self.now = 1000.0
        monkeypatch.setattr(replicas, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.publisher = stack.enter_context(publishing(source, say=self.said.append, silent_seconds=0.0, urgent=0.3))
        self.canary = self.begin_canary()
        first = stack.enter_context(following(source.with_name("first"), [self.publisher.url]))
        self.others = [first, stack.enter_context(following(source.with_name("second"), [first.url]))]
        self.publisher.step()
        self.follow()
        change(source, 2, keep=4)

    def begin_canary(self) -> Shown:
        made: Any = self._stack.enter_context(following(
            self.source.with_name("canary"), [self.publisher.url], canary=BOUNDS,
            measure=lambda _seconds, _commit: self.fares.get(made.version),
        ))  # fmt: skip
        self.publisher._canary = Source(made.url)
        self.canary = made
        return self.canary

    def follow(self) -> list[int]:
        return [each.follow() for each in (self.canary, *self.others)]

    def round(self) -> list[int]:
        self.publisher.step()
        self.canary.follow()
        self.now += BOUNDS.seconds + 2
        self.canary.follow()
        self.publisher.step()
        return self.follow()


@pytest.fixture
def site(source: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(source, stack, monkeypatch)


def test_an_approved_version_goes_to_all_and_a_declined_one_to_nobody(site, source):
    before = contents(site.canary.directory)
    site.publisher.step()
    assert site.follow() == [2, 1, 1], "on trial"
    declined = site.canary.taker.own.commit_id
    site.fares[2] = BAD_LOSS = WORST._replace(log_loss=9.0)
    assert site.round() == [1, 1, 1]
    (verdict,) = site.publisher.folder.listing.verdicts
    assert (verdict.commit_id, verdict.is_approved) == (declined, False)
    assert (verdict.before, verdict.after) == (tuple(FINE), tuple(BAD_LOSS))
    assert site.said[-1].startswith("version 2 is declined: the log loss is 9, was 0.5")
    assert [each.commit_id for each in site.publisher.folder.listing.files if each.commit_id == declined] == []
    for replica in (site.canary, *site.others):
        assert replica.listing.declined == {declined}, "and all know"
        replica.close()
        assert same(contents(replica.directory), before)
        replica.show()
    assert site.round() == [1, 1, 1], "for good"
    change(source, 3, keep=4)
    site.fares[3] = WORST
    assert site.round() == [3, 3, 3]
    for replica in (site.canary, *site.others):
        require_same(replica, source)
    assert site.publisher.folder.listing.verdicts[-1].is_approved
    assert site.canary.roll_back() == 1, "its operator takes the version from all"
    site.publisher.step()
    assert site.follow() == [1, 1, 1]
    assert site.said[-1] == "version 3 was declined: back to version 1"
    change(source, 4, keep=4)
    site.fares[1] = None
    assert site.round() == [1, 1, 1], "without measures a canary takes nothing new"
    site.fares[1] = site.fares[4] = FINE
    assert site.round() == [4, 4, 4]


@pytest.mark.parametrize("name", ["log_loss", "seconds_p99"])
def test_a_canary_that_is_silent_decides_nothing_and_the_publisher_says_so(site, name, source):
    """A measure that there was before, and is not of the new version; or a watch that has not ended."""
    site.fares[2] = None if name == "log_loss" else WORST._replace(**{name: None})
    assert site.round() == [2, 1, 1]
    assert not site.publisher.folder.listing.verdicts
    assert "no decision on version 2" in site.said[-1]
    change(source, 3, keep=1)  # the trainer keeps one version: that on trial is gone
    assert site.round() == [2, 1, 1]
    assert sum("no decision" in each for each in site.said) == 1
    site.fares[2] = site.fares[3] = WORST
    assert site.round() == [3, 2, 2]
    assert site.round() == [3, 3, 3]


@pytest.mark.parametrize(
    ("point", "is_good"),
    [
        ("update: applied", True),
        ("update: shown", True),
        ("update: shown", False),
        ("canary: approved", True),
        ("canary: declined", False),
        ("rollback: written", False),
    ],
)
def test_a_canary_that_is_killed_goes_on(site, source, point, is_good, monkeypatch):
    site.fares[2] = WORST if is_good else WORST._replace(failed_share=0.9)

    def die(name: str) -> None:
        if name == point:
            monkeypatch.setattr(killpoints, "hook", None)
            raise KilledError

    monkeypatch.setattr(killpoints, "hook", die)
    with contextlib.suppress(KilledError):
        site.round()
    monkeypatch.setattr(killpoints, "hook", None)
    site.begin_canary()
    assert site.round() == [2 if is_good else 1] * 3
    change(source, 3, keep=4)
    site.fares[3] = WORST
    assert site.round() == [3, 3, 3]


def test_a_publisher_without_a_canary_ends_the_trial(site, source):
    site.publisher.step()
    assert site.follow() == [2, 1, 1]
    with publishing(source, folder=site.publisher.folder.path, say=site.said.append) as again:
        again.step()
    site.publisher.folder.open()
    assert site.follow() == [2, 2, 2]


@pytest.mark.parametrize("what", ["applied", "shown"])
def test_a_version_that_the_canary_cannot_apply_or_show_is_declined(site, what):
    async def refuse(*request: str) -> Any:
        raise UpdateError(422, "holds NaN", faults=dict.fromkeys(request[-1:], "refused"))

    writer, ask, show = site.canary.taker._writer, site.canary.taker._writer.ask, site.canary.refresh
    if what == "applied":
        writer.ask = refuse
    else:
        site.canary.refresh = refuse  # type: ignore[method-assign]
    site.publisher.step()
    with pytest.raises(UpdateError, match="holds NaN"):
        site.canary.follow()
    writer.ask, site.canary.refresh = ask, show  # type: ignore[method-assign]
    site.canary.show()
    assert site.round() == [1, 1, 1]
    assert f"cannot be {what}" in site.publisher.folder.listing.verdicts[0].why


def test_a_servers_refusals_errors_and_waits_count(tmp_path, stack, publisher):
    publisher.step()
    server = stack.enter_context(whole.serving(tmp_path / "replica", sources=(publisher.url,), canary=True))
    wait_for(lambda: server.engine.is_ready)
    commit, measure, metrics = server.engine.commit_id, server.server._measure, server.server.metrics
    assert measure(60, commit) == Measures()
    ids = {"name": "ids", "datatype": "INT64", "shape": [2], "data": [5, 7]}
    httpx.post(f"{server.url}/v2/models/rows.user/infer", json={"inputs": [ids]}).raise_for_status()
    for _ in range(100):
        metrics.answered("rows.user", "http", None, 0.25)  # of which most was the wait for a batch
    metrics.answered("rows.user", "http", Status.INTERNAL, 0.001)
    for _ in range(99):
        server.server.repository.note_refused("http", ServeError(Status.OVERLOADED, "1000 connections are open"))
    found: Callable[[], Any] = lambda: measure(60, commit)  # noqa: E731 - asked again
    wait_for(lambda: found() != Measures())
    wait_for(lambda: found().failed_share == pytest.approx(100 / 201))
    assert found().seconds_p99 == 0.25
    told = httpx.get(f"{server.admin}/updates/lookups", headers=whole.ADMIN).json()["lookups"]
    assert {key for key, _ in told} == {1 << 40 | 5, 1 << 40 | 7}
    server.engine.watched = SimpleNamespace(last=SimpleNamespace(commit_id="other", log_loss=1.0))
    assert found() is None, "its watch has not measured what is shown"
    server.engine.watched.last.commit_id, server.engine.watched.last.log_loss = commit, math.inf
    assert found().log_loss < math.inf
    server.engine.watched = None


def test_the_hottest_rows_are_counted_and_the_rarest_forgotten():
    tables: Any = [SimpleNamespace(index=at, config=SimpleNamespace(ids=ids)) for at, ids in enumerate((None, 1, None))]
    now, lengths = [0.0], np.array([[2, 1], [1, 0], [0, 2]])
    counts = RowCounts(lambda: now[0])
    for _ in range(3):
        counts.note(tables, lengths, np.array([4, 4, 6, 99, 4, 8]))
        counts.note(tables, lengths, np.array([1, 1, 1, 1, 1, 1]))  # too soon after the one before
        now[0] += 1
    assert dict(counts.top()) == {4: 6, 6: 3, 2 << 40 | 4: 3, 2 << 40 | 8: 3}
    for first in range(0, 3 * COUNTED_ROWS, 4096):
        counts.note(tables[:1], np.array([[4096]]), np.arange(first, first + 4096) + 100)
        now[0] += 1
    assert (len(counts.top()), counts.top()[0]) == (COUNTED_ROWS, (4, 3))
    counts.note(tables[:1], np.array([[9]]), np.array([3] * 4 + [0] * 5), np.array([False] * 4 + [True] * 5))
    assert 0 not in dict(counts.top()), "it stands for ids that are no rows"

"""A canary's measures decide whether others get a version; urgent rows go first; publishers are killed between."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.children import run
from tests.serve import whole
from tests.serve.admin.test_peers import TOKEN, Fleet, fleet, listed, sent, source
from tests.serve.loops import wait_for
from tests.updates.support import change, contents, same
from tierstore.cli import entry as cli
from tierstore.serve.hot_rows import COUNTED_ROWS, RowCounts
from tierstore.system import killpoints
from tierstore.updates import canary as canaries
from tierstore.updates import write_update
from tierstore.updates.canary import Canary, Measures, measure
from tierstore.updates.client import AdminClient, Kept, PublishError
from tierstore.updates.delta import source_of
from tierstore.updates.publish import publish
from tierstore.updates.urgent import urgent_rows

__all__ = ["fleet", "sent", "source"]

pytestmark = pytest.mark.usefixtures("warm_writer")
BOUNDS = Canary(seconds=5, loss=0.25, errors=0.125, p99=0.5)
GOOD, WORST = Measures(0.5, 0.02, 0.008), Measures(0.625, 0.145, 0.012)


def status(told: Measures, version: int, requests: int = 100) -> dict[str, Any]:
    recent = {"requests_per_second": 50.0, "failed_per_second": 50.0 * (told[1] or 0), "seconds_p99": told[2]}
    watch = told[0] and {"version": version, "log_loss": told[0] if told[0] < 9 else None, "rows": 9}
    return {"requests": {"recent": recent, "history": {"requests": [1, requests - 1]}}, "watch": watch}


def no_time() -> Any:
    now = [0.0]
    return SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))


@pytest.fixture
def fares(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """How servers fare, by the version that they show: measures, or a status. To wait takes no time."""
    found: dict[int, Any] = {1: GOOD}

    def tell(client: AdminClient, _seconds: int) -> Any:
        version = client.origin().version  # type: ignore[union-attr]
        told = found[version]() if callable(found[version]) else found[version]
        return status(told, version) if isinstance(told, Measures) else told

    monkeypatch.setattr(canaries, "time", no_time())
    monkeypatch.setattr(AdminClient, "status", tell)
    return found


@pytest.fixture
def three(fleet: Fleet, source: Path) -> Fleet:
    """Servers of version 1, of a source of version 2."""
    fleet.begin(3)
    fleet.publish(source)
    change(source, 2, keep=4)
    return fleet


def versions(fleet: Fleet) -> list[int]:
    return [replica.store.extra["tierstore.update"]["version"] for replica in fleet.replicas if replica.store]


BAD = {
    "the log loss is 0.63, was 0.5, and --canary-loss 0.25 allows 0.625": WORST._replace(log_loss=0.63),
    "the log loss is inf, was 0.5": WORST._replace(log_loss=math.inf),
    "failed requests is 0.15, was 0.02, and --canary-errors 0.125 allows 0.145": WORST._replace(failed_share=0.15),
    "in seconds, is 0.0121, was 0.008, and --canary-p99 0.5 allows 0.012": WORST._replace(seconds_p99=0.0121),
}


def test_each_measure_has_its_bound() -> None:
    for why, bad in BAD.items():
        assert why in "".join(BOUNDS.compare(GOOD, bad))
    assert BOUNDS.compare(GOOD, WORST) == ["", "", ""]
    assert BOUNDS.compare(Measures(), GOOD) == [], "there is nothing to be worse than"
    for absent in (None, math.nan):
        for name in GOOD._fields:
            was, now = Measures(**{name: 0.5}), GOOD._replace(**{name: absent})
            assert [each != "" for each in BOUNDS.compare(was, now)] == [True], name


def test_a_version_that_fares_worse_is_gone_back_from_for_good(
    three: Fleet, source: Path, fares: dict[int, Any], sent: list[int]
) -> None:
    replica, before = three.replicas[0], contents(three.replicas[2].directory)
    fares[2] = WORST._replace(log_loss=math.inf)
    first, *others = three.publish(source, canary=BOUNDS)
    assert first.startswith("went back to version 1 (commit ")
    assert "the log loss is inf, was 0.5" in first
    assert others == [f"left as it is, as the canary {three.urls[0]} did not keep the version"] * 2
    assert versions(three) == [1, 1, 1]
    fares[2] = GOOD
    sent.clear()
    for canary in (BOUNDS, None):
        assert "went back from version 2" in three.publish(source, slice(1), canary=canary)[0]
    assert not sent
    three.publish(source, slice(1, 2))
    replica.catch_up()  # a peer shows it
    with AdminClient(three.urls[0], token=TOKEN) as client:
        client.send(update := write_update(source, source.with_name("again"), since=1))
        with pytest.raises(PublishError, match="went back from version 2"):
            client.apply(update)
    assert versions(three) == [1, 2, 1]
    replica.close()
    assert same(contents(replica.directory), before)
    replica.show()
    change(source, 3, keep=4)
    fares[3] = WORST
    assert three.publish(source, canary=BOUNDS) == [""] * 3, "what is at its bound passes"
    three.require_same(source)
    assert (replica.directory / "incoming" / "peers").read_text().split() == three.urls[1:]


def test_nobody_gets_what_is_on_trial_nor_what_came_after_it(three: Fleet, source: Path, fares: dict[int, Any]) -> None:
    seen, canary = [], Canary(url=three.urls[0], seconds=90, loss=1, errors=1, p99=1)

    def look() -> Measures:
        for replica in three.replicas[1:3]:
            replica.catch_up()
        seen.append(versions(three))
        if len(seen) == 1:
            change(source, 3)  # the trainer keeps one version: that on trial is gone
        return WORST

    fares[2] = look
    three.begin()  # needs another update
    assert three.publish(source, canary=canary, urgent=0.5) == [""] * 4
    assert seen == [[2, 1, 1]] * 2, "a minute, and the rest"
    away = three.begin(peers=three.urls[:1])
    away.catch_up()
    assert versions(three) == [2] * 5


def test_what_cannot_be_judged_is_not_passed_on(three: Fleet, source: Path, fares: dict[int, Any]) -> None:
    fares[2] = status(Measures(None, 0.0, 0.001), 2, requests=99)
    first, *others = three.publish(source, canary=BOUNDS)
    assert "cannot be judged: the log loss is absent, was 0.5" in first
    assert "seconds, is absent, was 0.008" in first
    assert all("left as it is" in each for each in others)
    assert versions(three) == [2, 1, 1]
    fares[2] = WORST._replace(failed_share=0.9)
    assert "went back to version 1" in three.publish(source, canary=BOUNDS)[0], "by what was measured before the first"
    three.begin()
    assert "is empty" in three.publish(source, slice(3, 4), canary=BOUNDS)[0]


@pytest.mark.parametrize("shown", [{"version": 1}, {"version": 2, "commit_id": "f" * 16}, {}])
def test_a_canary_whose_loss_is_of_another_commit_is_not_passed_on(
    three: Fleet, source: Path, fares: dict[int, Any], shown: dict[str, Any]
) -> None:
    """Or of none, as its watch has not ended."""
    fares[2] = status(GOOD, 2)
    fares[2]["watch"] = shown and fares[2]["watch"] | shown
    first, *others = three.publish(source, canary=BOUNDS)
    assert "cannot be judged: the log loss is absent, was 0.5" in first
    assert all("left as it is" in each for each in others)
    assert versions(three) == [2, 1, 1]
    fares[2] = GOOD
    assert three.publish(source, canary=BOUNDS) == [""] * 3


KILLED = """
    from tests.serve.admin.test_canary import BOUNDS, GOOD, no_time, status
    from tierstore.system import killpoints
    from tierstore.updates import canary as canaries
    from tierstore.updates.client import AdminClient
    from tierstore.updates.publish import publish

    killpoints.hook = lambda name: os._exit(0) if name == sys.argv[2] else None
    canaries.time = no_time()
    AdminClient.status = lambda client, _: status(GOOD, client.origin().version)
    publish(sys.argv[1], sys.argv[3:], token="secret", canary=BOUNDS, urgent=0.2)
    raise SystemExit("it went on")
    """


@pytest.mark.parametrize("is_good", [True, False])
@pytest.mark.parametrize("point", killpoints.PUBLISH_POINTS)
def test_a_killed_publish_is_gone_on_with(
    three: Fleet, source: Path, fares: dict[int, Any], point: str, is_good: bool
) -> None:
    run(KILLED, source, point, *three.urls)
    is_shown = point == "publish: urgent rows shown"
    assert versions(three) == [2, 1, 1]
    urgent = [bool(replica.store.extra["tierstore.update"]["urgent"]) for replica in three.replicas]
    assert urgent == [False, is_shown, is_shown]
    fares[2] = fares[3] = WORST if is_good else WORST._replace(log_loss=0.63)
    if not is_good and point == "publish: canary shows it":
        assert "log loss is 0.63, was 0.5" in three.publish(source, canary=BOUNDS)[0]
        assert versions(three) == [1, 1, 1]
        return
    if not is_good:  # it was judged before; what is bad now is of another version
        change(source, 3, keep=4)
        fares[2] = fares[3]
    assert three.publish(source, canary=BOUNDS, urgent=0.3) == [""] * 3
    three.require_same(source)


def test_all_show_urgent_rows_and_then_the_rest(three: Fleet, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the servers together looked up most. The rest is what a plain publish sends, also from peers."""
    unasked = urgent_rows(source, 1, 0.3, {})
    one, two, other = np.setdiff1d(urgent_rows(source, 1, 0.9, {}), unasked)[:3].tolist()
    for replica, counts in zip(three.replicas, ([(one, 10**6), (two, 2)], [(two, 10**6)], [(other, 9)]), strict=True):
        monkeypatch.setattr(replica.taker, "_lookups", lambda counts=counts: counts)
    away, shown = three.begin(peers=three.urls[:1]), list[Any]()

    def end(name: str) -> None:
        if name == "publish: urgent rows shown":
            shown.extend(contents(replica.directory) for replica in three.replicas[:3])
            raise KeyboardInterrupt

    rows = urgent_rows(source, 1, 0.3, {one: 10**6, two: 10**6 + 2, other: 9})
    assert set(rows) & {one, two} > set(unasked) & {one, two}
    before, after = contents(three.replicas[0].directory), contents(source)
    monkeypatch.setattr(killpoints, "hook", end)
    with pytest.raises(KeyboardInterrupt):
        three.publish(source, slice(3), urgent=0.3)
    assert len(shown) == 3
    with AdminClient(three.urls[2], token=TOKEN) as client:
        assert client.roll_back() == 1
        assert client.state().declined == {source_of(source).origin.commit_id}, "and not the commit shown before"
    for index, name in enumerate(before):
        own = np.isin(np.arange(900) | index << 40, rows)[:, None]
        old, new = (each[name].view(900, -1).numpy() for each in (before, after))
        for found in shown:
            assert (found[name].view(900, -1).numpy() == np.where(own, new, old)).all()
    assert three.publish(source, slice(1)) == [""]
    for replica in (*three.replicas[1:3], away):
        replica.catch_up()
    assert versions(three) == [2, 2, 1, 2]
    three.replicas.pop(2)
    three.require_same(source)
    plain = write_update(source, source.with_name("plain"), since=1).id
    assert plain in [Kept.of_name(each).id for each in listed(three.urls[1])["kept"]]


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for settings in ({"seconds": 0}, {"loss": -0.1}, {"p99": math.nan}, {"errors": math.inf}, {"url": "replica"}):
        with pytest.raises(ValueError, match=r"canary \w+=|write http://HOST:PORT"):
            Canary(**settings)
    for share in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            publish("store", ["http://server"], urgent=share)


def test_the_command_says_which_measure_and_ends_with_1(
    three: Fleet, source: Path, fares: dict[int, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (token := source.with_name("token")).write_text(TOKEN)
    words = [word for url in three.urls for word in ("--to", url)]
    command = ["publish", str(source), "--token-file", str(token), *words]
    for wrong in (["--canary-loss", "1"], ["--dry-run", "--urgent", "0.1"], ["--urgent", "1"]):
        assert cli.main([*command, *wrong]) == 2
        assert wrong[-2] in capsys.readouterr().err.replace("urgent=", "--urgent")
    fares[2] = WORST
    loose = ["--canary-errors", "0.2", "--canary-loss", "1"]
    assert cli.main([*command, "--urgent", "0.1", "--canary", three.urls[1], *loose]) == 0
    change(source, 3, keep=4)
    fares[3] = WORST._replace(failed_share=0.5)
    assert cli.main([*command, "--canary"]) == 1
    said = capsys.readouterr().out
    assert f"{three.urls[0]}: failed: went back to version 2" in said
    assert "failed requests is 0.5, was 0.145, and --canary-errors 0.01 allows 0.155" in said


def test_a_server_tells_how_it_fares_and_what_is_looked_up(source: Path, tmp_path: Path) -> None:
    with whole.serving(tmp_path / "first", updates=True) as server:
        assert not publish(source, [server.admin], token=whole.ADMIN_TOKEN)[0].error
        wait_for(lambda: server.engine.is_ready)
        for number in range(120):
            ids = {"name": "ids", "datatype": "INT64", "shape": [2], "data": [5, 10**9 if number % 10 == 0 else 7]}
            httpx.post(f"{server.url}/v2/models/rows.user/infer", json={"inputs": [ids]})
        with AdminClient(server.admin, token=whole.ADMIN_TOKEN) as client:
            wait_for(lambda: sum(client.status(60)["requests"]["history"]["requests"]) == 120)
            found = measure(client, 1, 60)
            assert found[:2] == (None, pytest.approx(0.1))
            assert 0 < (found.seconds_p99 or 0) < 10
            assert set(client.lookups()) == {1 << 40 | 5, 1 << 40 | 7}
            assert len(client.status(1)["requests"]["history"]["requests"]) == 1


def test_the_hottest_rows_are_counted_and_the_rarest_forgotten() -> None:
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
    assert len(counts.top()) == COUNTED_ROWS
    assert counts.top()[0] == (4, 3)
    counts.note(tables[:1], np.array([[9]]), np.array([3] * 4 + [0] * 5), np.array([False] * 4 + [True] * 5))
    assert 0 not in dict(counts.top()), "it stands for ids that are no rows"

"""A publisher that is killed, has no space, or hears nonsense goes on."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.updates.support import change, contents, same
from tierstore import errors
from tierstore.system import killpoints
from tierstore.updates import Origin, apply_update
from tierstore.updates.listing import Listing, Verdict, way
from tierstore.updates.publish import Publisher


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
    """As a replica does, which has all that is offered."""
    listing = publisher.folder.listing
    wanted = (listing.trial if not has_urgent else None) or listing.target
    assert wanted is not None
    files = way([each for each in listing.files if has_urgent or not each.is_urgent], own, wanted)
    assert files is not None
    for each in files:
        apply_update(replica, publisher.folder.path / each.id)
    return wanted


@pytest.mark.parametrize("with_canary", [False, True], ids=["", "canary"])
@pytest.mark.parametrize("then", ["again", "full", "commit", "restore"])
def test_a_version_whose_rest_was_not_offered_is_offered_yet(
    then: str, with_canary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_server_of_lookups_that_answers_nonsense_counts_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(source := tmp_path / "source", 1, keep=4)
    servers = [*map(Server, ANSWERS.values()), Server({5: 2}), Server({5: 1, 6: 1})]
    publisher = publisher_of(source, lookups=servers)
    assert publisher._counts() == {5: 3, 6: 1}
    assert caplog.text.count("count for nothing") == len(ANSWERS)
    publisher.step()
    change(source, 2, keep=4)
    publisher.step()
    assert any(each.is_urgent for each in publisher.folder.listing.files)


def test_no_error_of_a_commit_ends_the_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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

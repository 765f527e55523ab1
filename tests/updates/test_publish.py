"""Urgent rows go first, as a version between two; a publisher that is killed, has no space, hears nonsense goes on."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.updates.support import ROWS, SMALL, change, contents, extra_of, make, same, source_of, table_config
from tierstore import errors
from tierstore.layout import KEY_ROW_BITS, ROW_MASK
from tierstore.system import killpoints
from tierstore.updates import Origin, Update, apply_update, origin_of, roll_back_replica
from tierstore.updates.listing import Listing, Verdict, way
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
    """A source of two versions, a replica of the first, and updates from there."""

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
    """As a replica does, which has all that is offered."""
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

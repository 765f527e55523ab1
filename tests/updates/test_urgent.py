"""Urgent rows go first, as a version between two; what follows is what a publish without them makes."""

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
from tierstore.updates import Origin, Update, apply_update, origin_of, roll_back_replica
from tierstore.updates.delta import urgent_rows


def values(directory: Path, version: int) -> dict[str, Any]:
    with tierstore.open(directory, mode="r", version=version, **SMALL) as store:
        tables = {name: table for name, table in store.tables.items() if name != "ids"}
        return {name: table.read(torch.arange(ROWS)).double().numpy() for name, table in tables.items()}


@pytest.mark.parametrize(("share", "is_kept"), [(0.001, True), (0.1, True), (0.9, False)])
def test_the_most_urgent_rows_are_those_of_another_ranking(tmp_path: Path, share: float, is_kept: bool) -> None:
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
    total = make(source, 1).header.num_rows
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
        origin = origin_of(extra_of(self.replica)[0])
        assert origin is not None
        return origin

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


def test_an_urgent_version_is_the_one_before_with_those_rows(told: Told) -> None:
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


def test_the_versions_kept_are_two_again_after_the_next(told: Told) -> None:
    for update in (told.urgent, told.update(1)):
        apply_update(told.replica, update.path)
    change(told.source, 3, keep=4)
    apply_update(told.replica, told.update(2).path)
    with tierstore.open(told.replica, mode="r", **SMALL) as store:
        assert len(store.versions) == 2
    assert roll_back_replica(told.replica).version == 2


def test_only_what_has_the_urgent_rows_too_is_taken_after_them(told: Told) -> None:
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


def test_tables_come_with_the_whole(told: Told) -> None:
    with tierstore.open(told.source, keep=4, **SMALL) as store:
        store.create_table(table_config("new")).write(torch.arange(5), torch.ones(5, 6))
        store.commit()
    with pytest.raises(errors.TableError, match="lacks 'new': tables come with the whole update"):
        apply_update(told.replica, told.update(1, only=told.rows).path)
    assert same(contents(told.replica), told.before)

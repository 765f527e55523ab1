"""The map from rows to places: as wide as it must be, and the same whether it was kept up to date or is made again."""

import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conformance.cold_tier import NARROW, WIDE, check_rows, commit, keys_of, write_rows
from tests.io.support import open_tier, widen_places
from tierstore.errors import BudgetError
from tierstore.io import places, segments
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.records import MAX_VERSION
from tierstore.io.row_map import RowMap
from tierstore.io.segments import KEYS, read_indexes, stored_segments
from tierstore.layout import PAGE_HEADER_WORDS

PAGE = 4096
_NUM_ROWS = 2000
_SHAPES = {0: WIDE, 1: NARROW, 2: WIDE}


class _Content(NamedTuple):
    segments: dict[int, tuple[int, dict[int, int]]]
    places: dict[int, tuple[int, int]]


def _content(rows: RowMap) -> _Content:
    segments = {}
    for each in rows.segments.values():
        arrays = each.arrays
        assert each.rows == int((arrays.live + arrays.held)[each.in_use].sum())
        for slot in np.setdiff1d(each.in_use, each.dead).tolist():
            under = {version: int(held[slot]) for version, held in each.held_under.items() if held[slot:][:1].any()}
            segments[int(arrays.numbers[slot])] = (int(arrays.live[slot]), under)
            assert arrays.held[slot] == sum(under.values())
            assert arrays.live[slot] + arrays.held[slot] > 0
    return _Content(segments, _places(rows))


def _places(rows: RowMap) -> dict[int, tuple[int, int]]:
    found = {}
    for table, layout in rows.layouts.items():
        each, base = rows.segments[layout], int(rows.tables.bases[table])
        for row in np.concatenate([np.empty(0, np.int64), *rows.stored_rows(table)]).tolist():
            slot, index = divmod(int(rows.places[base + row]), 1 << each.geo.place_bits)
            found[int(keys_of(table, [row])[0])] = (int(each.arrays.numbers[slot]), index)
    return found


def _by_definition(tier: LmdbColdTier) -> _Content:
    """What a map of the newest rows is to say: of each row the newest copy is live, and others are held under the last
    kept version before the next copy, if they are as old."""
    snapshot = tier._file.snapshot
    copies: dict[int, list[tuple[int, int, int, int]]] = {}
    for each in read_indexes(snapshot, stored_segments(snapshot)):
        start = int(each["first_page"]) * PAGE // 8 + PAGE_HEADER_WORDS + KEYS
        for index, key in enumerate(snapshot.file_map.words[start : start + int(each["rows"])].tolist()):
            place = int(each["newest"]), int(each["number"]), int(each["oldest"]), index
            copies.setdefault(key, []).append(place)
    live, held, places = Counter[int](), defaultdict[int, Counter[int]](Counter), {}
    for key, own in copies.items():
        own.sort()
        _, number, _, index = own[-1]
        places[key], live[number] = (number, index), live[number] + 1
        for (_, number, oldest, _), (epoch, *_) in pairwise(own):
            version = max((kept for kept in tier.versions if kept < epoch), default=-1)
            if version >= oldest:
                held[number][version] += 1
    return _Content({number: (live[number], dict(held[number])) for number in live.keys() | held.keys()}, places)


def _made_again(tier: LmdbColdTier) -> _Content:
    snapshot = tier._file.snapshot
    rows = RowMap(tier._file.tables)
    rows.enter(snapshot, stored_segments(snapshot), MAX_VERSION, tier.versions)
    return _content(rows)


def _opened(path: Path, **changes: Any) -> LmdbColdTier:
    tier = open_tier(path, slack=1.05, **changes)
    for table, layout in _SHAPES.items():
        tier.add_table(table, layout, _NUM_ROWS)
    return tier


@pytest.fixture(params=["narrow", "wide"])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    if request.param == "wide":
        widen_places(monkeypatch)
    monkeypatch.setattr(segments, "_PART_SEGMENTS", 7)
    return 8 if request.param == "wide" else 4


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_a_map_is_what_its_definition_says(tmp_path: Path, width: int, keep: int, late: bool) -> None:
    """Made in the order of the file, of rows moved by cleaning, rolled back, and written late for a version under way.

    The writer's own may lead to another copy of a row, as cleaning has moved it, and hold more rows that were written
    late.
    """
    generator = np.random.default_rng(keep)

    def write(tier: LmdbColdTier, epoch: int) -> None:
        table = int(generator.integers(3))
        rows = generator.choice(_NUM_ROWS, int(generator.integers(1, 700)), replace=False)
        write_rows(tier, _SHAPES[table], keys_of(table, rows), epoch, epoch=epoch)

    with closing(_opened(tmp_path)) as tier:
        for turn in range(16):
            version = tier.last_version + 1
            for epoch in (version, version + 1, version) if late else (version, version):
                write(tier, epoch)
            tier.commit(b"", version, keep=keep)
            if turn % 5 == 4:
                tier.rollback(tier.versions[0])
            rows, again = tier._file.make_map(), _made_again(tier)
            assert again == _by_definition(tier)
            assert again.places.keys() == _places(rows).keys()
        assert tier.counters().rows_moved > 0
        assert rows.places.itemsize == width
        assert _places(rows.copied()) == _places(rows.with_table(3, WIDE, 10)) == _places(rows)
        if late:
            tier.rollback(tier.version)
        again = _by_definition(tier)
    with closing(_opened(tmp_path)) as tier:
        assert _content(tier._file.make_map()) == again


def test_each_index_is_read_once_however_the_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    read = segments._read
    monkeypatch.setattr(segments, "_read", lambda *all_: looked_at.extend(all_[4]["number"].tolist()) or read(*all_))
    with closing(_opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys_of(0, np.arange(_NUM_ROWS)), 1)
        commit(tier, b"")
        numbers = stored_segments(tier._file.snapshot)["number"].tolist()
    for readonly in (True, False):
        looked_at.clear()
        with closing(_opened(tmp_path, readonly=readonly)) as tier:
            assert looked_at == []
            check_rows(tier, WIDE, keys_of(0, np.arange(_NUM_ROWS)), 1)
            if not readonly:
                write_rows(tier, WIDE, keys_of(2, [1]), 2)
                commit(tier, b"")
            assert sorted(looked_at) == numbers


@pytest.mark.parametrize("num_rows", [2**34, 2**40])
def test_a_table_of_any_size_takes_memory_for_what_it_has(tmp_path: Path, num_rows: int) -> None:
    keys = keys_of(0, [num_rows - 9, num_rows - 2, num_rows - 1])
    with closing(open_tier(tmp_path)) as tier:
        tier.add_table(0, WIDE, num_rows)
        write_rows(tier, WIDE, keys, 1)
        tier.add_table(1, WIDE, 10)
        commit(tier, b"")
        check_rows(tier, WIDE, keys, 1)
        assert tier.verify().rows == 3
        assert tier.map_bytes >= 4 * num_rows
        with tier.lease() as (_, rows):
            copied = rows.copied()
            assert np.concatenate(list(copied.stored_rows(0))).tolist() == keys.tolist()
            assert copied.differing(rows).tolist() == []


def test_memory_that_the_system_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(places, "zeros", refuse)
    with pytest.raises(BudgetError, match=r"refuses 64\.0 GiB .* map of 17,179,869,184 rows .*overcommit_memory is 2"):
        places.new_places(2**34)


_SCATTERED = textwrap.dedent(
    """
    import sys, tierstore, torch

    def private_mib():
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("Private")) / 1024

    def touch(store):
        store["t"].write(ids, torch.ones(len(ids), 4))
        store.commit()

    ids = torch.randint(10**9, (3000,), generator=torch.Generator().manual_seed(0))
    with tierstore.open(sys.argv[1], ddr="8MiB") as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=10**9, embedding_dim=4))
        store["t"].write(ids[:1], torch.ones(1, 4))
        store.commit()
        before = private_mib()
        touch(store)
        store.create_table(tierstore.TableConfig(name="other", num_embeddings=10**9, embedding_dim=4))
        trained = private_mib() - before
    with tierstore.open(sys.argv[1], ddr="8MiB") as store:
        touch(store)
        opened = private_mib() - before
    print(int(trained), int(opened))
    """
)


def test_scattered_rows_of_a_huge_table_take_little_memory(tmp_path: Path) -> None:
    """A page of 4 KiB for each of 3,000 rows, 12 MiB, and what the store itself takes; by huge pages it is 2.7 GiB."""
    command = [sys.executable, "-c", _SCATTERED, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    trained, opened = map(int, done.stdout.split())
    assert max(trained, opened) < 100

"""The walk over LMDB's pages, against what LMDB itself lists; and over damaged pages."""

import struct
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tierstore.io.btree import NO_ROOT, WalkStatus, list_entries, new_entries, parse_meta
from tierstore.io.files import open_environment
from tierstore.io.mapped import FileMap
from tierstore.io.snapshot import Snapshot
from tierstore.kernels.jit import JIT_ENABLED

pytestmark = pytest.mark.kernel

ZERO = np.zeros(1, np.uint64)
NUM_KEYS = 4000 if JIT_ENABLED else 600
BIG, SMALL = bytes(4080), b"small"


def _keys(count: int, seed: int = 0) -> "list[tuple[int, int]]":
    generator = np.random.default_rng(seed)
    pairs = {(int(a), int(b)) for a, b in generator.integers(0, [1 << 20, 4], (count, 2))}
    return sorted(pairs | {(2**64 - 1, 0), (2**64 - 1, 1), (0, 0)})


def _pack(first: int, second: int) -> bytes:
    return struct.pack(">QQ", first, second)


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    """An environment of many pages, changed many times, its map and its keys."""
    path = tmp_path / "tree.lmdb"
    environment = open_environment(path, 1 << 28)
    keys = _keys(NUM_KEYS)
    generator = np.random.default_rng(1)
    for part in np.array_split(generator.permutation(len(keys)), 5):
        with environment.begin(write=True) as txn:
            for i in part.tolist():
                txn.put(_pack(*keys[i]), BIG if i % 3 else SMALL)
    gone = set(generator.choice(len(keys), len(keys) // 3, replace=False).tolist())
    with environment.begin(write=True) as txn:
        for i in gone:
            txn.delete(_pack(*keys[i]))
    file_map = FileMap(path, 1 << 28)
    yield environment, path, file_map, [key for i, key in enumerate(keys) if i not in gone]
    environment.close()
    file_map.close()


def _listed(environment: "lmdb.Environment") -> "list[tuple[int, int, int]]":
    with environment.begin() as txn:
        return [
            (int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big"), len(value)) for key, value in txn.cursor()
        ]


def test_the_walk_lists_what_lmdb_lists(tree: Any) -> None:
    environment, path, file_map, keys = tree
    snapshot = Snapshot(path, file_map, 4096)
    found = []
    for entries, count in snapshot.walk():
        columns = (entries.kinds, entries.numbers, entries.sizes)
        found += list(zip(*(column[:count].tolist() for column in columns), strict=True))
        for page, size in zip(entries.pages[:count].tolist(), entries.sizes[:count].tolist(), strict=True):
            assert (page == 0) == (size == len(SMALL))
            assert page == 0 or int(file_map.words[page * 512]) == page
    assert found == _listed(environment)
    assert [key[:2] for key in found] == keys
    assert snapshot.meta.main_entries == len(found)
    snapshot.check_free_pages()
    snapshot.close()


@pytest.mark.parametrize("capacity", [2, 7, 118, 100_000])
def test_a_walk_in_chunks_is_the_whole_walk(tree: Any, capacity: int) -> None:
    _environment, path, file_map, keys = tree
    snapshot = Snapshot(path, file_map, 4096)
    meta = snapshot.meta
    entries, result = new_entries(capacity), np.zeros(3, np.int64)
    found: list[tuple[int, int]] = []
    first, second = np.uint64(0), np.uint64(0)
    while True:
        place = (meta.page_bytes // 2, snapshot.limit_pages(), meta.main_root, meta.main_depth)
        list_entries(
            file_map.halves, file_map.address, *place, np.array([first]), np.array([second]), capacity, entries, result
        )
        assert result[1] in (WalkStatus.DONE, WalkStatus.FULL)
        count = int(result[0])
        found += zip(entries.kinds[:count].tolist(), entries.numbers[:count].tolist(), strict=True)
        if result[1] == WalkStatus.DONE:
            break
        assert count == capacity
        first, second = entries.kinds[count - 1], entries.numbers[count - 1] + np.uint64(1)
    assert found == keys
    snapshot.close()


def test_seek_finds_the_first_key_not_before(tree: Any) -> None:
    _environment, path, file_map, keys = tree
    snapshot = Snapshot(path, file_map, 4096)
    targets = sorted(set(_keys(NUM_KEYS // 4, seed=9)) | set(keys[::7]) | {(2**64 - 1, 2**64 - 1)})
    entries = snapshot.seek(
        np.array([key for key, _ in targets], np.uint64), np.array([epoch for _, epoch in targets], np.uint64)
    )
    for i, target in enumerate(targets):
        expected = next((key for key in keys if key >= target), (2**64 - 1, 2**64 - 1))
        assert (int(entries.kinds[i]), int(entries.numbers[i])) == expected
    snapshot.close()


def test_damaged_pages_end_in_a_status(tree: Any, tmp_path: Path) -> None:
    """Any byte of the tree, changed to anything, gives an answer: never a crash, never a wild read."""
    _environment, path, file_map, _ = tree
    snapshot = Snapshot(path, file_map, 4096)
    meta, limit = snapshot.meta, snapshot.limit_pages()
    image = np.array(file_map.words[: limit * 512])
    snapshot.close()
    halves = image.view(np.uint16)
    tree_pages = [
        page for page in range(2, limit) if int(halves[page * 2048 + 5]) & 3 and int(image[page * 512]) == page
    ]
    assert len(tree_pages) > 5
    generator = np.random.default_rng(3)
    entries, result = new_entries(NUM_KEYS + 10), np.zeros(3, np.int64)
    seen = set()
    whole = meta.main_entries
    for _ in range(2000 if JIT_ENABLED else 250):
        byte = int(generator.choice(tree_pages)) * 4096 + int(
            generator.choice([generator.integers(0, 60), generator.integers(0, 4096)])
        )
        before = image.view(np.uint8)[byte]
        image.view(np.uint8)[byte] = generator.integers(0, 256)
        place = (2048, limit, meta.main_root, meta.main_depth)
        list_entries(halves, 0, *place, ZERO, ZERO, len(entries.pages), entries, result)
        seen.add(WalkStatus(int(result[1])))
        assert result[0] <= whole
        first = np.array([5, 1 << 19], np.uint64)
        list_entries(halves, 0, *place, first, first, 1, entries, result)
        assert WalkStatus(int(result[1])) is not None
        image.view(np.uint8)[byte] = before
    assert {WalkStatus.DONE, WalkStatus.BAD_PAGE, WalkStatus.BAD_NODE} <= seen
    list_entries(halves, 0, *place, ZERO, ZERO, len(entries.pages), entries, result)
    assert (result[0], result[1]) == (whole, 0)


def test_trees_in_circles_end(tree: Any) -> None:
    _environment, path, file_map, _ = tree
    snapshot = Snapshot(path, file_map, 4096)
    meta, limit = snapshot.meta, snapshot.limit_pages()
    snapshot.close()
    image = np.array(file_map.words[: limit * 512])
    halves = image.view(np.uint16)
    root = meta.main_root * 2048
    nodes = [int(halves[root + 8 + i]) // 2 + root for i in range((int(halves[root + 6]) - 16) // 2)]
    for node in nodes[1:]:
        halves[node : node + 3] = halves[nodes[0] : nodes[0] + 3]
    entries, result = new_entries(NUM_KEYS + 10), np.zeros(3, np.int64)
    place = (2048, limit, meta.main_root, meta.main_depth)
    list_entries(halves, 0, *place, ZERO, ZERO, len(entries.pages), entries, result)
    assert result[1] == WalkStatus.BAD_ORDER


def test_an_empty_tree(tmp_path: Path) -> None:
    path = tmp_path / "tree.lmdb"
    environment = open_environment(path, 1 << 28)
    file_map = FileMap(path, 1 << 28)
    snapshot = Snapshot(path, file_map, 4096)
    assert snapshot.is_empty
    assert list(snapshot.walk()) == []
    meta = parse_meta(path.read_bytes()[:152])
    assert not isinstance(meta, str)
    assert meta.main_root == NO_ROOT
    snapshot.close()
    environment.close()
    file_map.close()

"""The walk over LMDB's pages, against what LMDB itself lists; and over damaged pages."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from tierstore.io import btree
from tierstore.io.btree import STATUS, Entries, Pages, Root, WalkStatus, find_entries, list_tree, new_walk
from tierstore.io.files import open_environment
from tierstore.io.mapped import FileMap
from tierstore.io.snapshot import Snapshot
from tierstore.kernels.jit import JIT_ENABLED

pytestmark = pytest.mark.kernel

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


def test_the_walk_lists_what_lmdb_lists(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, path, file_map, keys = tree
    snapshot = Snapshot(path, file_map, 4096)
    found = snapshot.walk()
    assert found[["kind", "number", "size"]].tolist() == _listed(environment)
    assert found[["kind", "number"]].tolist() == keys
    assert ((found["page"] == 0) == (found["size"] == len(SMALL))).all()
    big = found["page"][found["page"] > 0]
    assert np.array_equal(file_map.words[big * 512], big.astype(np.uint64))
    assert snapshot.meta.main.entries == len(found)
    for capacity in (100_000, 118, 7, 2):
        monkeypatch.setattr(btree, "_CHUNK_ENTRIES", capacity)
        for first in (0, 1, keys[len(keys) // 2][0], keys[-1][0], 2**64 - 1):
            assert np.array_equal(snapshot.walk(first), found[found["kind"] >= first])
    snapshot.check_free_pages()
    snapshot.close()


def test_seek_finds_what_is_there(tree: Any) -> None:
    _environment, path, file_map, keys = tree
    snapshot = Snapshot(path, file_map, 4096)
    targets = sorted(set(_keys(NUM_KEYS // 4, seed=9)) | set(keys[::7]) | {(2**64 - 1, 2**64 - 1)})
    found = snapshot.seek(*np.array(targets, np.uint64).T.copy())
    assert [size >= 0 for size in found["size"].tolist()] == [target in set(keys) for target in targets]
    listed = {(entry["kind"], entry["number"]): entry for entry in snapshot.walk()}
    assert all(entry == listed[target] for target, entry in zip(targets, found, strict=True) if target in listed)
    snapshot.close()


class Image(NamedTuple):
    """The tree's file in memory, to be damaged."""

    bytes: NDArray[np.uint8]
    pages: Pages
    root: Root

    def walk(self, *, tolerant: bool = False) -> tuple[Entries, WalkStatus]:
        used = np.zeros((self.pages.limit >> 6) + 1, np.uint64)
        walk = new_walk(2048, used)
        found = list_tree(self.pages, self.root, walk, tolerant=tolerant)
        return found, WalkStatus(int(walk.result[STATUS]))

    def seek(self, key: int) -> tuple[Entries, WalkStatus]:
        walk, wanted = new_walk(2048), np.array([key], np.uint64)
        found = find_entries(self.pages, self.root, wanted, wanted, walk)
        return found, WalkStatus(int(walk.result[STATUS]))


@pytest.fixture
def image(tree: Any) -> Image:
    _environment, path, file_map, _ = tree
    snapshot = Snapshot(path, file_map, 4096)
    words, root = np.array(file_map.words[: snapshot.limit_pages() * 512]), snapshot.meta.main
    snapshot.close()
    return Image(words.view(np.uint8), Pages(words.view(np.uint16), 2048, len(words) // 512, 0), root)


def test_damaged_pages_end_in_a_status(image: Image) -> None:
    """Any byte of the tree, changed to anything, gives an answer: never a crash, never a wild read. A tolerant walk
    loses no more than what lies below the page."""
    headers = image.bytes.reshape(-1, 4096)
    is_tree = (headers[:, 10] & 3 > 0) & (headers[:, :8].view(np.uint64)[:, 0] == np.arange(len(headers)))
    tree_pages = np.flatnonzero(is_tree)[1:]
    leaves = {page for page in tree_pages.tolist() if headers[page, 10] & 2}
    assert len(tree_pages) > 5
    generator, seen = np.random.default_rng(3), set()
    whole, _ = image.walk()
    for _ in range(2000 if JIT_ENABLED else 250):
        in_page = generator.choice([generator.integers(0, 60), generator.integers(0, 4096)])
        byte = int(generator.choice(tree_pages)) * 4096 + int(in_page)
        before = image.bytes[byte]
        image.bytes[byte] = generator.integers(0, 256)
        found, status = image.walk()
        seen.add(status)
        assert status == WalkStatus.DONE or len(found) < len(whole)
        big = found[found["page"] > 0]
        assert (big["page"] * 4096 + 16 + big["size"] <= len(image.bytes)).all()
        rest, status = image.walk(tolerant=True)
        assert status == WalkStatus.DONE
        lost = np.setdiff1d(whole["page"], rest["page"])
        assert len(lost) <= (4096 // 24 if byte // 4096 in leaves else len(whole))
        for key in (5, 1 << 19):
            image.seek(key)
        image.bytes[byte] = before
    assert {WalkStatus.DONE, WalkStatus.BAD_PAGE, WalkStatus.BAD_NODE, WalkStatus.BAD_ORDER} <= seen
    assert np.array_equal(image.walk()[0], whole)


def test_trees_in_circles_end(image: Image) -> None:
    halves, root = image.pages.halves, image.root.page * 2048
    nodes = [int(halves[root + 8 + i]) // 2 + root for i in range((int(halves[root + 6]) - 16) // 2)]
    for node in nodes[1:]:
        halves[node : node + 3] = halves[nodes[0] : nodes[0] + 3]
    assert image.walk()[1] == WalkStatus.USED_TWICE
    assert image.walk(tolerant=True)[1] == WalkStatus.DONE
    walk = new_walk(2048)
    list_tree(image.pages, image.root, walk)
    assert walk.result[STATUS] == WalkStatus.BAD_ORDER

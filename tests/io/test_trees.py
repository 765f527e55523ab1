"""LMDB's trees as we read them, against what LMDB itself lists and leaves behind; and with any byte changed."""

import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from numpy.typing import NDArray

from tierstore.io import btree
from tierstore.io.btree import Pages, WalkStatus
from tierstore.io.files import open_environment
from tierstore.io.mapped import FileMap
from tierstore.io.meta import META_READ_BYTES, Meta, sound_metas
from tierstore.io.snapshot import Snapshot, check_page_use
from tierstore.kernels.jit import JIT_ENABLED

pytestmark = pytest.mark.kernel

PAGE = 4096
LAST_KEY = b"\xff" * 16


def _environment(path: Path) -> "lmdb.Environment":
    environment = open_environment(path, 1 << 28)
    with environment.begin(write=True) as txn:
        txn.put(LAST_KEY, b"a store is never empty")
    return environment


def _some_key(generator: np.random.Generator) -> bytes:
    first, second = generator.integers(0, [900, 3])
    return struct.pack(">QQ", first, second)


def _some_transaction(environment: "lmdb.Environment", generator: np.random.Generator, changes: int) -> None:
    """Puts and deletes; a key's value always has the same size, as in a store."""
    with environment.begin(write=True) as txn:
        for _ in range(changes):
            key = _some_key(generator)
            if generator.random() < 0.55:
                txn.put(key, bytes((4080, 4080, 8176, 10, 1000, 50_000)[(key[6] * 3 + key[7] + key[15]) % 6]))
            else:
                txn.delete(key)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of many pages, changed many times, with a free list on overflow pages."""
    generator, path = np.random.default_rng(1), tmp_path_factory.mktemp("tree") / "tree.lmdb"
    with closing(_environment(path)) as environment:
        kept = environment.begin()
        # What a transaction frees goes into one record: here so much that it takes overflow pages.
        with environment.begin(write=True) as txn:
            for key in range(1000, 2200):
                txn.put(struct.pack(">QQ", key, 5), bytes(4080))
        with environment.begin(write=True) as txn:
            for key in range(1000, 2200, 2):
                txn.delete(struct.pack(">QQ", key, 5))
        for _ in range(6):
            _some_transaction(environment, generator, 200 if JIT_ENABLED else 100)
        kept.abort()
    return path


@pytest.fixture
def tree(path: Path) -> Iterator[Any]:
    """LMDB's view of it, and ours."""
    with ExitStack() as stack:
        environment = stack.enter_context(closing(open_environment(path, 1 << 28)))
        file_map = stack.enter_context(closing(FileMap(path, 1 << 28)))
        yield environment, stack.enter_context(closing(Snapshot(path, file_map, PAGE)))


def test_the_walk_lists_what_lmdb_lists(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, snapshot = tree
    found = snapshot.walk()
    with environment.begin() as txn:
        listed = [(*struct.unpack(">QQ", key), len(value)) for key, value in txn.cursor()]
    assert found[["kind", "number", "size"]].tolist() == listed
    assert ((found["page"] == 0) == (found["size"] < 4000)).all()
    big = found["page"][found["page"] > 0]
    assert np.array_equal(snapshot.file_map.words[big * 512], big.astype(np.uint64))
    assert snapshot.meta.main.entries == len(found)
    for capacity in (100_000, 118, 7, 2):
        monkeypatch.setattr(btree, "_CHUNK_ENTRIES", capacity)
        for first in (0, 1, listed[len(listed) // 2][0], 2**64 - 1):
            assert np.array_equal(snapshot.walk(first), found[found["kind"] >= first])


def test_seek_finds_what_is_there(tree: Any) -> None:
    _, snapshot = tree
    listed = {(entry["kind"], entry["number"]): entry for entry in snapshot.walk()}
    targets = [(first, second) for first in range(0, 1000, 3) for second in range(4)] + [(2**64 - 1, 2**64 - 1)]
    found = snapshot.seek(*np.array(targets, np.uint64).T.copy())
    assert [size >= 0 for size in found["size"].tolist()] == [target in listed for target in targets]
    assert all(entry == listed[target] for target, entry in zip(targets, found, strict=True) if target in listed)


def test_whatever_lmdb_leaves_behind_passes(tmp_path: Path) -> None:
    path = tmp_path / "tree.lmdb"
    environment = _environment(path)
    file_map = FileMap(path, 1 << 28)
    generator = np.random.default_rng(5)
    readers: list[lmdb.Transaction[memoryview]] = []
    most = 0
    for turn in range(300 if JIT_ENABLED else 12):
        _some_transaction(environment, generator, int(generator.choice([1, 4, 40, 400])))
        with environment.begin(write=True) as given_up:
            given_up.put(_some_key(generator), bytes(5000))
            given_up.abort()
        if turn % 7 == 0:
            readers.append(environment.begin(buffers=True))
        if turn % 20 == 19:
            readers.pop(int(generator.integers(len(readers)))).abort()
        with closing(Snapshot(path, file_map, PAGE)) as snapshot:
            snapshot.check_free_pages()
            trees = sum(sum(root[1:4]) for root in (snapshot.meta.main, snapshot.meta.free))
            most = max(most, snapshot.meta.last_page - 1 - trees)
    assert most > (1000 if JIT_ENABLED else 10)
    for reader in readers:
        reader.abort()
    environment.close()
    file_map.close()


class Image:
    """The file in memory, and the places of what it is made of."""

    def __init__(self, path: Path) -> None:
        self.words: NDArray[np.uint64] = np.fromfile(path, np.uint64)
        self.bytes = self.words.view(np.uint8)
        self.meta: Meta = sound_metas(*(self.bytes[at:][:META_READ_BYTES].tobytes() for at in (0, PAGE)))[0]
        self.pages = Pages(self.words.view(np.uint16), PAGE // 2, len(self.bytes) // PAGE, 0)

    def status(self) -> int:
        return check_page_use(self.pages, self.meta)[0]

    def number(self, at: int, num_bytes: int) -> int:
        return int.from_bytes(self.bytes[at : at + num_bytes].tobytes(), "little")

    def nodes(self, page: int) -> list[int]:
        count = (self.number(page * PAGE + 12, 2) - 16) // 2
        return [page * PAGE + self.number(page * PAGE + 16 + 2 * i, 2) for i in range(count)]

    def leaves(self, root: int, depth: int) -> Iterator[int]:
        if depth == 1:
            yield root
        else:
            for node in self.nodes(root):
                yield from self.leaves(self.number(node, 6), depth - 1)

    def free_records(self) -> Iterator[tuple[int, int, int]]:
        """Of each record of the free list: its node, where its list starts, its size."""
        for leaf in self.leaves(self.meta.free.page, self.meta.free.depth):
            for node in self.nodes(leaf):
                is_large = self.number(node + 4, 2) == 1
                start = self.number(node + 16, 8) * PAGE + 16 if is_large else node + 16
                yield node, start, self.number(node, 4)


@pytest.fixture(scope="module")
def sound(path: Path) -> Image:
    image = Image(path)
    assert image.status() == WalkStatus.DONE
    assert any(size > PAGE for _, _, size in image.free_records()), "no list takes overflow pages"
    assert image.meta.main.depth > 1
    return image


def test_every_changed_byte_of_the_free_list_is_seen(sound: Image) -> None:
    places: list[int] = []
    for node, start, _ in sound.free_records():
        places += range(node, node + 16)
        places += range(start, start + 8 * (sound.number(start, 8) + 1))
    for leaf in sound.leaves(sound.meta.free.page, sound.meta.free.depth):
        places += [*range(leaf * PAGE, leaf * PAGE + 8), *range(leaf * PAGE + 12, leaf * PAGE + 18)]
    places = places[:: 1 if JIT_ENABLED else 61]
    unseen = []
    for i, place in enumerate(places):
        before = sound.bytes[place]
        sound.bytes[place] ^= np.uint8(1 << (i % 8))
        if sound.status() == WalkStatus.DONE:
            unseen.append(place)
        sound.bytes[place] = before
    assert len(places) > 100
    assert not unseen
    assert sound.status() == WalkStatus.DONE


def test_what_the_meta_page_says_must_be_so(sound: Image) -> None:
    meta = sound.meta
    wrong = [meta._replace(last_page=meta.last_page - 1), meta._replace(txn_id=meta.txn_id - 1)]
    for tree in ("main", "free"):
        root = getattr(meta, tree)
        wrong += [
            meta._replace(**{tree: root._replace(**{field: value - 1})}) for field, value in root._asdict().items()
        ]
    for sound.meta in wrong:
        assert sound.status() != WalkStatus.DONE, sound.meta
    sound.meta = meta

"""Stores with a long history, what each version of them holds, and what can be proven of them after damage."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.meta import Meta, parse_meta
from tierstore.layout import KEY_ROW_BITS, RowLayout
from tierstore.store.manifest import Manifest
from tierstore.store.version import NO_LINEAGE, TableState, pack

PAGE = 4096
WORDS = PAGE // 8
Words = NDArray[np.uint64]
Rows = dict[int, bytes]  # weights and state of rows, by key

TABLES = [
    tierstore.TableConfig(
        name="wide", num_embeddings=700, embedding_dim=64, optimizer=tierstore.optim.RowWiseAdagrad(lr=0.1)
    ),
    tierstore.TableConfig(name="narrow", num_embeddings=900, embedding_dim=5, dtype="float16"),
    tierstore.TableConfig(
        name="also wide", num_embeddings=300, embedding_dim=64, optimizer=tierstore.optim.RowWiseAdagrad(lr=0.1)
    ),
    tierstore.TableConfig(name="long", num_embeddings=40, embedding_dim=1500),
]
"""Rows of three layouts, one of blocks of several pages; two tables share one."""
LAYOUTS = [config.layout(PAGE) for config in TABLES]


def layout_of(key: int) -> RowLayout:
    return LAYOUTS[key >> KEY_ROW_BITS]


def open_tier(folder: Path, **settings: Any) -> LmdbColdTier:
    tier = LmdbColdTier(folder, store_id=bytes.fromhex(Manifest.read(folder).store_id), **settings)
    tier.set_tables({index: (LAYOUTS[index], config.num_embeddings) for index, config in enumerate(TABLES)})
    return tier


def rows_of(folder: Path) -> Rows:
    found: Rows = {}
    tier = open_tier(folder, readonly=True)
    for index, (layout, config) in enumerate(zip(LAYOUTS, TABLES, strict=True)):
        count = config.num_embeddings
        weights, state = (np.empty((count, words), np.uint64) for words in (layout.weight_words, layout.state_words))
        present = np.empty(count, np.bool_)
        keys = np.arange(count) | index << KEY_ROW_BITS
        tier.read(keys, np.arange(count, dtype=np.int32), weights, state, present)
        found |= {int(keys[i]): weights[i].tobytes() + state[i].tobytes() for i in np.flatnonzero(present)}
    tier.close()
    return found


class History:
    """A store that was written through its cold tier in any order: versions ahead of their time and late for it, kept
    ones, some gone back to, processes that ended. Rows of no version are left at the end.
    """

    def __init__(self, folder: Path, seed: int, *, turns: int, slack: float, sizes: list[int]) -> None:
        with tierstore.open(folder, ddr="1MiB", threads=1) as store:
            for config in TABLES:
                store.create_table(config)
        self._random, self._sizes = np.random.default_rng(seed), sizes
        self._epochs: dict[int, Rows] = {}
        tier = open_tier(folder, readonly=False, slack=slack)
        self._write(tier)
        self._commit(tier)
        for turn in range(turns):
            action = self._random.choice(["write"] * 16 + ["commit"] * 4 + ["rollback", "reopen"])
            if action == "write" or turn > turns - 4:
                self._write(tier)
            elif action == "commit":
                self._commit(tier)
            elif action == "rollback":
                tier.rollback(int(self._random.choice(tier.versions)))
                self._drop(tier)
            else:
                tier.close()
                tier = open_tier(folder, readonly=False, slack=slack)
                self._drop(tier)
        self.version = tier.version
        self._drop(tier)
        self.rows = {key: row for _, rows in sorted(self._epochs.items()) for key, row in rows.items()}
        self.files_open = {path.name: path.read_bytes() for path in folder.iterdir()}
        tier.close()
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def _write(self, tier: LmdbColdTier) -> None:
        table = int(self._random.integers(len(TABLES)))
        layout, num_rows = LAYOUTS[table], TABLES[table].num_embeddings
        count = int(min(num_rows, self._random.choice(self._sizes)))
        keys = self._random.choice(num_rows, count, replace=False) | table << KEY_ROW_BITS
        weights = self._random.integers(0, 2**64, (count, layout.weight_words), np.uint64)
        state = self._random.integers(0, 2**64, (count, layout.state_words), np.uint64)
        epoch = tier.last_version + int(self._random.choice([1, 1, 1, 2]))
        tier.write(keys, np.arange(count, dtype=np.int32), weights, state, epoch=epoch)
        for i, key in enumerate(keys.tolist()):
            self._epochs.setdefault(epoch, {})[key] = weights[i].tobytes() + state[i].tobytes()

    def _commit(self, tier: LmdbColdTier) -> None:
        version = tier.last_version + 1
        tables = {config.name: TableState(version, 0.5) for config in TABLES}
        payload = pack(tables, extra_of(version), tensors_of(version), NO_LINEAGE.following(0))
        tier.commit(payload, version, keep=int(self._random.choice([1, 1, 2, 3])))

    def _drop(self, tier: LmdbColdTier) -> None:
        self._epochs = {epoch: rows for epoch, rows in self._epochs.items() if epoch <= tier.version}


def extra_of(version: int) -> dict[str, Any]:
    return {"step": version}


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    return {"dense": torch.full((3000,), float(version))}


class Segment(NamedTuple):
    number: int
    newest: int
    is_mixed: bool
    layout: RowLayout
    start: int
    stop: int  # of all its pages
    index_stop: int  # where its index ends
    keys: list[int]  # of its rows
    pairs: list[int]
    rows: list[int]  # where the key and the words of each row begin
    blocks: list[int]  # where each block begins


class Expected(NamedTuple):
    saved: Rows  # rows by key, words included
    lost: set[int]  # keys
    missing: int  # segments of which not all rows are known
    unproven: int  # how many of the saved may be older


class Image:
    """What is where in a sound row file, found without the product's walk, and what is left of it after damage."""

    def __init__(self, data: bytes, version: int) -> None:
        self.version = version
        self.data = data
        self.words = np.frombuffer(self.data, np.uint64)
        metas = [parse_meta(self.data[at : at + 152]) for at in (0, PAGE)]
        self.meta = max((meta for meta in metas if isinstance(meta, Meta)), key=lambda meta: meta.txn_id)
        pages = list(self._pages(self.meta.main.page, self.meta.main.depth))
        self.leaves = [page for page, depth in pages if depth == 1]
        self.branches = [page for page, depth in pages if depth > 1]
        free = self._pages(self.meta.free.page, self.meta.free.depth)
        self.free_leaves = [page for page, depth in free if depth == 1]
        self.nodes = [
            (self._big(node + 8), self._big(node + 16), node) for page in self.leaves for node in self.nodes_of(page)
        ]
        self.segments = [self._segment(self._little(node + 24, 8)) for kind, _, node in self.nodes if kind == 0]

    def _big(self, at: int) -> int:
        return int.from_bytes(self.data[at : at + 8], "big")

    def _little(self, at: int, size: int) -> int:
        return int.from_bytes(self.data[at : at + size], "little")

    def nodes_of(self, page: int) -> list[int]:
        at = page * PAGE
        return [at + self._little(at + 16 + 2 * i, 2) for i in range((self._little(at + 12, 2) - 16) // 2)]

    def _pages(self, page: int, depth: int) -> Iterator[tuple[int, int]]:
        yield page, depth
        for node in self.nodes_of(page) if depth > 1 else ():
            yield from self._pages(self._little(node, 6), depth - 1)

    def _segment(self, page: int) -> Segment:
        start = page * WORDS
        _, _, number, count, newest, _ = self.words[start + 2 : start + 8].tolist()
        num, is_mixed = count & 0xFFFF_FFFF, bool(count >> 32)
        keys = self.words[start + 8 : start + 8 + num].astype(int).tolist()
        layout, index_stop = layout_of(keys[0]), start + 8 + num * (1 + is_mixed)
        words, per_block = layout.weight_words + layout.state_words, layout.rows_per_block
        block_words, first = layout.pages_per_block * WORDS, -(-index_stop // WORDS) * WORDS
        blocks = [first + block * block_words for block in range(-(-num // per_block))]
        pairs, rows = [], []
        for i in range(num):
            at, place = blocks[i // per_block] + 2, i % per_block
            apart = layout.pages_per_block == 1
            pairs.append(at + 2 * place if apart else at + (words + 2) * place)
            rows.append(at + 2 * per_block + words * place if apart else pairs[-1] + 2)
        stop = blocks[-1] + block_words
        return Segment(number, newest, is_mixed, layout, start, stop, index_stop, keys, pairs, rows, blocks)

    def below(self, page: int) -> list[Segment]:
        if page in self.branches:
            return [each for node in self.nodes_of(page) for each in self.below(self._little(node, 6))]
        own = [node for kind, _, node in self.nodes if kind == 0 and node // PAGE == page]
        return [self._segment(self._little(node + 24, 8)) for node in own]

    def expected(self, damaged: bytes, *, stale_ok: bool = False, gone: Sequence[Segment] = ()) -> Expected:
        """What can be saved if no more than segments are damaged, or of others than some."""
        now = np.frombuffer(damaged[: len(damaged) // PAGE * PAGE], np.uint64)
        entries: list[tuple[int, int, int, bytes | None]] = []
        """Newest epoch and number of the segment, key, row if it is sound."""
        unknown = dict.fromkeys(LAYOUTS, (0, 0))
        missing = 0
        left = {each.number for each in self.segments} - {each.number for each in gone}
        for each in (each for each in self.segments if each.number in left):
            found, is_known = self._entries(each, now)
            entries += found
            newest = each.newest if found else self.version
            if not is_known and newest <= self.version:
                missing += 1
                for layout in [each.layout] if found else LAYOUTS:
                    unknown[layout] = max(unknown[layout], (newest, each.number))
        saved: Rows = {}
        lost: set[int] = set()
        unproven = 0
        for newest, number, key, row in sorted(entries, key=lambda entry: entry[:2], reverse=True):
            if newest <= self.version and key not in saved:
                is_certain = key not in lost and (newest, number) >= unknown[layout_of(key)]
                lost.add(key)
                if row is not None and (is_certain or stale_ok):
                    saved[key] = row
                    unproven += not is_certain
        return Expected(saved, lost - saved.keys(), missing, unproven)

    def _entries(self, segment: Segment, now: Words) -> tuple[list[tuple[int, int, int, bytes | None]], bool]:
        def same(start: int, stop: int) -> bool:
            return np.array_equal(self.words[start:stop], now[start:stop])

        words = segment.layout.weight_words + segment.layout.state_words
        rows = [
            now[row : row + words].tobytes() if same(pair, pair + 2) and same(row, row + words) else None
            for pair, row in zip(segment.pairs, segment.rows, strict=True)
        ]
        found = [(segment.newest, segment.number, key, row) for key, row in zip(segment.keys, rows, strict=True)]
        if same(segment.start, segment.index_stop):
            return found, True
        told, per_block = [], segment.layout.rows_per_block
        for block, start in enumerate(segment.blocks):
            own = slice(block * per_block, (block + 1) * per_block)
            if same(start, start + 2) and (block + 1 < len(segment.blocks) or self._ends(segment, start, own, now)):
                told += [entry for entry in found[own] if entry[3] is not None]
        return told, len(told) == len(found)

    def _ends(self, segment: Segment, start: int, own: slice, now: Words) -> bool:
        stride = 2 if segment.layout.pages_per_block == 1 else segment.layout.stored_row_words
        places = range(start + 2, start + 2 + stride * segment.layout.rows_per_block, stride)
        used = [i for i, pair in enumerate(places) if now[pair : pair + 2].any()]
        return bool(used) and used[-1] + 1 == len(segment.keys[own])

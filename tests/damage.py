"""Damage to a small store's files, and what comes of it: the right rows, an error of ours, or a failure.

A store is changed in one place, then opened, read whole and verified. Each change must end in the right rows or in an
error of ours that names the file, and what a read refuses, verify must report. Changes of the row file can be tried on
the cold tier alone. Others are tried on the whole store, which is also opened for writing, written to, committed and
opened again. All is tried in forked processes, so that a crash or a hang is seen.
"""

import contextlib
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

import tierstore
from tests.children import fork
from tierstore.errors import DamagedError, TierstoreError
from tierstore.io.lmdb import LmdbColdTier
from tierstore.layout import KEY_ROW_BITS
from tierstore.store.manifest import Manifest

FILES: Final = ("rows.lmdb", "manifest.json", "rows.anchor", "rows.lmdb-lock")
PAGE: Final = 4096
TIME_LIMIT_S: Final = 60  # for one change; what takes longer hangs
_DDR: Final = "1MiB"


Contents = dict[str, Any]
"""What a store shows, by a name in words."""


class Sample(NamedTuple):
    files: dict[str, bytes]
    expected: Contents


def contents_of(store: "tierstore.Store") -> Contents:
    found: Contents = {"version": store.version, "extra": store.extra}
    found |= {f"tensor {name}": tensor for name, tensor in store.tensors().items()}
    for name, table in store.tables.items():
        found[f"rows of {name}"] = table.read(torch.arange(table.config.num_embeddings))
    return found


def _differences(one: Contents, other: Contents) -> list[str]:
    def same(name: str) -> bool:
        first, second = one.get(name), other.get(name)
        are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
        return torch.equal(first, second) if are_tensors else first is second or first == second

    return [name for name in one.keys() | other.keys() if not same(name)]


class Case(NamedTuple):
    """One change: ``kind`` is "flip" (xor ``number`` into the byte at ``offset``), "cut", "zero", "swap" or "mix"."""

    kind: str
    file: str
    offset: int = 0
    number: int = 0

    def applied(self, files: dict[str, bytes], other: dict[str, bytes]) -> dict[str, bytes]:
        changed = dict(files)
        data = bytearray(files.get(self.file, b""))
        if self.kind == "flip":
            data[self.offset] ^= self.number
        elif self.kind == "cut":
            del data[self.offset :]
        elif self.kind == "zero":
            data[self.offset : self.offset + PAGE] = bytes(PAGE)
        elif self.kind == "swap":
            first, second = (slice(at, at + PAGE) for at in (self.offset, self.number))
            data[first], data[second] = data[second], data[first]
        elif self.kind == "missing":
            del changed[self.file]
            return changed
        elif self.kind == "mix":
            names = [name for bit, name in enumerate(FILES) if self.number >> bit & 1]
            return changed | {name: other[name] for name in names}
        changed[self.file] = bytes(data)
        return changed


class Outcome(NamedTuple):
    """What came of a change, for reading and, if that was tried, for writing; "right", the name of an error, or what
    went wrong."""

    case: Case
    read: str
    write: str = ""

    @property
    def failures(self) -> list[str]:
        return [each for each in (self.read, self.write) if each.startswith(("WRONG", "CRASH", "HANG"))]


Examine = Callable[[Case], Outcome]  # tries one change


def make_sample(folder: Path, seed: int) -> Sample:
    """Tables of three layouts, one of rows longer than a page, trained and committed twice; all rows change."""
    return _train(folder, seed, {"wide": 420, "narrow": 400, "long": 3}, {1: (1.0, 1.0)})


def make_aged(folder: Path, seed: int) -> Sample:
    """Smaller tables, with rows in all places they can be in: moved by cleaning together with others of another epoch,
    and kept for an earlier version."""
    return _train(folder, seed, {"wide": 56, "narrow": 600, "long": 4}, {1: (1.0, 0.5, 0.0, 0.5), 2: (0.3,)})


def _train(folder: Path, seed: int, sizes: dict[str, int], shares: dict[int, tuple[float, ...]]) -> Sample:
    """Tables of these sizes, and a commit for each share of their rows that is to change, by versions that are kept.
    The last two rows stay as they were first, absent, which must come back; the share 0 is the last but one."""
    generator = torch.Generator().manual_seed(seed)
    configs = {
        "wide": {"embedding_dim": 64, "optimizer": tierstore.optim.RowWiseAdagrad(lr=0.1)},
        "narrow": {"embedding_dim": 5, "optimizer": tierstore.optim.SGD(lr=0.1), "dtype": "float16"},
        "long": {"embedding_dim": 1500, "optimizer": tierstore.optim.SGD(lr=0.1)},
    }
    for keep, parts in shares.items():
        with tierstore.open(folder, ddr=_DDR, threads=1, keep=keep) as store:
            for name, fields in configs.items():
                if name not in store.tables:
                    store.create_table(tierstore.TableConfig(name=name, num_embeddings=sizes[name], **fields))  # type: ignore[arg-type]
            for share in parts:
                for name, count in sizes.items():
                    bag = tierstore.TieredEmbeddingBag(store[name], mode="sum")
                    ids = torch.randperm(count - 2, generator=generator)
                    ids = ids[: math.ceil(share * len(ids))] if share else torch.tensor([count - 2])
                    scale = torch.rand(1, generator=generator) + store.version + 1
                    (bag(ids, torch.arange(len(ids))) * scale).sum().backward()
                dense = torch.rand((3, 50), generator=generator)
                store.commit(extra={"step": store.version + 1, "seed": seed}, tensors={"dense": dense})
    with tierstore.open(folder, mode="r", ddr=_DDR, threads=1) as store:
        expected = contents_of(store)
    return Sample({name: (folder / name).read_bytes() for name in FILES}, expected)


def _put(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def whole_store(folder: Path, samples: Sequence[Sample]) -> Examine:
    def examine(case: Case) -> Outcome:
        _put(folder, case.applied(samples[0].files, samples[1].files))
        expected = [sample.expected for sample in samples]
        read, write = (_told(folder, mode, partial(_attempt, folder, mode, expected)) for mode in ("r", "w"))
        return Outcome(case, read, write)

    return examine


def row_file(folder: Path, samples: Sequence[Sample]) -> Examine:
    """Flips in the row file of the first sample are tried on the cold tier alone, which is much faster."""
    _put(folder, samples[0].files)
    manifest = Manifest.read(folder)
    with _tier(folder, manifest) as tier:
        expected = _content(tier, manifest)

    def attempt() -> str:
        with _tier(folder, manifest) as tier:
            try:
                found = _content(tier, manifest)
            except DamagedError as error:
                with contextlib.suppress(DamagedError):
                    tier.verify()
                    return f"WRONG: verify passes what a read refuses: {error}"
                raise
            if found != expected:
                return "WRONG rows"
            tier.verify()  # after the rows: a wrong row must not be read, whatever verify finds then
            return "right"

    def examine(case: Case) -> Outcome:
        assert case.kind == "flip"
        with (folder / case.file).open("r+b", buffering=0) as file:
            whole = samples[0].files[case.file][case.offset]
            os.pwrite(file.fileno(), bytes([whole ^ case.number]), case.offset)
            outcome = Outcome(case, _told(folder, "r", attempt))
            os.pwrite(file.fileno(), bytes([whole]), case.offset)
        return outcome

    return examine


@contextlib.contextmanager
def _tier(folder: Path, manifest: Manifest) -> Iterator[LmdbColdTier]:
    store_id = bytes.fromhex(manifest.store_id)
    with contextlib.closing(LmdbColdTier(folder, store_id=store_id, readonly=True)) as tier:
        tier.set_tables(manifest.shapes)
        yield tier


def _content(tier: LmdbColdTier, manifest: Manifest) -> list[Any]:
    found: list[Any] = [tier.version, tier.payload]
    for index, config in enumerate(manifest.tables):
        layout, count = config.layout(manifest.page_bytes), config.num_embeddings
        weights, state = (np.zeros((count, words), np.uint64) for words in (layout.weight_words, layout.state_words))
        present, slots = np.zeros(count, np.bool_), np.arange(count, dtype=np.int32)
        tier.read((index << KEY_ROW_BITS) + np.arange(count), slots, weights, state, present)
        found += [weights.tobytes(), state.tobytes(), present.tobytes()]
    return found


def _told(folder: Path, mode: str, attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except TierstoreError as error:
        named = str(folder) in str(error)
        return type(error).__name__ if named else f"WRONG {mode}: no file is named: {error!r}"
    except Exception as error:
        return f"WRONG {mode}: {error!r}"


def _attempt(folder: Path, mode: Any, expected: Sequence[Contents]) -> str:
    with tierstore.open(folder, mode=mode, ddr=_DDR, threads=1) as store:
        found = contents_of(store)
        # Of two stores' files either may be the one that is whole.
        differences = min((_differences(each, found) for each in expected), key=len)
        if differences:
            return f"WRONG {mode}: {', '.join(differences)}"
        store.verify()  # after the rows: a wrong row must not be read, whatever verify finds then
        return "right" if mode == "r" else _write_and_reopen(folder, store, found)


def _write_and_reopen(folder: Path, store: "tierstore.Store", before: Contents) -> str:
    after = before | {"version": before["version"] + 1}
    for name, table in store.tables.items():
        rows, ids = before[f"rows of {name}"].clone(), torch.arange(0, table.config.num_embeddings, 3)
        rows[ids] += 1
        table.write(ids, rows[ids])
        after[f"rows of {name}"] = rows
    store.commit(extra=store.extra, tensors=store.tensors())
    store.close()
    with tierstore.open(folder, mode="r", ddr=_DDR, threads=1) as store:
        differences = _differences(after, contents_of(store))
        store.verify()
    return f"WRONG after a commit: {', '.join(differences)}" if differences else "right"


def flips(sample: Sample, *, all_bits: bool, stride: int = 1, files: Sequence[str] = FILES) -> Iterator[Case]:
    for name in files:
        for offset in range(0, len(sample.files[name]), stride):
            yield Case("flip", name, offset, 0xFF if all_bits else 1 << offset % 8)


def page_damage(sample: Sample, seed: int = 0) -> Iterator[Case]:
    size = len(sample.files["rows.lmdb"])
    pages = range(0, size, PAGE)
    for offset in pages:
        yield Case("cut", "rows.lmdb", offset)
        yield Case("cut", "rows.lmdb", offset + 1000)
        yield Case("zero", "rows.lmdb", offset)
    generator = np.random.default_rng(seed)
    pairs = {(a, b) for a in pages for b in (0, PAGE, a + PAGE) if b < size and a != b}
    pairs |= {(int(a) * PAGE, int(b) * PAGE) for a, b in generator.integers(0, len(pages), (len(pages), 2)) if a != b}
    for first, second in sorted(pairs):
        yield Case("swap", "rows.lmdb", first, second)


def mixes(sample: Sample) -> Iterator[Case]:
    for number in range(1, 1 << len(FILES)):
        yield Case("mix", "", 0, number)
    for name, content in sample.files.items():
        yield Case("missing", name)
        for length in sorted({0, 1, len(content) // 2, max(0, len(content) - 1)}):
            yield Case("cut", name, length)


def sweep(
    cases: Sequence[Case],
    samples: Sequence[Sample],
    *,
    prepare: Callable[[Path, Sequence[Sample]], Examine] = whole_store,
) -> list[Outcome]:
    """Try each case in a forked process; one that dies is replaced."""
    outcomes: list[Outcome] = []
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as scratch:

        def try_rest(report: Callable[..., None]) -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            torch.set_num_threads(1)
            examine = prepare(Path(scratch) / "store", samples)
            for case in cases[len(outcomes) :]:
                signal.alarm(TIME_LIMIT_S)
                outcome = examine(case)
                report("tried", read=outcome.read, write=outcome.write)

        while len(outcomes) < len(cases):
            tried, status = fork(try_rest)
            for each in tried:
                outcomes.append(Outcome(cases[len(outcomes)], each["read"], each["write"]))
            assert status <= 0, "the process that tries changes failed"
            if status:
                what = "HANG" if status == -signal.SIGALRM else f"CRASH: {signal.Signals(-status).name}"
                outcomes.append(Outcome(cases[len(outcomes)], what))
    return outcomes

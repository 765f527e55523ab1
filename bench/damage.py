"""Does any damage to a store's files end in a wrong row, a crash or a hang?

A small store is changed in one place, then opened, read whole, verified, written to and opened again. Each change must
end in the right rows or in an error of ours that names the file. Changes: every byte of every file with one bit flipped
and with all bits flipped, the row file cut at every page, each page zeroed, pages swapped, files of two stores mixed,
files empty or missing. Each change is tried in a forked process, so that a crash or a hang is seen and counted.
"""

import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

import tierstore
from tierstore.errors import TierstoreError

from .common import Goal, Report, Run, Table, program

__all__ = [
    "Case",
    "Expected",
    "Outcome",
    "Sample",
    "examine",
    "flips",
    "make_sample",
    "mixes",
    "page_damage",
    "run",
    "sweep",
]

FILES: Final = ("rows.lmdb", "manifest.json", "rows.anchor", "writer.lock", "rows.lmdb-lock")
PAGE: Final = 4096
TIME_LIMIT_S: Final = 60
"""For one change; what takes longer hangs."""
_DDR: Final = "1MiB"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a store holds, read through its public interface."""

    version: int
    extra: dict[str, Any]
    tensors: dict[str, Tensor]
    rows: dict[str, Tensor]
    """Of each table, [num_embeddings, embedding_dim]."""

    @classmethod
    def of(cls, store: "tierstore.Store") -> "Expected":
        rows = {name: table.read(torch.arange(table.config.num_embeddings)) for name, table in store.tables.items()}
        return cls(version=store.version, extra=store.extra, tensors=store.tensors(), rows=rows)

    def differences(self, other: "Expected") -> list[str]:
        """What the other has otherwise, in words."""
        found = [name for name in ("version", "extra") if getattr(self, name) != getattr(other, name)]
        for what in ("tensors", "rows"):
            own, theirs = getattr(self, what), getattr(other, what)
            if own.keys() != theirs.keys():
                found.append(f"names of {what}")
            found += [
                f"{what} of {name}" for name in own.keys() & theirs.keys() if not torch.equal(own[name], theirs[name])
            ]
        return found


class Sample(NamedTuple):
    """A closed store: its files, and what it holds."""

    files: dict[str, bytes]
    expected: Expected


class Case(NamedTuple):
    """One change: ``kind`` is "flip" (xor ``number`` into the byte at ``offset``), "cut", "zero", "swap" or "mix"."""

    kind: str
    file: str
    offset: int = 0
    number: int = 0

    def applied(self, files: dict[str, bytes], other: dict[str, bytes]) -> dict[str, bytes]:
        """The files of a store after the change; ``other`` are those of a second store."""
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
    """What came of a change, read-only and for writing; "right", the name of an error, or what went wrong."""

    case: Case
    read: str
    write: str

    @property
    def failures(self) -> list[str]:
        return [each for each in (self.read, self.write) if each.startswith(("WRONG", "CRASH", "HANG"))]


def make_sample(folder: Path, seed: int) -> Sample:
    """Tables of three layouts, one of rows longer than a page, trained and committed twice; all rows change."""
    generator = torch.Generator().manual_seed(seed)
    with tierstore.open(folder, ddr=_DDR, threads=1) as store:
        sizes = {"wide": 420, "narrow": 400, "long": 3}
        configs = {
            "wide": {"embedding_dim": 64, "optimizer": tierstore.optim.RowWiseAdagrad(lr=0.1)},
            "narrow": {"embedding_dim": 5, "optimizer": tierstore.optim.SGD(lr=0.1), "dtype": "float16"},
            "long": {"embedding_dim": 1500, "optimizer": tierstore.optim.SGD(lr=0.1)},
        }
        for name, fields in configs.items():
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=sizes[name], **fields))  # type: ignore[arg-type]
        for version in (1, 2):
            for name, count in sizes.items():
                bag = tierstore.TieredEmbeddingBag(store[name], mode="sum")
                # The last rows stay as they were first: absent rows are part of what must come back.
                ids = torch.randperm(count - 2, generator=generator)
                scale = torch.rand(1, generator=generator) + version
                (bag(ids, torch.arange(len(ids))) * scale).sum().backward()
            dense = torch.rand((3, 50), generator=generator)
            store.commit(extra={"step": version, "seed": seed}, tensors={"dense": dense})
    with tierstore.open(folder, mode="r", ddr=_DDR, threads=1) as store:
        expected = Expected.of(store)
    files = {name: (folder / name).read_bytes() for name in FILES}
    return Sample(files, expected)


def examine(folder: Path, case: Case, samples: Sequence[Sample]) -> Outcome:
    """Put the changed files into ``folder``, which is emptied first, and use them as a store."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in case.applied(samples[0].files, samples[1].files).items():
        (folder / name).write_bytes(content)
    expected = [sample.expected for sample in samples]
    return Outcome(case, _attempt(folder, "r", expected), _attempt(folder, "w", expected))


def _attempt(folder: Path, mode: Any, expected: Sequence[Expected]) -> str:
    try:
        with tierstore.open(folder, mode=mode, ddr=_DDR, threads=1) as store:
            found = Expected.of(store)
            # Of two stores' files either may be the one that is whole.
            differences = min((each.differences(found) for each in expected), key=len)
            if differences:
                return f"WRONG {mode}: {', '.join(differences)}"
            store.verify()  # after the rows: a wrong row must not be read, whatever verify finds then
            return "right" if mode == "r" else _write_and_reopen(folder, store, found)
    except TierstoreError as error:
        named = str(folder) in str(error)
        return type(error).__name__ if named else f"WRONG {mode}: no file is named: {error!r}"
    except Exception as error:
        return f"WRONG {mode}: {error!r}"


def _write_and_reopen(folder: Path, store: "tierstore.Store", before: Expected) -> str:
    """Change some rows of a store that seemed whole, commit, and see that exactly those changed."""
    rows = {name: values.clone() for name, values in before.rows.items()}
    for name, values in rows.items():
        ids = torch.arange(0, len(values), 3)
        values[ids] += 1
        store[name].write(ids, values[ids])
    store.commit(extra=before.extra, tensors=before.tensors)
    store.close()
    after = Expected(version=before.version + 1, extra=before.extra, tensors=before.tensors, rows=rows)
    with tierstore.open(folder, mode="r", ddr=_DDR, threads=1) as store:
        differences = after.differences(Expected.of(store))
        store.verify()
    return f"WRONG after a commit: {', '.join(differences)}" if differences else "right"


def flips(sample: Sample, *, all_bits: bool, stride: int = 1, whole: Sequence[str] = ()) -> Iterator[Case]:
    """Each byte of each file in turn, or every ``stride``-th; of the files named in ``whole`` each."""
    for name, content in sample.files.items():
        for offset in range(0, len(content), 1 if name in whole else stride):
            yield Case("flip", name, offset, 0xFF if all_bits else 1 << offset % 8)


def page_damage(sample: Sample, seed: int = 0) -> Iterator[Case]:
    """The row file cut at and inside every page, each page zeroed, pairs of pages swapped."""
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
    """Files of two stores in every combination; each file empty, cut and missing."""
    for number in range(1, 1 << len(FILES)):
        yield Case("mix", "", 0, number)
    for name, content in sample.files.items():
        yield Case("missing", name)
        for length in sorted({0, 1, len(content) // 2, max(0, len(content) - 1)}):
            yield Case("cut", name, length)


def sweep(
    cases: Sequence[Case], samples: Sequence[Sample], *, workers: int = 2, folder: Path | None = None
) -> list[Outcome]:
    """``examine`` each case in forked processes, several at a time; a process that dies is replaced."""
    parent = folder or (Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None)
    with tempfile.TemporaryDirectory(dir=parent) as scratch, ThreadPoolExecutor(workers) as executor:
        # Interleaved, so that all are done at about the same time.
        parts = [cases[number::workers] for number in range(workers)]
        folders = [Path(scratch) / str(number) for number in range(workers)]
        done = executor.map(lambda part, own: _sweep_part(part, samples, own), parts, folders)
        return [outcome for part in done for outcome in part]


def _sweep_part(cases: Sequence[Case], samples: Sequence[Sample], folder: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cases):
        lines, status = _in_child(cases[len(outcomes) :], samples, folder)
        for line in lines:
            read, write = line.split("\t")
            outcomes.append(Outcome(cases[len(outcomes)], read, write))
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            what = "HANG" if number == signal.SIGALRM else f"CRASH: {signal.Signals(number).name}"
            outcomes.append(Outcome(cases[len(outcomes)], what, what))
    return outcomes


def _in_child(cases: Sequence[Case], samples: Sequence[Sample], folder: Path) -> tuple[list[str], int]:
    """Lines "read<tab>write" of the cases a forked process came through, and its wait status."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: ours wait for this child
        child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            torch.set_num_threads(1)
            for case in cases:
                signal.alarm(TIME_LIMIT_S)
                outcome = examine(folder, case, samples)
                line = "\t".join(" ".join(each.split()) for each in (outcome.read, outcome.write))
                os.write(writer, line.encode("ascii", "replace") + b"\n")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="ascii") as lines:
        found = lines.read().splitlines()
    return found, os.waitpid(child, 0)[1]


def _counted(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How often each word came up: right, each class of error, WRONG, CRASH, HANG."""
    return dict(Counter(word.split(":")[0].split()[0] for each in outcomes for word in (each.read, each.write)))


def run(request: Run) -> Report:
    config = request.config
    with tempfile.TemporaryDirectory() as scratch:
        samples = [make_sample(Path(scratch) / str(seed), seed) for seed in (1, 2)]
    kinds = {
        "one bit of each byte": list(flips(samples[0], all_bits=False, stride=config["stride"])),
        "every few bytes, inverted": list(flips(samples[0], all_bits=True, stride=config["stride_inverted"])),
        "pages cut off, zeroed, swapped": list(page_damage(samples[0]))[:: config["page_stride"]],
        "files of two stores, empty, missing": list(mixes(samples[0])),
    }
    counts: dict[str, dict[str, int]] = {}
    failures: list[Outcome] = []
    for kind, cases in kinds.items():
        outcomes = sweep(cases, samples, workers=config["workers"])
        counts[kind] = _counted(outcomes)
        failures += [outcome for outcome in outcomes if outcome.failures]
        print(f"{kind}: {len(cases):,} changes, {counts[kind]}", flush=True)
    for outcome in failures[:50]:
        print(outcome)
    return _report(samples[0], kinds, counts, failures)


def _report(
    sample: Sample, kinds: dict[str, list[Case]], counts: dict[str, dict[str, int]], failures: list[Outcome]
) -> Report:
    size = {name: len(content) for name, content in sample.files.items()}
    bad = {word: sum(count.get(word, 0) for count in counts.values()) for word in ("WRONG", "CRASH", "HANG")}
    rows = []
    for kind, cases in kinds.items():
        count = counts[kind]
        refused = sum(number for word, number in count.items() if word not in ("right", *bad))
        rows.append(
            [kind, *(f"{n:,}" for n in (len(cases), count.get("right", 0), refused, *(count.get(w, 0) for w in bad)))]
        )
    return Report(
        question="Does any damage to a store's files end in a wrong row, a crash or a hang?",
        tables=[
            Table(
                title=f"damage to a store of {sum(size.values()):,} bytes, opened for reading and for writing",
                columns=["change", "changes", "right", "refused", "wrong", "crashed", "hung"],
                rows=rows,
            )
        ],
        figures={
            "file_bytes": size,
            "counts": counts,
            "failures": [[*outcome.case, outcome.read, outcome.write] for outcome in failures[:100]],
        },
        goals=[
            Goal(name="wrong rows or untyped errors", value=bad["WRONG"], exactly=0),
            Goal(name="crashes", value=bad["CRASH"], exactly=0),
            Goal(name="hangs", value=bad["HANG"], exactly=0),
        ],
        notes=[
            "right: every row, the extra and the tensors of the last commit came back, and, opened for writing, rows "
            "were changed, committed and read again. refused: an error of tierstore's own that names the file."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("damage", run))

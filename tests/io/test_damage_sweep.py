"""Damage anywhere in a small store ends in the right rows or in an error of ours that names the file.

A sample of places in every run; ``pytest -m soak`` tries a bit of every byte of the row file.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.damage import (
    PAGE,
    Case,
    Expected,
    Outcome,
    Sample,
    flips,
    make_aged,
    make_sample,
    mixes,
    page_damage,
    row_file,
    sweep,
)
from tierstore.errors import DamagedError, FormatError
from tierstore.io import LmdbColdTier, reads
from tierstore.io.indexes import read_indexes, stored_segments


@pytest.fixture(scope="module", params=[make_sample, make_aged], ids=["new", "aged"])
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folders = [tmp_path_factory.mktemp("sample") / "store" for _ in range(2)]
    return [request.param(folder, seed) for seed, folder in enumerate(folders, 1)]


def _failures(cases: Sequence[Case], samples: list[Sample], **how: Any) -> list[Outcome]:
    outcomes = sweep(cases, samples, **how)
    assert sorted(outcome.case for outcome in outcomes) == sorted(cases)
    return [outcome for outcome in outcomes if outcome.failures]


def test_the_samples_are_stores_worth_damaging(samples: list[Sample], tmp_path: Path) -> None:
    """The aged one has rows of an earlier version, and rows of several epochs that cleaning moved together."""
    files, expected = samples[0]
    assert len(files["rows.lmdb"]) >= 200_000
    assert len(expected.rows) == 3
    assert examine_whole(samples) == ("right", "right")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with tierstore.open(tmp_path, mode="r", ddr="1MiB", threads=1) as store:
        is_aged = len(store.versions) > 1
        assert expected.version == (5 if is_aged else 2)
        with store._cold.lease_tree() as tree:
            indexes = read_indexes(tree, stored_segments(tree))
        if is_aged:
            assert indexes["oldest"].min() < store.versions[0]
            assert (indexes["oldest"] < indexes["newest"]).any()


def examine_whole(samples: list[Sample]) -> tuple[str, str]:
    """What comes of no damage: a byte of a file that means nothing is changed."""
    [outcome] = sweep([Case("flip", "writer.lock", 0, 1)], samples, workers=1)
    return outcome.read, outcome.write


def test_bytes_of_the_row_file(samples: list[Sample]) -> None:
    cases = [*flips(samples[0], all_bits=False, stride=809, files=["rows.lmdb"])]
    cases += flips(samples[0], all_bits=True, stride=1999, files=["rows.lmdb"])
    assert _failures(cases, samples, prepare=row_file) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_byte_of_the_row_file(samples: list[Sample]) -> None:
    cases = [*flips(samples[0], all_bits=False, files=["rows.lmdb"])]
    assert _failures(cases, samples, prepare=row_file) == []
    assert _failures(list(flips(samples[0], all_bits=False, stride=101)), samples) == []
    assert _failures(list(page_damage(samples[0])), samples) == []


def test_a_byte_here_and_there(samples: list[Sample]) -> None:
    cases = [case for bits in (False, True) for case in flips(samples[0], all_bits=bits, stride=6001 + 97 * bits)]
    assert len(cases) > 80
    assert _failures(cases, samples) == []


def test_bytes_that_lmdb_believes(samples: list[Sample]) -> None:
    """The fields of both meta pages, and the heads of the pages of both trees."""
    data = samples[0].files["rows.lmdb"]
    trees = [
        at
        for at in range(2 * PAGE, len(data), PAGE)
        if data[at + 10] & 3 and int.from_bytes(data[at : at + 8], "little") == at // PAGE
    ]
    places = [*range(0, 152, 5), *range(PAGE, PAGE + 152, 5)]
    places += [
        at + offset for at in trees[:: max(1, len(trees) // 8)] for offset in (0, 10, 12, 14, 17, PAGE - 20, PAGE - 9)
    ]
    assert _failures([Case("flip", "rows.lmdb", at, 1 << at % 8) for at in places], samples) == []


def test_an_older_tree_that_calls_itself_the_newest(tmp_path: Path) -> None:
    """The older meta page numbered as if it came after the newer one: its tree is whole, and lacks the last commit."""
    with tierstore.open(tmp_path, ddr="1MiB", threads=1) as store:
        store.create_table(tierstore.TableConfig(name="item", num_embeddings=100, embedding_dim=8))
        store["item"].write(torch.arange(100), torch.ones(100, 8))
        store.commit()
    data = bytearray((tmp_path / "rows.lmdb").read_bytes())
    numbers = [int.from_bytes(data[page * PAGE + 144 : page * PAGE + 152], "little") for page in (0, 1)]
    older = int(numbers[1] < numbers[0])
    data[older * PAGE + 144 : older * PAGE + 152] = (numbers[older] + 2).to_bytes(8, "little")
    (tmp_path / "rows.lmdb").write_bytes(data)
    (tmp_path / "rows.anchor").unlink()  # it holds both pages as they were
    for mode in ("r", "w"):
        with pytest.raises(DamagedError, match=rf"rows\.lmdb: page {older} of its tree is damaged \(BAD_TOTALS\)"):
            tierstore.open(tmp_path, mode=mode)


@pytest.mark.parametrize("page", [0, 1])
def test_meta_pages_out_of_step(samples: list[Sample], tmp_path: Path, page: int) -> None:
    data = bytearray(samples[0].files["rows.lmdb"])
    data[page * PAGE + 144 + 2] ^= 1
    for name, content in (samples[0].files | {"rows.lmdb": bytes(data)}).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "rows.anchor").unlink()  # it holds both pages as they were
    for mode in ("r", "w"):
        with pytest.raises(FormatError, match=r"rows\.lmdb: its two meta pages are not those of successive transac"):
            tierstore.open(tmp_path, mode=mode)


def test_pages_cut_off_zeroed_and_swapped(samples: list[Sample]) -> None:
    cases = list(page_damage(samples[0]))
    assert _failures(cases[:: max(1, len(cases) // 60)], samples) == []


def test_files_of_two_stores_empty_and_missing(samples: list[Sample]) -> None:
    assert _failures(list(mixes(samples[0])), samples) == []


def test_the_harness_sees_wrong_rows_crashes_and_strange_errors(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("flip", "writer.lock", 0, 1)
    monkeypatch.setattr(Expected, "differences", lambda *_: ["rows of wide"])
    assert sweep([case], samples, workers=1)[0].failures[0].startswith("WRONG r: rows of wide")
    monkeypatch.undo()
    monkeypatch.setattr(tierstore, "open", lambda *_, **__: os.kill(os.getpid(), 9))
    assert [each.read for each in sweep([case, case], samples, workers=1)] == ["CRASH: SIGKILL"] * 2
    monkeypatch.setattr(tierstore, "open", lambda *_, **__: os.kill(os.getpid(), 14))
    assert sweep([case], samples, workers=1)[0].failures == ["HANG"]
    monkeypatch.setattr(tierstore, "open", lambda *_, **__: {}["no error of ours"])
    assert sweep([case], samples, workers=1)[0].read.startswith("WRONG r: KeyError")


def test_the_harness_sees_what_a_read_of_the_row_file_may_do(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bring a wrong row, though it is there; and find damage that verify does not."""
    free = next(iter(flips(samples[0], all_bits=False, files=["writer.lock"])))
    assert sweep([free], samples, workers=1, prepare=row_file)[0].read == "right"
    gather, calls = reads.gather, []

    def wrong(*arguments: Any) -> None:
        gather(*arguments)
        calls.append(1)
        if len(calls) > 3:  # the rows as they should be were read
            arguments[5].weights[0] ^= np.uint64(1)

    monkeypatch.setattr(reads, "gather", wrong)
    assert sweep([free], samples, workers=1, prepare=row_file)[0].failures == ["WRONG rows"]
    monkeypatch.undo()
    monkeypatch.setattr(LmdbColdTier, "verify", lambda _: None)
    cases = list(flips(samples[0], all_bits=False, stride=4001, files=["rows.lmdb"]))
    found = [each for outcome in sweep(cases, samples, workers=1, prepare=row_file) for each in outcome.failures]
    assert found
    assert all(each.startswith("WRONG: verify passes what a read refuses") for each in found)


def _rows_format(files: dict[str, bytes], version: int) -> dict[str, bytes]:
    """The store record's version changed, with a checksum that matches."""
    import xxhash

    data = bytearray(files["rows.lmdb"])
    at, found = data.find(b"tierrows"), 0
    while at >= 0:
        record = bytes(data[at : at + 8]) + version.to_bytes(8, "little") + bytes(data[at + 16 : at + 32])
        data[at : at + 40] = record + xxhash.xxh64_intdigest(record).to_bytes(8, "little")
        at, found = data.find(b"tierrows", at + 8), found + 1
    assert found
    return files | {"rows.lmdb": bytes(data)}


def _manifest_format(files: dict[str, bytes], version: int) -> dict[str, bytes]:
    import hashlib

    body = json.loads(files["manifest.json"])["body"] | {"format_version": version}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return files | {"manifest.json": json.dumps({"body": body, "sha256": digest}).encode()}


Change = Callable[[dict[str, bytes], int], dict[str, bytes]]


@pytest.mark.parametrize("mode", ["r", "w"])
@pytest.mark.parametrize(
    ("change", "version", "expected"),
    [
        (change, version, "this release reads version 4")
        for change in (_rows_format, _manifest_format)
        for version in (0, 5)
    ]
    + [(_rows_format, version, "of an older release.*tierstore export.*tierstore import") for version in (1, 2, 3)]
    + [(_manifest_format, version, "of an older release.*tierstore export.*tierstore import") for version in (1, 2)],
)
def test_other_format_versions(
    samples: list[Sample], tmp_path: Path, change: Change, version: int, expected: str, mode: str
) -> None:
    for name, content in change(samples[0].files, version).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=rf"format version {version}\b") as caught:
        tierstore.open(tmp_path, mode=mode)  # type: ignore[arg-type]
    assert re.search(expected, str(caught.value))


def _spoil(place: Path, kind: str, outside: Path) -> None:
    """Put something else in the place of a file."""
    place.unlink()
    if kind == "link":
        place.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        # From within the folder: a socket's path may have 107 characters.
        with contextlib.chdir(place.parent), socket.socket(socket.AF_UNIX) as server:
            server.bind(place.name)


def test_what_is_no_plain_file_is_refused_and_left_alone(samples: list[Sample], tmp_path: Path) -> None:
    places = []
    for name in ("rows.lmdb", "rows.lmdb-lock", "rows.anchor", "writer.lock"):
        for kind in ("link", "pipe", "socket", "folder"):
            folder = tmp_path / f"{name} {kind}"
            folder.mkdir()
            for each, content in samples[0].files.items():
                (folder / each).write_bytes(content)
            _spoil(folder / name, kind, tmp_path / "outside")
            places.append(folder / name)
    (tmp_path / "outside").write_bytes(b"of someone else")
    # In a process of its own: an open that hangs would take the whole suite along.
    program = """
import sys, tierstore
for folder in sys.argv[1:]:
    try:
        tierstore.open(folder)
    except Exception as error:
        print(type(error).__name__, error)
"""
    folders = [str(place.parent) for place in places]
    done = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, timeout=120, check=False)
    lines = done.stdout.decode().splitlines()
    assert len(lines) == len(places)
    for line, place in zip(lines, places, strict=True):
        assert line.startswith(f"FormatError {place} is a ")
    assert (tmp_path / "outside").read_bytes() == b"of someone else"

"""Repair saves every row that is certain to be the last version's, lists the others, and takes no old row for new.

``wrecks.Image.expected`` says what can be proven, from the places of all that the sound file holds.
"""

import contextlib
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.wrecks import PAGE, TABLES, History, Image, Segment, extra_of, rows_of, tensors_of
from tierstore.errors import DamagedError, FormatError, StoreLockedError
from tierstore.io.meta import bytes_checksum
from tierstore.io.records import STORE_ITEM
from tierstore.io.superblock import newest_slot, pack_slot
from tierstore.io.survivors import settled
from tierstore.layout import KEY_ROW_BITS
from tierstore.offline.salvage import LOST_NAME, SalvageReport, salvage
from tierstore.store.manifest import Manifest

META = 2**64 - 1
Change = tuple[int, bytes]  # where in the row file, and what is there then


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: each repair syncs a dozen times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Large segments, some of which cleaning has put together from several epochs."""
    return History(tmp_path_factory.mktemp("cleaned") / "store", 0, turns=250, slack=1.05, sizes=[1, 30, 100, 400])


@pytest.fixture(scope="module")
def scattered(tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(tmp_path_factory.mktemp("scattered") / "store", 1, turns=600, slack=8.0, sizes=[1, 7, 7])


@pytest.fixture(scope="module", params=["cleaned", "scattered"])
def history(request: pytest.FixtureRequest) -> History:
    found: History = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def image(history: History) -> Image:
    return Image(history.files["rows.lmdb"], history.version)


def _changed(files: dict[str, bytes], changes: Iterable[Change]) -> dict[str, bytes]:
    data = bytearray(files["rows.lmdb"])
    for at, content in changes:
        data[at : at + len(content)] = content
    return files | {"rows.lmdb": bytes(data)}


def _salvaged(tmp_path: Path, files: dict[str, bytes], **options: Any) -> SalvageReport:
    source, target = tmp_path / "damaged", tmp_path / "saved"
    for folder in (source, target):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    report = salvage(source, target, **options)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == files, "the source was changed"
    assert (target / LOST_NAME).read_text().splitlines() == report.lines()
    assert report.is_whole == (not report.lines())
    return report


def _lost(report: SalvageReport) -> set[int]:
    tables = {config.name: index for index, config in enumerate(TABLES)}
    return {
        tables[loss.table] << KEY_ROW_BITS | row for loss in report.lost for row in range(loss.first, loss.last + 1)
    }


def _check_payload(folder: Path, report: SalvageReport) -> None:
    with tierstore.open(folder, mode="r", ddr="1MiB", threads=1) as store:
        assert store.version == report.version
        tensors = store.tensors()
        assert store.extra == ({} if report.payload_lost else extra_of(report.version))
        assert tensors.keys() == (set() if report.payload_lost else {"dense"})
        assert all(torch.equal(value, tensors_of(report.version)[name]) for name, value in tensors.items())


def _check_exactly(
    tmp_path: Path, history: History, image: Image, changes: list[Change], what: object, stale: bool = True
) -> None:
    """Damage of segments: all that can be proven is saved, nothing else, and what is lost is listed."""
    files = _changed(history.files, changes)
    for stale_ok in (False, True)[: 1 + stale]:
        expected = image.expected(files["rows.lmdb"], stale_ok=stale_ok)
        report = _salvaged(tmp_path, files, stale_ok=stale_ok)
        found = rows_of(tmp_path / "saved")
        assert found == expected.saved, what
        assert _lost(report) == expected.lost, what
        assert (report.missing, report.unproven, report.rows) == (expected.missing, expected.unproven, len(found)), what
        assert (report.version, report.payload_lost, report.doubts) == (history.version, False, []), what
        assert stale_ok or found.items() <= history.rows.items(), "a row is not the version's"
        assert stale_ok or report.missing or history.rows.keys() - found.keys() == expected.lost, what


def test_a_store_is_saved_whole(history: History, image: Image, tmp_path: Path) -> None:
    """In the file there are also superseded rows, and such of versions that were gone back from or never came to be."""
    assert any(each.is_mixed for each in image.segments)
    assert any(each.newest > image.version for each in image.segments)
    calls: list[tuple[int, int]] = []
    report = _salvaged(tmp_path, history.files, progress=lambda *pair: calls.append(pair))
    assert (len(history.files["rows.lmdb"]),) * 2 in calls
    assert calls[-1][0] == calls[-1][1]
    assert report.is_whole
    assert rows_of(tmp_path / "saved") == history.rows == image.expected(image.data).saved
    assert report.rows == len(history.rows)
    _check_payload(tmp_path / "saved", report)


def test_random_damage_of_segments(history: History, image: Image, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    outcomes = {"whole": 0, "lost": 0, "missing": 0}
    for _ in range(20):
        changes = []
        for _ in range(int(random.integers(1, 4))):
            each = image.segments[int(random.integers(len(image.segments)))]
            at = int(random.integers(each.start * 8, each.stop * 8))
            if random.random() < 0.4:  # from the index on
                at = each.start * 8
            length = min(int(random.choice([1, 8, 512, PAGE, 3 * PAGE, 16 * PAGE])), each.stop * 8 - at)
            changes.append((at, random.bytes(length) if random.random() < 0.5 else bytes(length)))
        expected = image.expected(_changed(history.files, changes)["rows.lmdb"])
        outcomes["missing" if expected.missing else "lost" if expected.lost else "whole"] += 1
        _check_exactly(tmp_path, history, image, changes, [(at, len(content)) for at, content in changes])
    assert min(outcomes.values()) > 1, outcomes


def _flip(image: Image, at: int, bits: int = 0x10) -> Change:
    return at, bytes([image.data[at] ^ bits])


def _damages(image: Image, each: Segment) -> dict[str, list[Change]]:
    index, last = (each.start * 8, bytes(PAGE)), each.blocks[-1]
    firsts = [_flip(image, row * 8) for row in each.rows[:: each.layout.rows_per_block]]
    ends = {"the last row's key and checksum": [(each.pairs[-1] * 8, bytes(16))]}
    if (len(each.keys) % each.layout.rows_per_block) and each.layout.pages_per_block == 1:
        ends["an unused place"] = [((each.pairs[-1] + 2) * 8, b"\1" * 16)]
    return {
        "no index": [index],
        "a bit of the index": [_flip(image, each.index_stop * 8 - 3)],
        "the page header": [_flip(image, each.start * 8)],
        "a row's key": [_flip(image, each.pairs[0] * 8)],
        "a row's key in both places": [_flip(image, each.pairs[0] * 8), _flip(image, (each.start + 8) * 8)],
        "no index and a row": [index, _flip(image, each.rows[0] * 8)],
        "no index and a block's number": [index, _flip(image, last * 8)],
        "no index and a block's epoch": [index, _flip(image, last * 8 + 11, 0x01)],
        "no index and a block's place": [index, _flip(image, last * 8 + 8, 0x01)],
        "no index and a block's end": [index, _flip(image, last * 8 + 8, 0x80)],
        "no index, no end and a row of every block": [index, _flip(image, last * 8), *firsts],
        "an older epoch in every block": [index, *((block * 8 + 11, b"\0" * 5) for block in each.blocks)],
        "nothing": [(each.start * 8, bytes((each.stop - each.start) * 8))],
        **{f"no index and {what}": [index, *change] for what, change in ends.items()},
    }


def test_a_segment_without_its_index(history: History, image: Image, tmp_path: Path) -> None:
    shown = [each for each in image.segments if each.newest <= image.version]
    chosen = {(each.layout, each.is_mixed, len(each.blocks) > 1): each for each in shown}
    assert len(chosen) > 3
    for each in chosen.values():
        for what, changes in _damages(image, each).items():
            _check_exactly(tmp_path, history, image, changes, (each.number, what), stale=False)


@pytest.mark.kernel
def test_a_short_history(tmp_path: Path) -> None:
    """All kinds of damage again, in a store that is small enough for kernels in plain Python."""
    history = History(tmp_path / "store", 4, turns=12, slack=1.5, sizes=[1, 7, 30])
    image = Image(history.files["rows.lmdb"], history.version)
    each = max(image.segments, key=lambda each: (each.newest <= image.version, len(each.blocks)))
    damages = _damages(image, each)
    for what in ("no index", "no index and a row", "a row's key"):
        _check_exactly(tmp_path, history, image, damages[what], what)
    page = image.leaves[0]
    _check_reached(tmp_path, history, image, page, _flip(image, page * PAGE)[1])


def _check_reached(tmp_path: Path, history: History, image: Image, page: int, content: bytes) -> bool:
    """Damage of the tree: all is saved by the tree before, or without proof what this one still leads to."""
    files = _changed(history.files, [(page * PAGE, content)])
    report = _salvaged(tmp_path, files)
    found = rows_of(tmp_path / "saved")
    if report.missing != -1:
        assert report.lost == []
        assert (found == history.rows) or "later commits may be missing" in report.doubts[0]
        return True
    assert found == {}
    assert "A part of the tree that leads to the segments is damaged" in report.doubts[-1]
    report = _salvaged(tmp_path, files, stale_ok=True)
    found = rows_of(tmp_path / "saved")
    assert found == image.expected(image.data, stale_ok=True, gone=image.below(page)).saved
    assert report.unproven == report.rows == len(found)
    return False


def test_any_damaged_page_of_the_tree(history: History, image: Image, tmp_path: Path) -> None:
    pages = [*image.leaves, *image.branches]
    whole = [_check_reached(tmp_path, history, image, page, bytes(PAGE)) for page in pages]
    assert True in whole
    assert (False in whole) == (len(image.leaves) > 1)
    for page in image.free_leaves:
        assert _salvaged(tmp_path, _changed(history.files, [(page * PAGE, bytes(PAGE))])).is_whole


def test_a_writer_that_was_killed(cleaned: History, tmp_path: Path) -> None:
    """What it wrote after the last anchor may be damaged; if the machine stopped too, its data may not be there."""
    files, every = cleaned.files_open, Image(cleaned.files_open["rows.lmdb"], cleaned.version)
    for page in [*every.leaves, *every.branches, *every.free_leaves]:
        assert _salvaged(tmp_path, _changed(files, [(page * PAGE, bytes(PAGE))])).is_whole
        assert rows_of(tmp_path / "saved") == cleaned.rows
    anchor = newest_slot(files["rows.anchor"])
    at_anchor = _changed(files, [(PAGE * i, meta) for i, meta in enumerate(anchor.metas)])["rows.lmdb"]
    known = {each.number for each in Image(at_anchor, cleaned.version).segments}
    later = [each for each in every.segments if each.number not in known]
    assert any(each.newest <= cleaned.version for each in later), "nothing was moved after the anchor"
    files = _changed(files, [(each.start * 8, bytes((each.stop - each.start) * 8)) for each in later])
    assert not _salvaged(tmp_path, files).is_whole
    assert _salvaged(tmp_path, files | {"rows.anchor": pack_slot(anchor._replace(boot_id=bytes(16)))}).is_whole
    assert rows_of(tmp_path / "saved") == cleaned.rows


def _record(image: Image, item: int) -> int:
    return next(node for kind, number, node in image.nodes if (kind, number) == (META, item)) + 24


def test_a_damaged_payload_costs_the_payload_alone(history: History, image: Image, tmp_path: Path) -> None:
    at = image._little(_record(image, (history.version << 24) + 1), 8) * PAGE
    report = _salvaged(tmp_path, _changed(history.files, [_flip(image, at + 5000)]))
    assert report.payload_lost
    assert report.lines() == [
        f"extra and tensors of version {history.version}, and how many updates each table has had"
    ]
    assert rows_of(tmp_path / "saved") == history.rows
    _check_payload(tmp_path / "saved", report)


@pytest.mark.parametrize("meta", [0, 1])
def test_damaged_meta_pages(history: History, tmp_path: Path, meta: int) -> None:
    """The anchor stands in; without it the other page does, and that is said."""
    files = _changed(history.files, [(meta * PAGE, bytes(150))])
    assert _salvaged(tmp_path, files).is_whole
    assert rows_of(tmp_path / "saved") == history.rows
    anchorless = {name: content for name, content in files.items() if name != "rows.anchor"}
    assert "later commits may be missing" in _salvaged(tmp_path, anchorless).lines()[0]
    both = _changed(history.files, [(0, bytes(150)), (PAGE, bytes(150))])
    assert _salvaged(tmp_path, both).is_whole
    with pytest.raises(DamagedError, match="no tree leads to a record of versions"):
        _salvaged(tmp_path, anchorless | {"rows.lmdb": both["rows.lmdb"]})


def test_a_file_cut_short(history: History, image: Image, tmp_path: Path) -> None:
    stops = sorted(each.stop * 8 for each in image.segments)
    exactly = 0
    for size in [*stops[:: max(1, len(stops) // 6)], *stops[-4:-1]]:
        files = history.files | {"rows.lmdb": image.data[:size]}
        with contextlib.suppress(DamagedError):  # where no record of versions is left
            report = _salvaged(tmp_path, files)
            found = rows_of(tmp_path / "saved")
            assert report.version != history.version or found.items() <= history.rows.items()
            if not report.doubts:
                assert found == image.expected(files["rows.lmdb"]).saved
                exactly += 1
    assert exactly


def test_without_a_manifest(cleaned: History, tmp_path: Path) -> None:
    """A copy will do; of an older one, tables that it does not know are left out."""
    manifest = cleaned.files["manifest.json"]
    with pytest.raises(DamagedError, match=r"manifest\.json .* put a copy of it in its place"):
        _salvaged(tmp_path, cleaned.files | {"manifest.json": manifest[:100]})
    assert not (tmp_path / "saved").exists()
    known = Manifest._parse(tmp_path, manifest)
    earlier = replace(known, tables=known.tables[:2])._text().encode()
    report = _salvaged(tmp_path, cleaned.files | {"manifest.json": earlier})
    assert report.is_whole
    assert report.rows == sum(key >> KEY_ROW_BITS < 2 for key in cleaned.rows)
    _check_payload(tmp_path / "saved", report)


def test_the_manifest_of_another_store(cleaned: History, scattered: History, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="belongs to store"):
        _salvaged(tmp_path, cleaned.files | {"manifest.json": scattered.files["manifest.json"]})
    known = Manifest._parse(tmp_path, cleaned.files["manifest.json"])
    other = replace(known, tables=(replace(known.tables[0], embedding_dim=8), *known.tables[1:]))
    with pytest.raises(DamagedError, match="cannot be one of its tables' rows"):
        _salvaged(tmp_path, cleaned.files | {"manifest.json": other._text().encode()})


def test_a_store_of_another_release(cleaned: History, tmp_path: Path) -> None:
    image = Image(cleaned.files["rows.lmdb"], cleaned.version)
    at = _record(image, STORE_ITEM)
    for number in (3, 9):
        body = image.data[at : at + 8] + struct.pack("<Q", number) + image.data[at + 16 : at + 32]
        change = at, body + struct.pack("<Q", bytes_checksum(body))
        with pytest.raises(FormatError, match=rf"rows\.lmdb: format version {number}.*the release that wrote it"):
            _salvaged(tmp_path, _changed(cleaned.files, [change]))


def test_a_store_that_is_open_and_one_without_rows(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "empty", ddr="1MiB", threads=1) as store:
        store.create_table(TABLES[0])
        with pytest.raises(StoreLockedError, match="open for writing"):
            salvage(tmp_path / "empty", tmp_path / "target")
    report = salvage(tmp_path / "empty", tmp_path / "target")
    assert (report.version, report.is_whole) == (0, True)


def test_what_was_read_while_pages_were_refused_is_read_again() -> None:
    class Refusing:
        met = 0

        def refused(self, since: int) -> bool | None:
            return None if since == self.met else True

    file_map: Any = SimpleNamespace(guard=Refusing())
    results = iter([1, 2, 3, 4])

    def call() -> int:
        result = next(results)
        file_map.guard.met += result < 3
        return result

    assert settled(file_map, call) == 3

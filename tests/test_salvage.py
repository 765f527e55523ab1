"""Repair saves every sound row of the last version, says what was lost, and never passes an old row for a new one."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tierstore
from bench.damage import PAGE, Case, Expected, Sample, make_sample
from tests.placing import place_sample
from tierstore.errors import DamagedError, FormatError, StoreLockedError, StoreNotFoundError, TierstoreError
from tierstore.io.btree import META_KEY, Meta, parse_meta
from tierstore.io.records import HEAD_ITEM
from tierstore.manifest import Manifest
from tierstore.salvage import LOST_NAME, Loss, SalvageReport, salvage

WIDE_ROWS = 14
"""In a block of the first sample: 64 float32 and a column of state."""
KEPT_ROWS = 15
"""In a block of the second: 64 float32."""
WIDE_ROW_BYTES = 34 * 8


@pytest.fixture(scope="module", params=["plain", "placed"])
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.mktemp("sample") / "store"
    made = make_sample(folder, seed=5)
    return made if request.param == "plain" else place_sample(folder, made)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A store with several versions of each block in one tree, and several leaves."""
    folder = tmp_path_factory.mktemp("kept") / "store"
    generator = torch.Generator().manual_seed(1)
    with tierstore.open(folder, ddr="1MiB", threads=1, keep=3) as store:
        table = store.create_table(tierstore.TableConfig(name="wide", num_embeddings=3000, embedding_dim=64))
        for version in (1, 2, 3, 4):
            ids = torch.arange(0, 3000, 1 if version < 3 else version)
            table.write(ids, torch.rand((len(ids), 64), generator=generator) + version)
            store.commit(extra={"step": version}, tensors={"dense": torch.full((5,), float(version))})
    with tierstore.open(folder, mode="r", ddr="1MiB", threads=1) as store:
        expected = Expected.of(store)
    return Sample({path.name: path.read_bytes() for path in folder.iterdir()}, expected)


def _is_placed(sample: Sample) -> bool:
    """Whether places of rows are other than their numbers; some places of a block may then be nobody's."""
    return Manifest._parse(Path(), sample.files["manifest.json"]).is_placed


def _put(folder: Path, files: dict[str, bytes]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def _saved(tmp_path: Path, files: dict[str, bytes], **options: object) -> tuple[SalvageReport, Expected]:
    source, target = _put(tmp_path / "damaged", files), tmp_path / "saved"
    shutil.rmtree(target, ignore_errors=True)
    report = salvage(source, target, **options)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in source.iterdir()} == files, "the source was changed"
    assert (target / LOST_NAME).read_text().splitlines() == report.lines()
    with tierstore.open(target, mode="r", ddr="1MiB", threads=1) as store:
        store.verify()
        return report, Expected.of(store)


def _first_values(sample: Sample, tmp_path: Path) -> dict[str, torch.Tensor]:
    """What rows of the sample's tables are before anything is written."""
    folder = tmp_path / "first values"
    manifest = Manifest.read(_put(tmp_path / "manifest", {"manifest.json": sample.files["manifest.json"]}))
    with tierstore.open(folder, ddr="1MiB", threads=1) as store:
        for config in manifest.tables:
            store.create_table(config)
        rows = Expected.of(store).rows
    shutil.rmtree(folder)
    return rows


def _check(report: SalvageReport, found: Expected, sample: Sample, first: dict[str, torch.Tensor]) -> None:
    """Each row is what was committed, or its first value; then it is listed, or the table has blocks missing."""
    expected = sample.expected
    assert report.version == found.version == expected.version
    for name, rows in expected.rows.items():
        lost = torch.zeros(len(rows), dtype=torch.bool)
        for loss in report.lost:
            if loss.table == name:
                lost[loss.first : loss.last + 1] = True
        same = (found.rows[name] == rows).all(1)
        is_first = (found.rows[name] == first[name]).all(1)
        assert (same | is_first).all(), f"{name}: a row is neither the committed one nor its first value"
        if not report.missing.get(name):
            assert (same | lost).all(), f"{name}: a row was lost and is not listed"
    if report.payload_lost:
        assert (found.extra, found.tensors) == ({}, {})
    else:
        assert found.extra == expected.extra
        assert all(torch.equal(found.tensors[name], value) for name, value in expected.tensors.items())


class Layout:
    """Where in a row file the newest tree and its blocks lie, found without the product's walk."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        metas = [parse_meta(data[at : at + 152]) for at in (0, PAGE)]
        self.meta = max((meta for meta in metas if isinstance(meta, Meta)), key=lambda meta: meta.txn_id)
        self.branches: list[int] = []
        self.leaves: list[int] = []
        self.entries: list[tuple[int, int, int, int]] = []
        """Key, epoch, page or 0, and where the node is."""
        for page, depth in self._pages(self.meta.main_root, self.meta.main_depth):
            (self.leaves if depth == 1 else self.branches).append(page)
            for node in self.nodes(page) if depth == 1 else ():
                key, epoch = (int.from_bytes(data[node + at : node + at + 8], "big") for at in (8, 16))
                big = data[node + 4] & 1
                self.entries.append((key, epoch, self._word(node + 24) if big else 0, node))

    def _word(self, at: int) -> int:
        return int.from_bytes(self.data[at : at + 8], "little")

    def nodes(self, page: int) -> list[int]:
        at = page * PAGE
        count = (int.from_bytes(self.data[at + 12 : at + 14], "little") - 16) // 2
        return [at + int.from_bytes(self.data[at + 16 + 2 * i : at + 18 + 2 * i], "little") for i in range(count)]

    def _pages(self, page: int, depth: int) -> Iterator[tuple[int, int]]:
        yield page, depth
        for node in self.nodes(page) if depth > 1 else ():
            yield from self._pages(int.from_bytes(self.data[node : node + 6], "little"), depth - 1)


def _changed(files: dict[str, bytes], *changes: tuple[int, bytes]) -> dict[str, bytes]:
    data = bytearray(files["rows.lmdb"])
    for at, content in changes:
        data[at : at + len(content)] = content
    return files | {"rows.lmdb": bytes(data)}


@pytest.mark.kernel
def test_a_sound_store_is_saved_whole(sample: Sample, tmp_path: Path) -> None:
    report, found = _saved(tmp_path, sample.files)
    assert report.is_whole
    assert report.lines() == []
    assert found.differences(sample.expected) == []
    assert report.rows == 420 + 400 + 3 - 3 * 2


def test_optimizer_state_is_saved_with_the_rows(sample: Sample, tmp_path: Path) -> None:
    """One more update of a saved store and of the original end in the same bits."""
    _saved(tmp_path, sample.files)
    ends = []
    for folder in (tmp_path / "saved", _put(tmp_path / "original", sample.files)):
        with tierstore.open(folder, ddr="1MiB", threads=1) as store:
            bag = tierstore.TieredEmbeddingBag(store["wide"], mode="sum")
            bag(torch.arange(56), torch.arange(56)).square().sum().backward()
            ends.append(store["wide"].read(torch.arange(56)))
    assert torch.equal(*ends)


@pytest.mark.kernel
def test_damaged_rows_are_listed_and_their_neighbours_saved(sample: Sample, tmp_path: Path) -> None:
    layout = Layout(sample.files["rows.lmdb"])
    page = next(page for key, _, page, _ in layout.entries if key == 1)
    places = [page * PAGE + 32 + row * WIDE_ROW_BYTES + 5 for row in (2, 3, 9)]
    report, found = _saved(tmp_path, _changed(sample.files, *((at, b"\xa7") for at in places)))
    if _is_placed(sample):
        assert (1 <= report.lost_rows <= 3, report.is_whole, report.payload_lost) == (True, False, False)
    else:
        assert report.lost == [Loss("wide", WIDE_ROWS + 2, WIDE_ROWS + 3), Loss("wide", WIDE_ROWS + 9, WIDE_ROWS + 9)]
        assert (report.lost_rows, report.is_whole, report.payload_lost) == (3, False, False)
    _check(report, found, sample, _first_values(sample, tmp_path))


@pytest.mark.parametrize("which", [pytest.param("sample", marks=pytest.mark.kernel), "kept"])
def test_any_damaged_page_of_the_tree(sample: Sample, kept: Sample, which: str, tmp_path: Path) -> None:
    """Zeroed in turn: leaves, branches, the root. Rows come back by the headers of their blocks."""
    chosen = sample if which == "sample" else kept
    first = _first_values(chosen, tmp_path)
    layout = Layout(chosen.files["rows.lmdb"])
    pages = [*layout.leaves[:: max(1, len(layout.leaves) // 6)], *layout.branches]
    for page in pages:
        report, found = _saved(tmp_path, _changed(chosen.files, (page * PAGE, bytes(PAGE))))
        _check(report, found, chosen, first)
        assert report.lost_rows == 0
        # Of the head and the version's own records, those found elsewhere may be of an earlier version.
        items = {epoch for key, epoch, _, node in layout.entries if key == META_KEY and node // PAGE == page}
        assert report.is_whole or any(item == HEAD_ITEM or item >> 24 == report.version for item in items)


def test_a_lost_leaf_and_a_lost_block_do_not_bring_back_the_version_before(kept: Sample, tmp_path: Path) -> None:
    """The newest epoch of a block is gone from the tree and its page too; an older one is there."""
    first = _first_values(kept, tmp_path)
    layout = Layout(kept.files["rows.lmdb"])
    stale = 0
    for this, following in zip(layout.entries, layout.entries[1:], strict=False):
        if this[0] == following[0] and following[1] == kept.expected.version and stale < 12:
            key, _, page, node = following
            # One entry made unreadable, or its whole leaf; and the block's page zeroed.
            for damage in ((node + 6, b"\x31"), (node // PAGE * PAGE, bytes(PAGE))):
                files = _changed(kept.files, damage, (page * PAGE, bytes(PAGE)))
                report, found = _saved(tmp_path, files)
                _check(report, found, kept, first)
                rows = range(key * KEPT_ROWS, min(3000, (key + 1) * KEPT_ROWS))
                listed = {row for loss in report.lost for row in range(loss.first, loss.last + 1)}
                assert set(rows) <= listed or report.missing
                if not report.missing:
                    with_old, old = _saved(tmp_path, files, stale_ok=True)
                    assert with_old.unproven > 0
                    assert not torch.equal(old.rows["wide"], found.rows["wide"])
            stale += 6
    assert stale


def test_a_changed_key_in_the_tree(kept: Sample, tmp_path: Path) -> None:
    first = _first_values(kept, tmp_path)
    layout = Layout(kept.files["rows.lmdb"])
    for at, bits in ((8 + 7, 0x40), (8 + 4, 1), (16 + 7, 2), (16 + 7, 1), (24, 1), (0, 8), (6, 1)):
        node = layout.entries[len(layout.entries) // 2][3]
        byte = bytes([kept.files["rows.lmdb"][node + at] ^ bits])
        report, found = _saved(tmp_path, _changed(kept.files, (node + at, byte)))
        _check(report, found, kept, first)
        assert report.lost_rows == 0


def test_random_damage(kept: Sample, sample: Sample, tmp_path: Path) -> None:
    """Several places at once, of any size: what is saved is right, what is not is listed."""
    generator = np.random.default_rng(7)
    outcomes = {"whole": 0, "part": 0, "refused": 0}
    for chosen in (kept, sample):
        first = _first_values(chosen, tmp_path)
        size = len(chosen.files["rows.lmdb"])
        for _ in range(30):
            changes = []
            for _ in range(int(generator.integers(1, 6))):
                at = int(generator.integers(size))
                length = int(generator.choice([1, 1, 8, 300, PAGE, 3 * PAGE]))
                changes.append((at, generator.bytes(min(length, size - at))))
            try:
                report, found = _saved(tmp_path, _changed(chosen.files, *changes))
            except DamagedError:
                outcomes["refused"] += 1
                continue
            outcomes["whole" if report.is_whole else "part"] += 1
            if report.version == chosen.expected.version:
                _check(report, found, chosen, first)
            else:
                assert report.doubts
    assert outcomes["part"] > 15
    assert outcomes["refused"] < 20


def test_a_damaged_payload_costs_the_payload_alone(sample: Sample, tmp_path: Path) -> None:
    data = sample.files["rows.lmdb"]
    at = data.rfind(b'{"extra"')
    places = []
    while at >= 0:
        places.append((at, b"["))
        at = data.rfind(b'{"extra"', 0, at)
    report, found = _saved(tmp_path, _changed(sample.files, *places))
    assert report.payload_lost
    assert report.lost == []
    assert f"extra and tensors of version {sample.expected.version}" in report.lines()[0]
    _check(report, found, sample, _first_values(sample, tmp_path))


@pytest.mark.kernel
@pytest.mark.parametrize("meta", [0, 1])
def test_damaged_meta_pages(sample: Sample, tmp_path: Path, meta: int) -> None:
    """The anchor stands in; without it the other page does, and that is said."""
    files = _changed(sample.files, (meta * PAGE, bytes(150)))
    report, found = _saved(tmp_path, files)
    assert report.is_whole
    assert found.differences(sample.expected) == []
    report, _ = _saved(tmp_path, {name: content for name, content in files.items() if name != "rows.anchor"})
    assert "later commits may be missing" in report.lines()[0]
    both = _changed(sample.files, (0, bytes(150)), (PAGE, bytes(150)))
    report, found = _saved(tmp_path, both)
    assert found.differences(sample.expected) == []
    with pytest.raises(DamagedError, match=r"rows\.lmdb: neither its meta pages nor rows\.anchor lead to a tree"):
        _saved(tmp_path, {name: content for name, content in both.items() if name != "rows.anchor"})


def test_a_file_cut_short(kept: Sample, tmp_path: Path) -> None:
    first = _first_values(kept, tmp_path)
    data = kept.files["rows.lmdb"]
    saved = 0
    for share in (0.97, 0.9, 0.8, 0.6, 0.3):
        with contextlib.suppress(DamagedError):  # where no record of any version is left
            report, found = _saved(tmp_path, kept.files | {"rows.lmdb": data[: int(len(data) * share)]})
            assert not report.is_whole
            assert report.version == kept.expected.version or report.doubts
            if report.version == kept.expected.version:
                _check(report, found, kept, first)
                saved += 1
    assert saved


def test_without_a_manifest(sample: Sample, tmp_path: Path) -> None:
    backup = tmp_path / "backup.json"
    backup.write_bytes(sample.files["manifest.json"])
    damaged = sample.files | {"manifest.json": sample.files["manifest.json"][:100]}
    with pytest.raises(DamagedError, match=r"manifest\.json .* give a copy of it with --manifest FILE"):
        _saved(tmp_path, damaged)
    assert not (tmp_path / "saved").exists()
    report, found = _saved(tmp_path, damaged, manifest=backup)
    assert report.is_whole
    assert found.differences(sample.expected) == []


def test_the_manifest_of_another_store(sample: Sample, kept: Sample, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="belongs to store"):
        _saved(tmp_path, sample.files | {"manifest.json": kept.files["manifest.json"]})


def _occupied(target: Path) -> None:
    target.mkdir()
    (target / "something").write_text("")


@pytest.mark.parametrize("occupy", [_occupied, lambda target: target.write_text("a file")])
def test_a_target_that_holds_something(sample: Sample, tmp_path: Path, occupy: Callable[[Path], None]) -> None:
    source, target = _put(tmp_path / "source", sample.files), tmp_path / "target"
    occupy(target)
    with pytest.raises(FileExistsError, match=r"is not (empty|a directory)"):
        salvage(source, target)
    assert target.exists()


def test_a_store_that_is_open_for_writing(sample: Sample, tmp_path: Path) -> None:
    source = _put(tmp_path / "source", sample.files)
    with tierstore.open(source, ddr="1MiB"), pytest.raises(StoreLockedError, match="open for writing"):
        salvage(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=r"rows\.lmdb"):
        salvage(tmp_path, tmp_path / "target")


def test_progress_counts_blocks(sample: Sample, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    _saved(tmp_path, sample.files, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0


def test_every_error_is_one_of_ours(sample: Sample, tmp_path: Path) -> None:
    """Each byte of the records and meta pages changed: saved, or refused in words."""
    refused: list[str] = []
    layout = Layout(sample.files["rows.lmdb"])
    nodes = [node for key, _, _, node in layout.entries if key == 2**64 - 1]
    places = [
        *range(0, 152, 11),
        *range(PAGE, PAGE + 152, 11),
        *(node + at for node in nodes for at in range(0, 60, 9)),
    ]
    for place in places:
        try:
            _, found = _saved(tmp_path, Case("flip", "rows.lmdb", place, 4).applied(sample.files, {}))
            assert found.rows.keys() == sample.expected.rows.keys()
        except TierstoreError as error:
            refused.append(str(error))
    assert len(refused) < len(places) // 2
    assert all("rows.lmdb" in message for message in refused)

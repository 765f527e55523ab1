"""Going back to the anchored tree: only to one that is whole, and with a way back from there."""

import os
from pathlib import Path

import pytest

from tests.io.support import STORE_ID, open_tier, recover
from tests.io.test_anchor import check_second_commit, written_after_commit
from tierstore.errors import DamagedError
from tierstore.io import anchor, opened
from tierstore.io.anchor import ANCHOR_NAME, BEFORE_NAME
from tierstore.io.btree import Meta, parse_meta
from tierstore.system import killpoints

PAGE = 4096


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """A store that was written to after its last commit, as a killed writer leaves it."""
    written_after_commit(tmp_path / "store", 7, 4)
    return tmp_path / "store later"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def roots(pages: tuple[bytes, bytes]) -> Meta:
    found = [meta for meta in map(parse_meta, pages) if isinstance(meta, Meta)]
    return max(found, key=lambda meta: meta.txn_id)


@pytest.mark.parametrize("what", ["rows", "free pages"])
def test_a_tree_that_is_not_whole_is_not_gone_back_to(later: Path, what: str) -> None:
    kept = anchor.load_anchor(later / "rows.lmdb", STORE_ID)
    assert kept is not None
    meta = roots(kept.metas)
    page = meta.main.page if what == "rows" else meta.free.page
    with (later / "rows.lmdb").open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff" * 64, page * PAGE)
    before = files(later)
    with pytest.raises(DamagedError, match=r'Nothing was changed\. mode="r" shows .* tierstore repair'):
        recover(later / "rows.lmdb")
    assert files(later) == before
    open_tier(later, readonly=True).close()
    with pytest.raises(DamagedError, match="Nothing was changed"):
        open_tier(later)
    assert files(later).items() >= before.items()


def test_what_was_there_is_kept_aside_and_can_be_gone_back_to(later: Path) -> None:
    path = later / "rows.lmdb"
    before = path.read_bytes()
    recover(path)
    after = path.read_bytes()
    assert after != before
    (later / BEFORE_NAME).rename(later / ANCHOR_NAME)
    recover(path)
    assert path.read_bytes()[: 2 * PAGE] == before[: 2 * PAGE]
    assert (later / BEFORE_NAME).exists()


@pytest.mark.parametrize("point", ["present meta pages kept aside", "anchored meta pages put back", "the first page"])
def test_a_recovery_that_was_cut_short_keeps_what_the_first_one_kept(
    later: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    class CutShortError(Exception):
        pass

    def cut(name: str) -> None:
        if name.endswith(point):
            raise CutShortError

    written: list[int] = []
    write_all = opened.write_all

    def write_one(descriptor: int, data: bytes, offset: int) -> None:
        if written:
            raise CutShortError
        written.append(offset)
        write_all(descriptor, data, offset)

    path = later / "rows.lmdb"
    before = anchor.read_metas(path, PAGE)
    with monkeypatch.context() as patch:
        if point == "the first page":
            patch.setattr(opened, "write_all", write_one)
        else:
            patch.setattr(killpoints, "hook", cut)
        with pytest.raises(CutShortError):
            recover(path)
    recover(path)
    kept = anchor.newest_slot((later / BEFORE_NAME).read_bytes())
    assert kept is not None
    assert kept.metas == before
    check_second_commit(later)

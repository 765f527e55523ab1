"""docs/limits.md says what the code holds to, and what is beyond a limit is refused with an error that says so."""

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierstore
from bench.data import ROOT
from tests.conformance.cold_tier import WIDE, keys_of, write_rows
from tests.io.support import open_tier
from tierstore import config, layout
from tierstore.cache import base as host
from tierstore.dist.plan import MAX_RANKS, Plan
from tierstore.hbm import cache as device_cache
from tierstore.io import meta, records
from tierstore.layout import RowLayout
from tierstore.store import manifest, version
from tierstore.updates.update_file import MAX_PAYLOAD_BYTES

_PAGE = 4096
_MIB = 2**20
_WIDEST = (layout.MAX_PAGES_PER_BLOCK * _PAGE // 8 - layout.BLOCK_HEADER_WORDS - layout.PAIR_WORDS) * 2  # columns


def _power(value: int, less: int = 0) -> str:
    """``value`` as a power of two, less a little."""
    assert (value + less) & (value + less - 1) == 0
    return f"2^{(value + less).bit_length() - 1}" + (f" - {less}" if less else "")


def test_the_page_has_the_numbers_of_the_code() -> None:
    text = (ROOT / "docs" / "limits.md").read_text()
    said = dict(re.findall(r"^\| (.+?) \| (.+?) \|", text, re.MULTILINE))
    most = layout.MAX_PAGES_PER_BLOCK * _PAGE - layout.BLOCK_HEADER_WORDS * layout.WORD_BYTES
    expected = {
        "rows of a table": _power(layout.MAX_ROWS),
        "columns": _power(config._MAX_DIM),
        "bytes of a stored row, with its key and checksum": f"{most:,}: {layout.MAX_PAGES_PER_BLOCK} pages of 4 KiB",
        "characters of a name": str(config._MAX_NAME),
        "tables": _power(layout.MAX_TABLES),
        "bytes of the manifest": f"{manifest._MAX_BYTES // _MIB} MiB",
        "pages of the file": f"{_power(meta.MAX_PAGES)}: {meta.MAX_PAGES * _PAGE // 2**40} TiB",
        "pages of a segment": str(layout.SEGMENT_PAGES),
        "versions kept": f"{config.MAX_KEPT_VERSIONS:,}",
        "number of a version": _power(records.MAX_VERSION, 1),
        "bytes of a commit's `extra` and tensors": f"{-(-records.MAX_PAYLOAD_BYTES // 2**40)} TiB; "
        f"{MAX_PAYLOAD_BYTES // _MIB} MiB in an update file",
        "ancestors that a commit names": str(version.MAX_ANCESTORS),
        "threads of a store": "1,024",
        "ranks of a sharded store": f"{MAX_RANKS:,}",
        "rows in memory, of a layout": _power(host.CAPACITY_MAX, 2),
        "rows in device memory, of a layout": _power(device_cache.CAPACITY_MAX, 64),
    }
    assert {name: said[name][: len(text)] for name, text in expected.items()} == expected


@pytest.mark.parametrize(
    ("make", "last", "named"),
    [
        (lambda count: tierstore.TableConfig(name="t", num_embeddings=count, embedding_dim=4), 2**40, "num_embeddings"),
        (lambda count: tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=count), 2**20, "embedding_dim"),
        (lambda count: tierstore.TableConfig(name="n" * count, num_embeddings=9, embedding_dim=4), 200, "name"),
        (lambda count: RowLayout(dim=count).pages_per_block, _WIDEST, "Split the table by columns"),
        (lambda count: tierstore.open(cold="memory", threads=count, ddr="4MiB").close(), 1024, "threads"),
        (lambda count: tierstore.open(cold="memory", keep=count, ddr="4MiB").close(), 1000, "keep"),
    ],
    ids=["rows", "columns", "name", "bytes of a row", "threads", "versions kept"],
)
def test_the_last_that_is_taken_and_the_first_that_is_not(make: Callable[[int], Any], last: int, named: str) -> None:
    make(last)
    with pytest.raises(ValueError, match=named):
        make(last + 1)


def test_the_last_version(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.set_tables({0: (WIDE, 10)})
    tier.commit(b"", records.MAX_VERSION - 1)
    write_rows(tier, WIDE, keys_of(0, [1]), 1)
    tier.commit(b"", records.MAX_VERSION)
    for use in (lambda: write_rows(tier, WIDE, keys_of(0, [1]), 1), lambda: tier.commit(b"", tier.last_version + 1)):
        with pytest.raises(ValueError, match=str(records.MAX_VERSION)):
            use()
    tier.close()
    tier = open_tier(tmp_path)
    assert tier.version == records.MAX_VERSION
    tier.close()


def test_a_plan_of_too_many_ranks_and_a_file_of_too_many_pages(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(MAX_RANKS, {}).save(path)
    assert Plan.load(path).world_size == MAX_RANKS
    Plan(MAX_RANKS + 1, {}).save(path)
    with pytest.raises(ValueError, match="world_size"):
        Plan.load(path)
    page = bytearray(meta.META_READ_BYTES)
    struct.pack_into("<H", page, 10, 8)
    struct.pack_into("<IIQQ", page, 16, meta.MAGIC, 1, 0, 0)
    struct.pack_into("<IHH5Q", page, 40, _PAGE, 8, 0, 0, 0, 0, 0, meta.NO_ROOT)
    struct.pack_into("<IHH5Q", page, 88, 0, 0, 0, 0, 0, 0, 0, meta.NO_ROOT)
    for last, fits in ((meta.MAX_PAGES - 1, True), (meta.MAX_PAGES, False)):
        struct.pack_into("<QQ", page, 136, last, 1)
        assert isinstance(meta.parse_meta(bytes(page)), meta.Meta) == fits

"""The kernels that follow LMDB's pages, on a damaged image, as plain Python: nothing is read outside the image."""

import struct

import numpy as np

from tierstore.io.btree import META_READ_BYTES, NO_ROOT, WalkStatus, list_entries, new_entries, parse_meta
from tierstore.io.free_list import check_page_use

from .image import PAGE_BYTES, build_store, edited, guarded_halves, metadata_pages, some_edits
from .target import FindingError, Target, scratch_folder

_CHUNK = 50
_FOLDER = scratch_folder()
build_store(_FOLDER / "store")
_CONTENT = (_FOLDER / "store" / "rows.lmdb").read_bytes()
_PAGES = metadata_pages(_CONTENT)


def run(data: bytes) -> None:
    image = edited(_CONTENT, _PAGES, data)
    halves = guarded_halves(image)
    for number in range(2):
        start = number * PAGE_BYTES
        meta = parse_meta(bytes(image[start : start + META_READ_BYTES]))
        if isinstance(meta, str):
            continue
        limit = len(image) // meta.page_bytes
        check_page_use(halves, meta, limit)
        if meta.main_root == NO_ROOT:
            continue
        place = (meta.page_bytes // 2, limit, meta.main_root, meta.main_depth)
        _walk(halves, place, len(image))
        keys = np.array([0, 5, 1 << 40, (1 << 64) - 1], np.uint64)
        result = np.zeros(4, np.int64)
        list_entries(halves, 0, *place, keys, keys, 1, new_entries(4), result)
        _ = WalkStatus(int(result[1]))


def _walk(halves: np.ndarray, place: tuple[int, int, int, int], size_bytes: int) -> None:
    entries, result = new_entries(_CHUNK), np.zeros(4, np.int64)
    first, second, total = np.uint64(0), np.uint64(0), 0
    while True:
        list_entries(halves, 0, *place, np.array([first]), np.array([second]), _CHUNK, entries, result)
        count = int(result[0])
        total += count
        if total > size_bytes // 8:
            raise FindingError("more entries than the file has room for")
        page_bytes = place[0] * 2
        ends = entries.pages[:count] * page_bytes + np.where(entries.pages[:count] > 0, 16 + entries.sizes[:count], 0)
        if count and (ends > size_bytes).any():
            raise FindingError("a value beyond the end of the file")
        if WalkStatus(int(result[1])) != WalkStatus.FULL:
            return
        last = (int(entries.kinds[count - 1]) << 64 | int(entries.numbers[count - 1])) + 1
        if last >> 128:
            raise FindingError("entries after the last key")
        first, second = np.uint64(last >> 64), np.uint64(last % 2**64)


def seeds() -> list[bytes]:
    """Among others: roots, and children of branch pages, beyond the end of the file."""
    beyond = 0xFFFF
    places = [(page, offset) for page in (0, 1) for offset in (80, 128)]
    for index, page in enumerate(_PAGES):
        flags, lower = struct.unpack_from("<HH", _CONTENT, page * PAGE_BYTES + 10)
        if flags == 1:
            nodes = struct.unpack_from(f"<{(lower - 16) // 2}H", _CONTENT, page * PAGE_BYTES + 16)
            places += [(index, node) for node in nodes]
    return [*(struct.pack("<BBHI", 3, page, offset, beyond) for page, offset in places), *some_edits(4)]


TARGET = Target(run=run, seeds=seeds, mutations=30)

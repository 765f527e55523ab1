"""The kernels that follow LMDB's pages, on a damaged image, as plain Python: nothing is read outside the image."""

import struct

import numpy as np

from tierstore.io import btree
from tierstore.io.btree import META_READ_BYTES, Pages, find_entries, list_tree, new_walk, parse_meta
from tierstore.io.free_list import check_page_use

from .image import PAGE_BYTES, build_store, edited, guarded_halves, metadata_pages, some_edits
from .target import FindingError, Target, scratch_folder

btree._CHUNK_ENTRIES = 50
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
        pages = Pages(halves, meta.page_bytes // 2, len(image) // meta.page_bytes, 0)
        check_page_use(pages, meta)
        for tolerant in (False, True):
            used = np.zeros((pages.limit >> 6) + 1, np.uint64) if tolerant else None
            entries = list_tree(pages, meta.main, new_walk(pages.page_halves, used), tolerant=tolerant)
            if len(entries) > len(image) // 8:
                raise FindingError("more entries than the file has room for")
            ends = entries["page"] * meta.page_bytes + np.where(entries["page"] > 0, 16 + entries["size"], 0)
            if not tolerant and (ends > len(image)).any():
                raise FindingError("a value beyond the end of the file")
        keys = np.array([0, 5, 1 << 40, (1 << 64) - 1], np.uint64)
        find_entries(pages, meta.main, keys, keys, new_walk(pages.page_halves))


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

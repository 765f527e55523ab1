"""A small store, and edits of its files that lead somewhere: an input is a list of edits, not a whole file."""

import functools
import struct
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore import optim

from .mutate import INTERESTING
from .target import scratch_folder

PAGE_BYTES: Final = 4096
EDIT_BYTES: Final = 8
WIDE = tierstore.TableConfig(
    name="wide", num_embeddings=700, embedding_dim=250, optimizer=optim.SGD(lr=1.0), init=tierstore.init.Constant(0.5)
)
NARROW = tierstore.TableConfig(name="narrow", num_embeddings=900, embedding_dim=8, dtype="bfloat16")
TENSORS = {"w": torch.arange(6.0).reshape(2, 3)}
EXTRA = {"step": 7}


@functools.cache
def built_store() -> Path:
    """Two tables, two levels of tree, pages freed by a second commit, a payload with tensors, an anchor."""
    folder = scratch_folder() / "store"
    with tierstore.open(folder, ddr="4MiB", threads=1) as store:
        wide, narrow = store.create_table(WIDE), store.create_table(NARROW)
        wide.write(torch.arange(560), torch.arange(560.0)[:, None].expand(560, WIDE.embedding_dim).contiguous())
        narrow.write(torch.arange(900), torch.ones(900, 8, dtype=torch.bfloat16))
        store.commit()
        ids = torch.arange(0, WIDE.num_embeddings, 7)
        wide.write(ids, torch.full((len(ids), WIDE.embedding_dim), -1.0))
        store.commit(extra=EXTRA, tensors=TENSORS)
    return folder


def metadata_pages(content: bytes) -> list[int]:
    pages = []
    for page in range(len(content) // PAGE_BYTES):
        number, _, flags = struct.unpack_from("<QHH", content, page * PAGE_BYTES)
        if number == page and flags & 0x0B:
            pages.append(page)
    return pages


def edited(content: bytes, pages: list[int], data: bytes) -> bytearray:
    """``content`` after the edits in ``data``, eight bytes each: kind, place in ``pages`` (or anywhere), value."""
    image = bytearray(content)
    for kind, page, offset, value in struct.iter_unpack("<BBHI", data[: len(data) // EDIT_BYTES * EDIT_BYTES]):
        at = pages[page % len(pages)] * PAGE_BYTES + offset % PAGE_BYTES
        if kind & 0x80:
            at = (page << 16 | offset) * 16 % len(image)
        kind &= 0x7F
        width = (1, 1, 2, 4, 8, 8)[kind % 6]
        at = min(at, len(image) - width)
        if kind % 6 == 0:
            image[at] ^= 1 << value % 8
        elif kind % 6 == 5:
            image[at : at + 8] = (INTERESTING[value % len(INTERESTING)]).to_bytes(8, "little")
        else:
            image[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    return image


def some_edits(step: int) -> list[bytes]:
    """Every ``step``-th of edits at the places where LMDB's pages and meta pages keep what they say of themselves."""
    offsets = (10, 12, 14, 16, 18, 20, 40, 48, 88, 94, 128, 136, 144)
    return [
        b"".join(struct.pack("<BBHI", kind, page, offset, 3 + page) for kind in (0, 2, 5))
        for page in range(4)
        for offset in offsets
    ][::step]


class GuardedArray(np.ndarray):
    """An array whose elements are used only within its bounds: an index below 0 would be read from the end."""

    def __getitem__(self, at: object) -> object:
        self._check(at)
        return super().__getitem__(at)

    def __setitem__(self, at: object, value: object) -> None:
        self._check(at)
        super().__setitem__(at, value)

    def _check(self, at: object) -> None:
        if isinstance(at, int | np.integer) and not 0 <= at < len(self):
            raise IndexError(f"element {at} of {len(self)} was used")


def guarded_halves(image: bytearray) -> NDArray[np.uint16]:
    return np.frombuffer(bytes(image), np.uint16).view(GuardedArray)

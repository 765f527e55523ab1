"""Calls from a shared object into the C library, led through Python: its global offset table is rewritten.

The table holds the addresses of the functions that an object calls and that others define. One entry rewritten leads
all calls of that function from that object, and no others, to a callback; no compiler and no preloading is needed. The
format is that of the System V ABI and its supplements for x86-64 and AArch64, 64 bit, little-endian.
"""

import ctypes
import mmap
import platform
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Entry", "entries", "object_of", "redirect"]

_JUMP_SLOTS: Final = {"x86_64": {6, 7}, "aarch64": {1025, 1026}}
"""GLOB_DAT and JUMP_SLOT: relocations that put the bare address of a symbol into the table."""
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_JMPREL = 2, 5, 6, 7, 8, 23
_PROT_READ, _PROT_WRITE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Entry(NamedTuple):
    symbol: str  # the function's name, such as ``pwrite64``
    address: int  # where the entry lies in memory


class _Mapping(NamedTuple):
    start: int
    end: int
    writable: bool
    offset: int
    path: str


def _mappings() -> list[_Mapping]:
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        found.append(_Mapping(start, end, "w" in flags, int(offset, 16), path[0] if path else ""))
    return found


def object_of(address: int) -> Path:
    return Path(next(m.path for m in _mappings() if m.start <= address < m.end))


class _Elf:
    def __init__(self, path: Path) -> None:
        self._image = path.read_bytes()
        assert self._image[:6] == b"\x7fELF\x02\x01", f"{path} is not a 64 bit little-endian object"
        start, size, count = struct.unpack_from("<Q14xHH", self._image, 32)
        headers = [struct.unpack_from("<IIQQQQ", self._image, start + size * number) for number in range(count)]
        self._loads = [(vaddr, offset, length) for kind, _, offset, vaddr, _, length in headers if kind == _PT_LOAD]
        _, _, offset, _, _, length = next(header for header in headers if header[0] == _PT_DYNAMIC)
        self._dynamic = dict(struct.iter_unpack("<QQ", self._image[offset : offset + length]))

    @property
    def first_address(self) -> int:
        return min(vaddr - offset for vaddr, offset, _ in self._loads if offset == 0)

    def _offset(self, address: int) -> int:
        return next(address - vaddr + offset for vaddr, offset, length in self._loads if 0 <= address - vaddr < length)

    def _symbol(self, number: int) -> str:
        (name,) = struct.unpack_from("<I", self._image, self._offset(self._dynamic[_DT_SYMTAB]) + 24 * number)
        start = self._offset(self._dynamic[_DT_STRTAB]) + name
        return self._image[start : self._image.index(b"\0", start)].decode()

    def slots(self) -> Iterable[tuple[str, int]]:
        kinds = _JUMP_SLOTS[platform.machine()]
        for table, size in ((_DT_RELA, _DT_RELASZ), (_DT_JMPREL, _DT_PLTRELSZ)):
            if table in self._dynamic:
                start = self._offset(self._dynamic[table])
                for address, info, _ in struct.iter_unpack(
                    "<QQq", self._image[start : start + self._dynamic[size] // 24 * 24]
                ):
                    if info & 0xFFFFFFFF in kinds:
                        yield self._symbol(info >> 32), address


def entries(path: Path, symbols: Iterable[str]) -> list[Entry]:
    elf, wanted = _Elf(path), set(symbols)
    base = next(m.start for m in _mappings() if m.path == str(path) and m.offset == 0) - elf.first_address
    return [Entry(symbol, base + address) for symbol, address in elf.slots() if symbol in wanted]


def redirect(targets: Iterable[tuple[Entry, int]]) -> list[tuple[Entry, int]]:
    mappings, before = _mappings(), []
    for entry, target in targets:
        page = entry.address & -mmap.PAGESIZE
        writable = next(m.writable for m in mappings if m.start <= entry.address < m.end)
        if not writable:
            _protect(page, _PROT_READ | _PROT_WRITE)
        place = ctypes.c_uint64.from_address(entry.address)
        before.append((entry, place.value))
        place.value = target
        if not writable:
            _protect(page, _PROT_READ)
    return before


def _protect(page: int, protection: int) -> None:
    if _libc.mprotect(page, mmap.PAGESIZE, protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")

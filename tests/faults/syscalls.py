"""Every call that changes a directory of files, recorded as it is made, and made to fail where a test wants it.

LMDB's extension and the Python interpreter are led through callbacks, so nothing that either of them writes is missed:
pages, meta pages, anchors, manifests, renames, syncs, from whatever thread. What reaches a file through a shared map
is not seen: tierstore writes only LMDB's table of readers that way, which no recovery reads.

The global offset table of an object holds the addresses of functions that it calls and others define. An entry that is
rewritten leads all calls of that function from that object, and no others, to a callback; no compiler and no preloading
is needed. The format is that of the System V ABI and its supplements for x86-64 and AArch64, 64 bit, little-endian.
"""

import ctypes
import functools
import itertools
import mmap
import os
import platform
import stat
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import lmdb.cpython

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


Kind = Literal["create", "link", "mkdir", "rename", "sync", "truncate", "unlink", "write"]
Tree = dict[int, "bytes | dict[str, int]"]
"""Files (their bytes) and directories (their entries) by number; 0 is the root."""

_SIZED: Final = {"write", "pwrite", "writev"}  # these return a count of bytes, the others 0, -1 or a file descriptor
_MODELLED: Final = _SIZED | {"open", "fsync", "fdatasync", "ftruncate", "rename", "link", "unlink", "mkdir"}
_UNMODELLED: Final = {
    *("msync", "truncate", "posix_fallocate", "pwritev", "pwritev2", "sendfile", "splice", "copy_file_range"),
    *("openat", "renameat", "linkat", "unlinkat", "mkdirat", "symlink", "rmdir"),
}
"""A recorded program that makes one of these calls is one that the record would be wrong about."""
_NAMES: Final = {
    variant: name
    for name in _MODELLED | _UNMODELLED
    for variant in (name, f"{name}64", f"{name.removesuffix('2')}64v2")
}

_WORD = ctypes.c_uint64
_Function = ctypes.CFUNCTYPE(ctypes.c_int64, *[_WORD] * 6, use_errno=True)
_local = threading.local()
_active: "Recorder | None" = None


class Call(NamedTuple):
    name: str  # ``pwrite``, ``fdatasync``, ``open`` (one that creates a file) and so on
    path: Path  # what it changes, as it was named when it was opened or first seen
    size_bytes: int  # of a write


@dataclass(slots=True)
class Operation:
    kind: Kind
    inode: int  # the file that is written, synced, created or linked; for "sync" it may be a directory
    directory: int = -1  # whose entries change, or -1
    name: str = ""
    old_name: str = ""  # the entry that appears, and the one that goes away
    offset: int = 0  # in bytes, of a write; the new size, of a truncation
    data: bytes = b""
    began: int = -1
    ended: int = -1  # times on the recorder's clock; ``ended`` is -1 while under way
    failed: bool = False  # the call returned an error


class Mark(NamedTuple):
    time: int
    label: str
    value: Any


def read_tree(root: Path) -> tuple[Tree, dict[tuple[int, int], int], dict[int, Path]]:
    tree: Tree = {}
    numbers: dict[tuple[int, int], int] = {}
    paths: dict[int, Path] = {}

    def visit(path: Path) -> int:
        status = path.lstat()
        key = status.st_dev, status.st_ino
        if key in numbers:
            return numbers[key]
        number = numbers[key] = len(numbers)
        paths[number] = path
        if stat.S_ISDIR(status.st_mode):
            entries_: dict[str, int] = {}
            tree[number] = entries_
            entries_.update({child.name: visit(child) for child in sorted(path.iterdir())})
        else:
            tree[number] = path.read_bytes()
        return number

    visit(root)
    return tree, numbers, paths


@dataclass
class Recorder:
    """While it is entered, records what changes below ``root``, a directory that exists.

    Args:
        fail: asked before each call; None lets it happen, an errno makes it fail with that, 0 writes half of the data.

    Attributes:
        before: the files when it was entered, taken to be on the device.
        operations: in the order in which they began.
        problems: calls that the record does not hold; a test asserts that there are none.
    """

    root: Path
    fail: Callable[[Call], int | None] = lambda call: None
    before: Tree = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = self.root.absolute()
        self._lock = threading.Lock()
        self._clock = itertools.count()

    def __enter__(self) -> "Recorder":
        global _active
        assert _active is None, "one recorder at a time"
        self.before, self._numbers, self._paths = read_tree(self.root)
        addresses = {symbol: ctypes.cast(each, ctypes.c_void_p).value or 0 for symbol, each in _callbacks().items()}
        self._replaced = redirect([(entry, addresses[entry.symbol]) for entry in _table()])
        _active = self
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        _active = None
        redirect(self._replaced)

    def mark(self, label: str, value: Any = None) -> None:
        with self._lock:
            self.marks.append(Mark(next(self._clock), label, value))

    def name_of(self, inode: int) -> str:
        return self._paths[inode].name

    @property
    def time(self) -> int:
        with self._lock:
            return next(self._clock)

    def handle(self, name: str, arguments: tuple[int, ...]) -> int:
        operation, path = self._describe(name, arguments)
        if operation is None:
            return _call(name, arguments)
        code = self.fail(Call(name, path, len(operation.data)))
        with self._lock:
            operation.began = next(self._clock)
            self.operations.append(operation)
        if code is None:
            result = _call(name, arguments)
        elif code:
            ctypes.set_errno(code)
            result = -1
        else:
            assert name in _SIZED, "only a write can be cut short"
            result = _write_part(arguments[0], operation.data[: len(operation.data) // 2], operation.offset, name)
        self._complete(name, arguments, operation, result)
        with self._lock:
            operation.ended = next(self._clock)
        return result

    def _describe(self, name: str, arguments: tuple[int, ...]) -> tuple[Operation | None, Path]:
        if name in _UNMODELLED:
            self.problems.append(f"{name} is not recorded")
            return None, self.root
        if name in ("open", "rename", "link", "unlink", "mkdir"):
            return self._describe_path(name, arguments)
        descriptor = ctypes.c_int(arguments[0]).value
        number = self._number_of(os.fstat(descriptor))
        if number is None:
            return None, self.root
        path = self._paths[number]
        if name in ("fsync", "fdatasync"):
            return Operation("sync", number), path
        if name == "ftruncate":
            return Operation("truncate", number, offset=arguments[1]), path
        offset = arguments[3] if name == "pwrite" else os.lseek(descriptor, 0, os.SEEK_CUR)
        return Operation("write", number, offset=offset, data=_data(name, arguments)), path

    def _describe_path(self, name: str, arguments: tuple[int, ...]) -> tuple[Operation | None, Path]:
        path = Path(os.fsdecode(ctypes.string_at(arguments[0]))).absolute()
        target = path
        if name in ("rename", "link"):
            target = Path(os.fsdecode(ctypes.string_at(arguments[1]))).absolute()
        if self.root not in target.parents:
            return None, path
        if not target.parent.is_dir():
            return None, path  # the call is going to fail
        directory = self._number_of(target.parent.stat())
        if directory is None:
            self.problems.append(f"{name} of {target} in a directory made by other means")
            return None, path
        if name == "open":
            return self._describe_open(path, directory, ctypes.c_int(arguments[1]).value)
        if name == "mkdir":
            return Operation("mkdir", -1, directory, path.name), path
        number = self._number_of(path.lstat()) if path.exists() else None
        if number is None:
            return None, path  # the call is going to fail
        if name == "unlink":
            return Operation("unlink", number, directory, old_name=path.name), path
        if path.parent != target.parent:
            self.problems.append(f"{name} from one directory to another")
        old_name = path.name if name == "rename" else ""
        return Operation("rename" if name == "rename" else "link", number, directory, target.name, old_name), target

    def _describe_open(self, path: Path, directory: int, flags: int) -> tuple[Operation | None, Path]:
        if flags & os.O_APPEND:
            self.problems.append(f"{path} opened for appending")
        if path.exists():
            number = self._number_of(path.stat())
            if flags & os.O_TRUNC and number is not None:
                return Operation("truncate", number), path
            return None, path
        if not flags & os.O_CREAT:
            return None, path
        return Operation("create", -1, directory, path.name), path

    def _complete(self, name: str, arguments: tuple[int, ...], operation: Operation, result: int) -> None:
        if result < 0:
            operation.failed = True
            return
        if operation.kind == "write":
            operation.data = operation.data[:result]
        elif operation.kind in ("create", "mkdir"):
            path = Path(os.fsdecode(ctypes.string_at(arguments[0]))).absolute()
            status = path.stat()
            with self._lock:
                operation.inode = len(self._paths)
                self._paths[operation.inode] = path
                self._numbers[status.st_dev, status.st_ino] = operation.inode

    def _number_of(self, status: os.stat_result) -> int | None:
        return self._numbers.get((status.st_dev, status.st_ino))


def _data(name: str, arguments: tuple[int, ...]) -> bytes:
    if name != "writev":
        return ctypes.string_at(arguments[1], arguments[2])
    count = ctypes.c_int(arguments[2]).value
    pairs = (_WORD * (2 * count)).from_address(arguments[1])
    return b"".join(ctypes.string_at(pairs[2 * i], pairs[2 * i + 1]) for i in range(count))


def _write_part(descriptor: int, data: bytes, offset: int, name: str) -> int:
    written = os.pwrite(ctypes.c_int(descriptor).value, data, offset)
    if name != "pwrite":
        os.lseek(ctypes.c_int(descriptor).value, offset + written, os.SEEK_SET)
    return written


def _call(name: str, arguments: tuple[int, ...]) -> int:
    result = ctypes.c_int64(_real(name)(*arguments)).value
    return result if name in _SIZED else ctypes.c_int(result).value


@functools.cache
def _real(name: str) -> Any:
    function = _libc[name]
    function.argtypes = [_WORD] * 6
    function.restype = ctypes.c_int64
    return function


@functools.cache
def _table() -> list[Entry]:
    interpreter = object_of(ctypes.cast(ctypes.pythonapi.PyLong_FromLong, ctypes.c_void_p).value or 0)
    return [each for path in (Path(lmdb.cpython.__file__).resolve(), interpreter) for each in entries(path, _NAMES)]


@functools.cache
def _callbacks() -> dict[str, Any]:
    """By symbol; they are kept for good, for a thread may be in one at any time."""
    return {symbol: _Function(_callback_of(symbol)) for symbol in _NAMES}


def _callback_of(symbol: str) -> Callable[..., int]:
    name = _NAMES[symbol]
    real_name = symbol if name in _UNMODELLED else name

    def callback(*arguments: int) -> int:
        recorder = _active
        if recorder is None or getattr(_local, "busy", False):
            return _call(real_name, arguments)
        _local.busy = True
        try:
            return recorder.handle(name, arguments)
        except BaseException as error:  # it would vanish: C code cannot pass it on
            recorder.problems.append(f"{name}: {error!r}")
            ctypes.set_errno(5)
            return -1
        finally:
            _local.busy = False

    return callback

"""The one way kernels are compiled: nopython, without the GIL, cached on disk.

numba compiles one kernel at a time in a process. So the first process of a machine that must compile starts another
one, which compiles what the rest of a first run needs, last things first (``warm_up/ahead.py``). A kernel is compiled
by the process that has locked it; others wait, then load it from the cache.

``NUMBA_DISABLE_JIT=1`` runs every kernel as plain Python; tests use it to check the kernels' logic twice. Members of an
IntEnum are indexes of arrays in kernels, which numba before 0.68 does not take.
"""

# ruff: noqa: ARG001 (numba wants an overload and what it gives to take the same arguments)

import atexit
import contextlib
import fcntl
import functools
import gc
import glob
import logging
import math
import operator
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast

import numba
import numpy as np
import xxhash
from numba import types
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import overload

from ..system import __version__
from ..system.processes import child_options
from ..system.signals import shielded
from .threads import default_threads


@overload(operator.getitem)
def _getitem(array: Any, index: Any) -> Any:
    def get(array: Any, index: Any) -> Any:
        return array[index.value]

    return get if isinstance(array, types.Array) and isinstance(index, types.IntEnumMember) else None


@overload(operator.setitem)
def _setitem(array: Any, index: Any, value: Any) -> Any:
    def put(array: Any, index: Any, value: Any) -> None:
        array[index.value] = value

    return put if isinstance(array, types.Array) and isinstance(index, types.IntEnumMember) else None


def roots() -> Iterator[Path]:
    """The folders to try, best first: NUMBA_CACHE_DIR, the user's cache, and for a user without one a private folder
    among the temporary files. Each release has its own, as another may still run."""
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR)
    for place in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(place):
            yield Path(place, "tierstore", __version__)
    private = Path(tempfile.gettempdir(), f"tierstore-{os.geteuid()}")
    private.mkdir(mode=0o700, exist_ok=True)
    # Users who can write there have this process run what they like.
    found = private.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        yield private / __version__


if numba.config.CACHE_DIR:  # by a name that holds in other folders too, in which children begin
    os.environ["NUMBA_CACHE_DIR"] = numba.config.CACHE_DIR = os.path.abspath(numba.config.CACHE_DIR)
JIT_ENABLED: Final = not numba.config.DISABLE_JIT
_LOG: Final = logging.getLogger("tierstore")
_SCRIPT: Final = Path(__file__).parents[1] / "warm_up" / "ahead.py"
_POLL_SECONDS: Final = 0.02
_PATIENCE_SECONDS: Final = 60

F = TypeVar("F", bound=Callable[..., Any])


def _stamp_of_sources() -> str:
    """Of contents, not of times: an image's layers keep whole seconds of these. Takes 15 ms."""
    root, found = Path(__file__).parents[1], xxhash.xxh3_128()
    for name in sorted(glob.glob("**/*.py", root_dir=root, recursive=True)):
        found.update(name.encode() + (root / name).read_bytes())
    return found.hexdigest()


_STAMP: Final = _stamp_of_sources() if JIT_ENABLED else ""


class FirstUse(event.Listener):  # type: ignore[misc, unused-ignore]
    """Listens to numba's compiler. ``folder``: where machine code is kept, with a ``stamp`` of what it depends on.
    ``compiled`` counts kernels that this process compiled; ``is_alone``: it starts no other process."""

    def __init__(self, folder: Path | None, stamp: str = "") -> None:
        self._locks = folder and folder / "tierstore.lock"
        self._done = folder and folder / "tierstore.done"
        self._stamp = stamp
        self._is_locking = False
        self._outermost: Any = None
        self._collects = False
        self._ahead: subprocess.Popen[bytes] | None = None
        self._is_logged = False
        self.compiled = 0
        self.is_alone = False

    @contextlib.contextmanager
    def claimed(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """While entered, no other process compiles the kernel. Without ``wait``: gives whether that is so."""
        if self._locks is None or self._is_locking:
            yield True
            return
        with contextlib.ExitStack() as stack:
            is_mine = True
            with contextlib.suppress(OSError):  # no room for it, or a file system without locks
                descriptor = os.open(self._locks, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, descriptor)  # which unlocks
                is_mine = self._lock(descriptor, zlib.crc32(name.encode()), wait=wait)
            self._is_locking = is_mine
            stack.callback(setattr, self, "_is_locking", False)
            yield is_mine

    def _lock(self, descriptor: int, place: int, *, wait: bool) -> bool:
        """Waits for the process that compiles it, but not for ever: that may have been stopped."""
        for _ in range(int(_PATIENCE_SECONDS / _POLL_SECONDS) + 1):
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                return True
            if not wait:
                return False
            self._log()
            time.sleep(_POLL_SECONDS)
        return True

    def on_start(self, event: Any) -> None:
        """numba begins to compile a function: a kernel, or what it calls."""
        dispatcher = event.data["dispatcher"]
        if self._outermost is not None or not str(dispatcher.py_func.__module__).startswith("tierstore."):
            return
        self._outermost = dispatcher
        self._collects = gc.isenabled()
        gc.disable()  # nine tenths of what the compiler makes lives until it ends
        self._log()
        if not self.is_alone and (self._ahead is None or self._ahead.returncode):  # it ends with a thread
            self._begin()

    def on_end(self, event: Any) -> None:
        if event.data["dispatcher"] is self._outermost:
            self._outermost = None
            self.compiled += 1
            if self._collects:
                gc.enable()

    def note_done(self) -> None:
        """Later processes that compile something start no other one."""
        if self._done is not None:
            with contextlib.suppress(OSError):
                self._done.write_text(self._stamp)

    def disown(self) -> None:
        """Forget, in a forked process, what its parent was about to compile."""
        if self._outermost is not None and self._collects:
            gc.enable()
        self._outermost = None

    def _log(self) -> None:
        if not self._is_logged:
            self._is_logged = True
            # A warning where logging was not set up, which would show nothing less.
            log = _LOG.info if _LOG.hasHandlers() else _LOG.warning
            log(
                "compiling kernels that this machine has not used before (some seconds; later runs load them from disk)"
            )

    def _begin(self) -> None:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # of processes that torchrun starts
        is_one = default_threads() == 1 or not is_first or hasattr(sys, "frozen")
        done = self._done
        with contextlib.suppress(OSError, ValueError):
            is_one = is_one or (done is not None and done.read_text() == self._stamp)
        if done is None or is_one:
            self.is_alone = True
            return
        with contextlib.suppress(OSError):
            done.unlink(missing_ok=True)  # it is of other sources, whose kernels are replaced now
        try:
            self._ahead = start("first_run", 1, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            threading.Thread(target=self._ahead.wait, daemon=True).start()
        except Exception:
            self.is_alone = True
            return
        atexit.register(_end, self._ahead, os.getpid())


def start(work: str, processes: int, **options: Any) -> "subprocess.Popen[bytes]":
    """Start ``warm_up/ahead.py``; it ends with the thread that started it."""
    command = [sys.executable, "-P", str(_SCRIPT), str(os.getpid()), work, str(processes)]
    return subprocess.Popen(command, **child_options(), **options)


def _end(process: "subprocess.Popen[bytes]", parent: int) -> None:
    if os.getpid() == parent:
        process.kill()
        process.communicate()


def _compile(function: Callable[..., Any], *, from_python: bool = True, **options: Any) -> Any:
    # Nobody in C calls kernels by name, and nobody at all helpers but kernels, in whose machine code they are. Wrappers
    # for such callers, and keeping helpers on disk, took a quarter of the time to compile everything.
    wrappers = {"no_cfunc_wrapper": True, "no_cpython_wrapper": not from_python}
    compiled: Any = numba.njit(nogil=True, error_model="numpy", **wrappers, **options)(function)
    if from_python and FOLDER is not None:
        _keep(compiled, function)
    return compiled


def _keep(compiled: Any, function: Callable[..., Any]) -> None:
    with contextlib.suppress(RuntimeError, OSError):
        compiled._cache = _Cache(function)


def kernel(function: F, **options: Any) -> F:
    """Compile at first call; the machine code is kept in the user's cache folder. ``options``: of ``numba.njit``."""
    compiled: Any = _compile(function, **options)
    if JIT_ENABLED:
        compiled.__class__ = _Kernel
    return cast(F, compiled)


def _by_type(function: F, *, constants: int = 0, **options: Any) -> F:
    """A helper, compiled once for a type of number, not again for each constant that is passed: that took as long as
    all the rest. Of its first ``constants`` arguments, each constant has a version of its own."""
    compiled: Any = _compile(function, from_python=False, **options)
    if JIT_ENABLED:
        compiled.__class__ = _Helper
        resolve = compiled.get_call_template

        def by_type(args: Any, kws: Any) -> Any:
            plain = {name: types.unliteral(kind) for name, kind in kws.items()}
            return resolve((*args[:constants], *map(types.unliteral, args[constants:])), plain)

        compiled.get_call_template = by_type
    return cast(F, compiled)


def inline(function: F) -> F:
    """A helper of kernels, compiled into its callers, which alone can call it."""
    return _by_type(function)


# Uncounted: without reference counting; the function must create no array, string or other counted object. Where a
# tuple of arrays is passed to a helper, numba counts by atomic instructions: two to four times as slow.


def uncounted_kernel(function: F) -> F:
    return kernel(function, _nrt=False)


def uncounted_helper(function: F) -> F:
    return _by_type(function, _nrt=False)


def uncounted_inline(function: F) -> F:
    """A helper of uncounted kernels, merged into its callers: calls, which pass an array by seven words, are dear."""
    return _by_type(function, _nrt=False, forceinline=True)


def uncounted_template(function: F) -> F:
    """As ``uncounted_inline``, compiled again for each constant that is its first argument."""
    return _by_type(function, constants=1, _nrt=False, forceinline=True)


if JIT_ENABLED:
    from llvmlite import ir
    from llvmlite.binding import get_host_cpu_name
    from numba.core import cgutils, errors
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
    from numba.core.ccallback import CFunc
    from numba.core.registry import CPUDispatcher
    from numba.extending import intrinsic

    class _Locator(_CacheLocator):  # type: ignore[misc, unused-ignore]
        """The folder for a file's kernels: below one of ``roots``, by the path of the file's own folder."""

        def __init__(self, path: str, disambiguator: str) -> None:
            self._path = path
            self._disambiguator = disambiguator

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> "_Locator | None":
            for root in roots():
                path = str(root / cls.get_suitable_cache_subpath(py_file))
                locator = cls(path, str(py_func.__code__.co_firstlineno))
                with contextlib.suppress(OSError):
                    locator.ensure_cache_path()
                    return locator
            return None

        def get_cache_path(self) -> str:
            return self._path

        def get_source_stamp(self) -> object:
            """All sources: helpers that were compiled into a kernel may lie in other files than its own."""
            return _STAMP

        def get_disambiguator(self) -> str:
            return self._disambiguator

    class _Place(CompileResultCacheImpl):  # type: ignore[misc, unused-ignore]
        _locator_classes: ClassVar = [_Locator]

    class _Cache(FunctionCache):  # type: ignore[misc, unused-ignore]
        """Whatever becomes of the folder, a kernel that was compiled is used; what cannot be loaded is compiled."""

        _impl_class = _Place

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)
            except Exception:
                try:
                    self.flush()  # an index that cannot be read would never be written again
                except Exception as error:
                    _tell_not_kept(self.cache_path, error)
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)
            except Exception as error:
                _tell_not_kept(self.cache_path, error)

    @functools.cache
    def _tell_once(folder: str, reason: str) -> None:
        _LOG.warning(
            "%s: machine code cannot be kept there (%s), so later processes compile their kernels again; nothing else "
            "depends on it. Make room there, or set NUMBA_CACHE_DIR to a folder that this user can write to",
            folder, reason,
        )  # fmt: skip

    def _tell_not_kept(folder: str, error: Exception) -> None:
        _tell_once(folder, getattr(error, "strerror", None) or str(error) or type(error).__name__)

    class _Kernel(CPUDispatcher):  # type: ignore[misc, unused-ignore]
        @shielded  # numba's lock would stay taken where a signal's handler raised
        def compile(self, sig: Any) -> Any:
            with FIRST_USE.claimed(f"{self.py_func.__module__}.{self.py_func.__name__}"):
                return super().compile(sig)

    class _Helper(CPUDispatcher):  # type: ignore[misc, unused-ignore]
        """Without a wrapper there is nothing that Python could call: it would end the process."""

        def __call__(self, *_args: object, **_kwargs: object) -> None:
            raise TypeError(f"{self.py_func.__name__} is a helper: only kernels can call it")

    def _folder() -> Path | None:
        """Where machine code of this file is kept, if anywhere."""
        try:
            return Path(_Cache(_folder).cache_path)
        except (RuntimeError, OSError):
            _LOG.warning(
                "no folder to keep machine code in, so each process compiles its kernels again, which takes some "
                "seconds: set NUMBA_CACHE_DIR to a folder that this user can write to"
            )
            return None

    FOLDER: Path | None = _folder()
    _BUILT_WITH: Final = _STAMP, sys.version, numba.__version__, get_host_cpu_name()
    FIRST_USE = FirstUse(FOLDER, f"{zlib.crc32(repr(_BUILT_WITH).encode()):08x}")
    event.register("numba:compile", FIRST_USE)
    os.register_at_fork(after_in_child=FIRST_USE.disown)
    # A fork waits for a thread that compiles: the child's own first kernel would wait for it for ever.
    os.register_at_fork(
        before=global_compiler_lock.acquire, after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )  # fmt: skip

    def callback(function: Callable[..., None], *arguments: Any) -> Any:
        """A kernel for C, given numba's types of its arguments; its ``address`` is good as long as the object lives."""
        made = CFunc(function, (arguments, types.void), locals={}, options={"error_model": "numpy"})
        if FOLDER is not None:
            _keep(made, function)
        shielded(made.compile)()
        return made

    def require_contiguous(array: Any) -> None:
        """TypingError, where a kernel is compiled, for arrays that have gaps between elements."""
        if array.layout != "C":
            raise errors.TypingError(f"an array of layout {array.layout!r} where a contiguous one is needed")

    def address_of(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any) -> Any:
        """Of ``array[row, column]``, a pointer to bytes; elements of a row lie side by side."""
        made = context.make_array(array_type)(context, builder, array)
        stride = cgutils.unpack_tuple(builder, made.strides)[0]
        start = builder.bitcast(made.data, ir.IntType(8).as_pointer())
        size = ir.Constant(stride.type, context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
        return builder.gep(start, [builder.add(builder.mul(row, stride), builder.mul(column, size))])

    def _prefetching(write: int) -> Any:
        """Brings the cache line of ``array[index]`` nearer, to be written or only read; never faults. An index of an
        array's elements end to end, or a row and a column."""

        @intrinsic
        def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                int32, place = ir.IntType(32), args[1]
                if isinstance(index, types.BaseTuple):
                    pointer = address_of(context, builder, array, args[0], *cgutils.unpack_tuple(builder, place))
                else:
                    data = context.make_array(array)(context, builder, args[0]).data
                    pointer = builder.bitcast(builder.gep(data, [place]), ir.IntType(8).as_pointer())
                shape = ir.FunctionType(ir.VoidType(), [pointer.type, int32, int32, int32])
                function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], shape)
                keep_in_all_levels, data_cache = int32(3), int32(1)
                builder.call(function, [pointer, int32(write), keep_in_all_levels, data_cache])
                return context.get_dummy_value()

            return types.void(array, index), generate

        return prefetch

    prefetch_item, prefetch_word = _prefetching(1), _prefetching(0)

    @intrinsic
    def fused_multiply_add(typing_context: Any, one: Any, other: Any, term: Any) -> Any:
        """``one * other + term`` of float32, rounded once."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.fma(*args)

        return types.float32(types.float32, types.float32, types.float32), generate

else:
    FOLDER = None
    FIRST_USE = FirstUse(None)

    def prefetch_item(array: Any, index: Any) -> None:
        """Nothing: a hint to the processor."""

    prefetch_word = prefetch_item

    def fused_multiply_add(one: Any, other: Any, term: Any) -> Any:
        """The product is exact in float64. The sum is rounded to odd there, and that to nearest in float32 (Boldo and
        Melquiond: Emulation of a FMA and Correctly Rounded Sums, IEEE Transactions on Computers 57, 2008)."""
        product, addend = float(one) * float(other), float(term)
        total = product + addend
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        if lost and not np.float64(total).view(np.uint64) & np.uint64(1):
            total = math.nextafter(total, math.copysign(math.inf, lost))
        return np.float32(total)

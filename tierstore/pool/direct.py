"""Lookups by one call of compiled code, for tables where every row has its own slot; and small lookups of one table.

The call splits itself over torch's threads, which need no GIL. Handing them ranges from Python takes 25 to 80 us, as
long as looking up 20,000 rows. Here compiled code calls ``GOMP_parallel``, and the threads that this wakes find
the arguments of ``kernels.look_up`` in an array of words on the caller's stack. A caller's ids and offsets are given by
their addresses: making arrays of tensors takes as long as adding 100 rows.

Callers may change ids and offsets meanwhile: each is read once, and what was read is checked and used.
"""

import functools
import sys
import weakref
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..cache.base import LOADING, RESIDENT
from ..cache.cache_state import Tally
from ..cache.full import HITS_IN_PLACE, FullCache
from ..errors import ClosedError
from ..kernels import slots as kernels
from ..kernels.arrays import Bytes, Floats, Ids, Int32s, Int64s, Weights
from ..kernels.floats import FLOAT32
from ..kernels.jit import JIT_ENABLED, inline, kernel, uncounted_kernel
from ..kernels.threads import Workers
from ..layout import KEY_ROW_BITS
from ..system.signals import shielded
from .joined import NO_ARG_MAX, NO_FLOATS, NO_INTS
from .leases import Arena, Leases

_FINDING: Final = 32  # Columns: finding a row takes as long as adding so many
_PART_WORK: Final = 80_000  # ids times columns, some 10 us; waking a thread takes 1 or 2
_PARTS_MAX: Final = 256
_PARTS_A_THREAD: Final = 8
_ASKED: Final = RESIDENT | LOADING
_NEXT, _STATUS, _ARGUMENTS = 0, 1, 1 + _PARTS_MAX
_BODY, _THREADS, _TALLIES, _NUM_ARGUMENTS = 30, 31, 32, 33
_FILLED: Final = int(Tally.FILLED)
_NUM_WORDS: Final = _ARGUMENTS + _NUM_ARGUMENTS
_COLUMN: Final = np.zeros(1, np.int32)
_ID_TYPES: Final[dict[Any, Any]] = {torch.int64: np.int64, torch.int32: np.int32}


def few(workers: Workers, dim: int) -> int:
    """Of so many ids and more, in rows of ``dim`` columns, a lookup is worth two threads."""
    return sys.maxsize if workers.threads == 1 else -(-2 * _PART_WORK // (_FINDING + dim))


def look_up(
    arena: Arena, cache: FullCache, ids: Ids, plan: Any, scale: Floats, mode: int, columns: Ids, out: Floats,
    arg_max: Int32s, slots: Int32s,
) -> list[int]:  # fmt: skip
    """``kernels.look_up`` of all bags in an arena and its cache, by as many threads as it is worth: what ranges of bags
    returned instead of ``DONE``; if nothing, hits are counted. ``plan``: the arguments from ``starts`` to
    ``bag_starts``. The caller holds the lock over the rows."""
    *before, batch, bag_starts = plan
    num_ids, workers, dim = int(bag_starts[-1]), arena.workers, arena.layout.dim
    is_alone = num_ids < few(workers, dim)
    team = 0 if is_alone else workers.native_team()
    if JIT_ENABLED and (is_alone or team):
        given = _lay_out(arena, ids.dtype.type, *before, scale, columns, arg_max, slots)
        status = look_up_at(given, ids.ctypes.data, num_ids, bag_starts, batch, mode, out, team)
        return [] if status == kernels.DONE else [status]
    run: Any = kernels.look_up
    flags, said = cache.flags[:0] if cache.is_complete else cache.flags, list[int]()

    def work(begin: int, end: int) -> None:
        scratch = np.empty(kernels.SCRATCH_SLOTS, np.int32)
        status = run(
            begin, end, ids, *plan, flags, _ASKED, RESIDENT, scale, mode, arena.weights, dim, arena.dtype_code, columns,
            out, arg_max, slots, scratch,
        )  # fmt: skip
        said.append(status)

    workers.share(work, bag_starts)
    failed = [status for status in said if status != kernels.DONE]
    if not failed:
        with arena.lock:
            cache.note_hits(num_ids)
    return failed


def _lay_out(arena: Arena, id_type: Any, *arrays: Any) -> Int64s:
    """``laid_out``, of arrays that must outlive it: ``starts``, ``firsts``, ``num_rows``, ``scale``, ``columns``,
    ``arg_max``, ``slots``."""
    cache: Any = arena.cache
    weights: Any = arena.weights
    lay_out: Any = laid_out
    body = int(_body(id_type, weights.dtype.type).address)
    words: Int64s = lay_out(
        *arrays, cache.tallies, cache.flags, weights, arena.layout.dim, arena.dtype_code, body, arena.workers.threads
    )
    return words


class OneTable:
    """Small lookups of a table without gradients, by as few calls as can be: most of their time is Python's. Where each
    row has a slot, one call checks, finds and pools; else one finds the rows and notes their use, another pools them.
    The pool is not kept alive."""

    def __init__(self, arena: Arena, leases: Leases, table_index: int, num_rows: int) -> None:
        self._arena, self._leases = weakref.ref(arena), weakref.ref(leases)
        self._dim, self._few = arena.layout.dim, few(arena.workers, arena.layout.dim)
        self._num_rows, self._table_key = num_rows, table_index << KEY_ROW_BITS
        self._before: Any = None  # where each row has a slot: what addresses in ``_laid_out`` are of
        self._laid_out: dict[torch.dtype, Int64s] = {}
        if isinstance(arena.cache, FullCache):
            first = arena.cache.numbering.first_slots(np.array([table_index], np.int64))
            self._before = np.zeros(1, np.int64), first, np.array([num_rows], np.int64)

    @property
    def is_over(self) -> bool:
        """Whether the pool was closed, as when a new table brought a new one."""
        arena = self._arena()
        return arena is None or arena.is_closed

    def rows(self, ids: Int64s) -> Floats | None:
        """float32 [n, dim], the rows of these ids; None if one is not in."""
        arena, keys = self._arena(), np.empty(len(ids), np.int64)
        if arena is None or kernels.row_keys(ids, 0, self._num_rows, self._table_key, keys) >= 0:
            return None
        rows = np.empty((len(ids), self._dim), arena.weights.dtype)
        with arena.lock:
            slots = None if arena.is_closed else arena.cache.use(keys)
            if slots is None:
                return None
            kernels.copy_rows_out(slots, arena.weights, self._dim, rows)
        is_float32 = arena.dtype_code == FLOAT32
        return rows if is_float32 else torch.from_numpy(rows).view(arena.layout.torch_dtype).float().numpy()

    def pooled(self, ids: Tensor, offsets: Tensor, mode: int, is_last_given: bool) -> Tensor | None:
        """As ``Table.pooled``, of mode ``kernels.SUM`` or ``MEAN``. None where a ``Lookup`` must do it: a row is not
        in, or there is no room for all; or an argument is wrong, or no plain tensor."""
        arena = self._arena()
        if arena is None or arena.is_closed or not type(ids) is type(offsets) is Tensor:  # closed in forks, too
            return None
        is_right = ids.dtype in _ID_TYPES and offsets.dtype is torch.int64 and ids.dim() == offsets.dim() == 1
        if not (is_right and ids.is_cpu and offsets.is_cpu and ids.is_contiguous() and offsets.is_contiguous()):
            return None
        num_ids, address, bags = ids.numel(), ids.data_ptr(), offsets.numel() - is_last_given
        is_large = num_ids >= self._few
        team = arena.workers.native_team() if is_large else 0
        if not offsets.data_ptr() or (num_ids and not address) or (is_large and not team):
            return None
        if self._before is None:
            return None if is_large else self._pool_from_cache(arena, ids.numpy(), offsets.numpy(), bags, mode)
        given = self._laid_out.get(ids.dtype)
        if given is None:
            given = _lay_out(arena, _ID_TYPES[ids.dtype], *self._before, NO_FLOATS, _COLUMN, NO_ARG_MAX, NO_INTS)
            self._laid_out[ids.dtype] = given
        pooled = torch.from_numpy(np.empty((bags, self._dim), np.float32))  # torch.empty takes twice as long
        with arena.rows_lock:
            if arena.is_closed:
                return None
            status = pool_at(
                given, address, num_ids, offsets.data_ptr(), offsets.numel(), bags, mode, pooled.data_ptr(), team
            )
        return pooled if status == kernels.DONE else None

    def _pool_from_cache(self, arena: Arena, ids: Ids, offsets: Int64s, bags: int, mode: int) -> Tensor | None:
        keys, starts = np.empty(len(ids), np.int64), np.full(bags + 1, len(ids), np.int64)
        starts[: len(offsets)] = offsets
        is_outside = kernels.row_keys(ids, 0, self._num_rows, self._table_key, keys) >= 0
        if is_outside or not kernels.copy_offsets(starts, len(keys), starts):
            return None
        with arena.lock:
            slots = None if arena.is_closed else arena.cache.use(keys)
            if slots is not None:
                return self._add(arena, starts, slots, mode)
        return self._bring_in(arena, keys, starts, mode)

    def _add(self, arena: Arena, starts: Int64s, slots: Int32s, mode: int) -> Tensor:
        bags = len(starts) - 1
        pooled = np.empty((bags, self._dim), np.float32)
        kernels.pool_rows(
            0, bags, 0, len(slots), starts, slots, NO_FLOATS, mode, arena.weights, self._dim, arena.dtype_code,
            _COLUMN, bags, pooled, NO_ARG_MAX,
        )  # fmt: skip
        return torch.from_numpy(pooled)

    @shielded
    def _bring_in(self, arena: Arena, keys: Int64s, starts: Int64s, mode: int) -> Tensor | None:
        leases = self._leases()
        try:
            lease = None if leases is None else leases.whole(keys)
        except ClosedError:  # a ``Lookup`` finds the pool that came after
            return None
        if lease is None:
            return None
        with arena.rows_lock:
            pooled = self._add(arena, starts, lease.position_slots, mode)
        lease.release()
        return pooled


@uncounted_kernel
def cut(bag_starts: Int64s, part: int, parts: int) -> Any:
    """Where the given one of ``parts`` ranges of bags with about as many positions each begins."""
    low, high = 0, bag_starts.shape[0] - 1
    if part == parts:
        return high
    first, total = bag_starts[0], bag_starts[high] - bag_starts[0]
    while low < high:
        middle = (low + high) // 2
        if (bag_starts[middle] - first) * parts < total * part:
            low = middle + 1
        else:
            high = middle
    return low


if JIT_ENABLED:
    from llvmlite import ir
    from numba import carray, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    from ..kernels.jit import callback, require_contiguous

    _WORD, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()

    def _on_stack(num_words: int) -> Any:
        """What gives the address of so many words that last until the caller returns."""

        @intrinsic
        def stack_words(typing_context: Any) -> Any:  # noqa: ARG001
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
                return builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(_WORD, num_words)), _WORD)

            return types.int64(), generate

        return stack_words

    _stack_words = _on_stack(_NUM_WORDS)
    _stack_scratch = _on_stack(-(-kernels.SCRATCH_SLOTS // 2))

    @intrinsic
    def _run_body(typing_context: Any, team: Any, body: Any, words: Any, threads: Any) -> Any:  # noqa: ARG001
        """``body(words)`` in each thread of the team, or, if there is none, in this."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            team, body, words, threads = args
            data = builder.inttoptr(words, _BYTES)
            work_type = ir.FunctionType(ir.VoidType(), [_BYTES]).as_pointer()
            work, unsigned = builder.inttoptr(body, work_type), ir.IntType(32)
            fork_type = ir.FunctionType(ir.VoidType(), [work_type, _BYTES, unsigned, unsigned]).as_pointer()
            is_alone = builder.icmp_signed("==", team, ir.Constant(_WORD, 0))
            with builder.if_else(is_alone) as (alone, together):
                with alone:
                    builder.call(work, [data])
                with together:
                    fork = builder.inttoptr(team, fork_type)
                    builder.call(fork, [work, data, builder.trunc(threads, unsigned), unsigned(0)])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    @intrinsic
    def _take(typing_context: Any, words: Any, index: Any, count: Any) -> Any:  # noqa: ARG001
        """``words[index]``, which is ``count`` more for the next thread."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "acq_rel")

        return types.int64(words, types.int64, types.int64), generate

    @intrinsic
    def _address(typing_context: Any, array: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.ptrtoint(data, _WORD)

        require_contiguous(array)
        return types.int64(array), generate

    @intrinsic
    def _pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

        return types.voidptr(types.int64), generate

    @kernel
    def laid_out(
        starts: Int64s, firsts: Int64s, num_rows: Int64s, scale: Floats, columns: Int32s, arg_max: Int32s,
        slots: Int32s, tallies: Int64s, flags: Bytes, weights: Weights, dim: int, dtype_code: int, body: int,
        threads: int,
    ) -> Int64s:  # fmt: skip
        """int64 [``_NUM_ARGUMENTS``]: what stays between calls over the same arrays, whose addresses they hold.
        ``tallies``: of the ``FullCache``; ``body``: address of what each thread runs; ``threads``: how many."""
        a = np.zeros(_NUM_ARGUMENTS, np.int64)
        a[3], a[4], a[5], a[6] = _address(starts), _address(firsts), _address(num_rows), starts.shape[0]
        a[10], a[11], a[12], a[13] = _address(flags), flags.shape[0], _ASKED, RESIDENT
        a[14], a[15] = _address(scale), scale.shape[0]
        a[17], a[18], a[19] = _address(weights), weights.shape[0], weights.shape[1]
        a[20], a[21], a[22] = dim, dtype_code, _address(columns)
        a[26], a[27] = _address(arg_max), arg_max.shape[0]
        a[28], a[29] = _address(slots), slots.shape[0]
        a[_BODY], a[_THREADS], a[_TALLIES] = body, threads, _address(tallies)
        return a

    @inline
    def _run(
        arguments: Int64s, ids: int, num_ids: int, bag_starts: Int64s, batch: int, mode: int, out: int,
        num_columns: int, team: int,
    ) -> Any:  # fmt: skip
        place = _stack_words()
        words = carray(_pointer(place), (_NUM_WORDS,), np.int64)
        a = words[_ARGUMENTS:]
        for i in range(_NUM_ARGUMENTS):
            a[i] = arguments[i]
        a[1], a[2], a[7], a[8], a[9] = ids, num_ids, batch, _address(bag_starts), bag_starts.shape[0]
        a[16], a[23], a[24], a[25] = mode, out, batch, num_columns
        tallies = carray(_pointer(a[_TALLIES]), (HITS_IN_PLACE + 1,), np.int64)
        if tallies[_FILLED] == a[11]:  # all rows are in, so no flags need to be looked at
            a[11] = 0
        # More parts than threads, as the system or distant rows may delay one.
        most = min(a[_THREADS] * _PARTS_A_THREAD, _PARTS_MAX)
        parts = min(num_ids * (_FINDING + a[20]) // _PART_WORK, most) if team else 1
        words[_NEXT], a[0] = 0, parts
        _run_body(team, a[_BODY], place, min(parts, a[_THREADS]))
        for part in range(parts):
            if words[_STATUS + part] != kernels.DONE:
                return words[_STATUS + part]
        _take(tallies, HITS_IN_PLACE, num_ids)
        return np.int64(kernels.DONE)

    @kernel
    def look_up_at(
        arguments: Int64s, ids: int, num_ids: int, bag_starts: Int64s, batch: int, mode: int, out: Floats, team: int
    ) -> Any:
        """``kernels.look_up`` of all bags; counts hits.

        Args:
            arguments: of ``laid_out``.
            ids: address of ids of the type that its ``body`` is for; num_ids: how many.
            bag_starts: right ones, which nobody changes.
            out: float32 [batch, columns].
            team: address of ``GOMP_parallel``, or 0: the calling thread is alone.
        """
        return _run(arguments, ids, num_ids, bag_starts, batch, mode, _address(out), out.shape[1], team)

    @kernel
    def pool_at(
        arguments: Int64s, ids: int, num_ids: int, offsets: int, num_offsets: int, bags: int, mode: int, out: int,
        team: int,
    ) -> Any:  # fmt: skip
        """``look_up_at`` of one table and feature, whose offsets are a caller's: address of int64 [num_offsets], bags +
        1 or all but the last. ``ABSENT`` too, if they are none. ``out``: address of float32 [bags, dim]. Numbers are
        passed ten times as fast as arrays."""
        bag_starts = np.empty(bags + 1, np.int64)
        bag_starts[bags] = num_ids
        bag_starts[:num_offsets] = carray(_pointer(offsets), (num_offsets,), np.int64)
        if not kernels.copy_offsets(bag_starts, num_ids, bag_starts):
            return np.int64(kernels.ABSENT)
        return _run(arguments, ids, num_ids, bag_starts, bags, mode, out, arguments[20], team)

    @functools.cache
    def _body(id_type: Any, weight_type: Any) -> Any:
        def work(data: Any) -> None:
            words = carray(data, (_NUM_WORDS,), np.int64)
            a = words[_ARGUMENTS:]
            parts, batch, dim = a[0], a[7], a[20]
            ids = carray(_pointer(a[1]), (a[2],), id_type)
            starts = carray(_pointer(a[3]), (a[6],), np.int64)
            firsts = carray(_pointer(a[4]), (a[6],), np.int64)
            num_rows = carray(_pointer(a[5]), (a[6],), np.int64)
            bag_starts = carray(_pointer(a[8]), (a[9],), np.int64)
            flags = carray(_pointer(a[10]), (a[11],), np.uint8)
            scale = carray(_pointer(a[14]), (a[15],), np.float32)
            weights = carray(_pointer(a[17]), (a[18], a[19]), weight_type)
            columns = carray(_pointer(a[22]), (a[6],), np.int32)
            out = carray(_pointer(a[23]), (a[24], a[25]), np.float32)
            arg_max = carray(_pointer(a[26]), (a[27], dim), np.int32)
            slots = carray(_pointer(a[28]), (a[29],), np.int32)
            scratch = carray(_pointer(_stack_scratch()), (kernels.SCRATCH_SLOTS,), np.int32)
            part = _take(words, _NEXT, 1)
            while part < parts:
                words[_STATUS + part] = kernels.look_up(
                    cut(bag_starts, part, parts), cut(bag_starts, part + 1, parts), ids, starts, firsts, num_rows,
                    batch, bag_starts, flags, a[12], a[13], scale, a[16], weights, dim, a[21], columns, out, arg_max,
                    slots, scratch,
                )  # fmt: skip
                part = _take(words, _NEXT, 1)

        return callback(work, types.voidptr)

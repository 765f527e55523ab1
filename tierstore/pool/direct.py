"""Lookups by one call of compiled code, for tables where every row has its own slot.

The call splits itself over torch's threads, which need no GIL. Handing them ranges from Python takes 25 to 80 us, as
long as looking up 20,000 rows. Here compiled code calls ``GOMP_parallel``, and the threads that this wakes find
the arguments of ``kernels.look_up`` in an array of words on the caller's stack. A caller's ids and offsets are given by
their addresses: making arrays of tensors takes as long as adding 100 rows.

Callers may change ids and offsets meanwhile: each is read once, and what was read is checked and used.
"""

import functools
import sys
from typing import Any, Final

import numpy as np

from ..cache.cache_state import Tally
from ..cache.full import HITS_IN_PLACE
from ..kernels import slots as kernels
from ..kernels.arrays import Bytes, Floats, Ids, Int32s, Int64s, Weights
from ..kernels.jit import JIT_ENABLED, inline, kernel, uncounted_kernel
from ..kernels.threads import Workers

NOT_OFFSETS: Final = -3  # what ``pool_at`` returns besides what ``kernels.look_up`` does

_FINDING: Final = 32  # Columns: finding a row takes as long as adding so many
_PART_WORK: Final = 80_000  # ids times columns, some 10 us; waking a thread takes 1 or 2
_PARTS_MAX: Final = 256
_PARTS_A_THREAD: Final = 8
_WEIGHTS: Final = 5  # where they are among the arguments of ``kernels.look_up`` behind ``bag_starts``
_NEXT, _STATUS, _ARGUMENTS = 0, 1, 1 + _PARTS_MAX
_BODY, _THREADS, _TALLIES, _NUM_ARGUMENTS = 30, 31, 32, 33
_FILLED: Final = int(Tally.FILLED)
_NUM_WORDS: Final = _ARGUMENTS + _NUM_ARGUMENTS


def few(workers: Workers, dim: int) -> int:
    """Of so many ids and more, in rows of ``dim`` columns, a lookup is worth two threads."""
    return sys.maxsize if workers.threads == 1 else -(-2 * _PART_WORK // (_FINDING + dim))


def body_address(id_type: Any, weight_type: Any) -> int:
    """Of what each thread runs."""
    return int(_body(id_type, weight_type).address)


def look_up(workers: Workers, dim: int, ids: Ids, plan: Any, *arguments: Any) -> list[int]:
    """``kernels.look_up`` of all bags, by as many threads as it is worth: what ranges of bags returned instead of
    ``DONE``. ``plan``: its arguments from ``starts`` to ``bag_starts``; ``arguments``: those behind, up to
    ``slots``."""
    *before, bag_starts = plan
    num_ids, id_type = int(bag_starts[-1]), ids.dtype.type
    is_alone, said = num_ids < few(workers, dim), list[int]()
    team = 0 if is_alone else workers.native_team()
    if JIT_ENABLED and (is_alone or team):
        body = body_address(id_type, arguments[_WEIGHTS].dtype.type)
        found = look_up_at(ids.ctypes.data, num_ids, bag_starts, body, team, workers.threads, *before, *arguments)
        said.append(found)
    else:
        run: Any = kernels.look_up

        def work(begin: int, end: int) -> None:
            said.append(run(begin, end, ids, *plan, *arguments, np.empty(kernels.SCRATCH_SLOTS, np.int32)))

        workers.share(work, bag_starts)
    return [status for status in said if status != kernels.DONE]


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

    @inline
    def _lay_out(
        a: Int64s, starts: Int64s, firsts: Int64s, num_rows: Int64s, flags: Bytes, asked: int, wanted: int,
        scale: Floats, weights: Weights, dim: int, dtype_code: int, columns: Int32s, arg_max: Int32s, slots: Int32s,
    ) -> None:  # fmt: skip
        """What ``_body`` finds in the words, but for ids, bags, the batch, the mode and what is written."""
        a[3], a[4], a[5], a[6] = _address(starts), _address(firsts), _address(num_rows), starts.shape[0]
        a[10], a[11], a[12], a[13] = _address(flags), flags.shape[0], asked, wanted
        a[14], a[15] = _address(scale), scale.shape[0]
        a[17], a[18], a[19] = _address(weights), weights.shape[0], weights.shape[1]
        a[20], a[21], a[22] = dim, dtype_code, _address(columns)
        a[26], a[27] = _address(arg_max), arg_max.shape[0]
        a[28], a[29] = _address(slots), slots.shape[0]

    @inline
    def _share(place: int, words: Int64s, body: int, team: int, threads: int) -> Any:
        num_ids, dim = words[_ARGUMENTS + 2], words[_ARGUMENTS + 20]
        # More parts than threads, as the system or distant rows may delay one.
        parts = min(num_ids * (_FINDING + dim) // _PART_WORK, threads * _PARTS_A_THREAD, _PARTS_MAX) if team else 1
        words[_NEXT], words[_ARGUMENTS] = 0, parts
        _run_body(team, body, place, min(parts, threads))
        for part in range(parts):
            if words[_STATUS + part] != kernels.DONE:
                return words[_STATUS + part]
        return np.int64(kernels.DONE)

    @kernel
    def look_up_at(
        ids: int, num_ids: int, bag_starts: Int64s, body: int, team: int, threads: int,
        starts: Int64s, firsts: Int64s, num_rows: Int64s, batch: int, flags: Bytes, asked: int, wanted: int,
        scale: Floats, mode: int, weights: Weights, dim: int, dtype_code: int, columns: Int32s, out: Floats,
        arg_max: Int32s, slots: Int32s,
    ) -> Any:  # fmt: skip
        """``kernels.look_up`` of all bags.

        Args:
            ids: address of ids of the type that ``body`` is for; num_ids: how many.
            bag_starts: right ones, which nobody changes.
            body: address of what each thread runs; team: that of ``GOMP_parallel``, or 0: the calling thread is alone;
                threads: how many.
            starts: and the arguments behind it, as for ``kernels.look_up``.
        """
        place = _stack_words()
        words = carray(_pointer(place), (_NUM_WORDS,), np.int64)
        a = words[_ARGUMENTS:]
        _lay_out(
            a, starts, firsts, num_rows, flags, asked, wanted, scale, weights, dim, dtype_code, columns, arg_max, slots
        )
        a[1], a[2], a[7], a[8], a[9] = ids, num_ids, batch, _address(bag_starts), bag_starts.shape[0]
        a[16], a[23], a[24], a[25] = mode, _address(out), out.shape[0], out.shape[1]
        return _share(place, words, body, team, threads)

    @kernel
    def laid_out(
        starts: Int64s, firsts: Int64s, num_rows: Int64s, tallies: Int64s, flags: Bytes, asked: int, wanted: int,
        scale: Floats, weights: Weights, dim: int, dtype_code: int, columns: Int32s, arg_max: Int32s, slots: Int32s,
        body: int, threads: int,
    ) -> Int64s:  # fmt: skip
        """int64 [``_NUM_ARGUMENTS``]: what stays between calls of ``pool_at``, for one table. They hold addresses: the
        arrays must outlive them. ``tallies``: of the ``FullCache``."""
        a = np.zeros(_NUM_ARGUMENTS, np.int64)
        _lay_out(
            a, starts, firsts, num_rows, flags, asked, wanted, scale, weights, dim, dtype_code, columns, arg_max, slots
        )
        a[_BODY], a[_THREADS], a[_TALLIES] = body, threads, _address(tallies)
        return a

    @kernel
    def pool_at(
        arguments: Int64s, ids: int, num_ids: int, offsets: int, num_offsets: int, bags: int, mode: int,
        out: int, team: int,
    ) -> Any:  # fmt: skip
        """``look_up_at`` of one table and feature, whose offsets are a caller's. Numbers are passed ten times as fast
        as arrays.

        Args:
            arguments: of ``laid_out``.
            offsets: address of int64 [num_offsets]: bags + 1, or all but the last.
            out: address of float32 [bags, dim].
            team: as for ``look_up_at``.

        Returns:
            ``NOT_OFFSETS`` too, if they are none.
        """
        bag_starts = np.empty(bags + 1, np.int64)
        bag_starts[bags] = num_ids
        bag_starts[:num_offsets] = carray(_pointer(offsets), (num_offsets,), np.int64)
        if not kernels.copy_offsets(bag_starts, num_ids, bag_starts):
            return np.int64(NOT_OFFSETS)
        place = _stack_words()
        words = carray(_pointer(place), (_NUM_WORDS,), np.int64)
        a = words[_ARGUMENTS:]
        for i in range(_NUM_ARGUMENTS):
            a[i] = arguments[i]
        a[1], a[2], a[7], a[8], a[9] = ids, num_ids, bags, _address(bag_starts), bag_starts.shape[0]
        a[16], a[23], a[24], a[25] = mode, out, bags, a[20]
        tallies = carray(_pointer(a[_TALLIES]), (HITS_IN_PLACE + 1,), np.int64)
        if tallies[_FILLED] == a[11]:  # all rows are in, so no flags need to be looked at
            a[11] = 0
        status = _share(place, words, a[_BODY], team, a[_THREADS])
        if status == kernels.DONE:
            _take(tallies, HITS_IN_PLACE, num_ids)
        return status

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

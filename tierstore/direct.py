"""Lookups of rows that all have slots of their own, by one call of compiled code.

``look_up`` splits itself over torch's threads, none of which needs the GIL: handing ranges to them from Python takes 25
to 80 us, as long as looking up 20,000 rows. Here compiled code calls ``GOMP_parallel``, and the threads that this wakes
find the kernel's arguments in an array of words.

``look_up_at`` takes addresses of tensors' elements: making an array of a tensor takes as long as adding 100 rows.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from . import kernels
from ._jit import JIT_ENABLED, kernel, uncounted_kernel
from .threads import Workers

__all__ = ["NOT_OFFSETS", "WHOLE", "Split", "few", "look_up", "look_up_at", "split"]

NOT_OFFSETS: Final = -3
"""What a function of ``look_up_at`` returns beside what ``kernels.look_up`` does."""

_FINDING: Final = 32
"""Columns: finding a row takes as long as adding so many."""
_PART_WORK: Final = 80_000
"""Some 10 us, in units of ``split``; waking a thread takes 1 or 2."""
_PARTS_MAX: Final = 256
_PARTS_A_THREAD: Final = 8
_WEIGHTS: Final = 5
"""Where they are among the arguments of ``kernels.look_up`` behind ``bag_starts``."""
_NEXT, _STATUS, _ARGUMENTS = 0, 1, 1 + _PARTS_MAX
_WORDS: Final = np.zeros(_ARGUMENTS + 28, np.int64)
"""Shared by the threads of one lookup; only the main thread has a team."""


class Split(NamedTuple):
    """How threads share a lookup.

    Attributes:
        team: the address of ``GOMP_parallel``, or 0: then it is for ``Workers.run``, or for one thread.
        body: the address of what each thread runs.
        words: int64, what the threads share.
        parts: ranges of bags; more than threads, as one may be held up by the system, or by rows that are far away.
        threads: how many.
    """

    team: int
    body: int
    words: Any
    parts: int
    threads: int


WHOLE: Final = Split(0, 0, _WORDS, 1, 1)


def few(dim: int) -> int:
    """Of so many ids and more, in rows of ``dim`` columns, a lookup is worth two threads."""
    return -(-2 * _PART_WORK // (_FINDING + dim))


def split(workers: Workers, num_ids: int, dim: int, id_type: Any, weight_type: Any) -> Split:
    """How best to split a lookup of so many ids in rows of ``dim`` columns, types being numpy's."""
    if num_ids < few(dim) or workers.threads == 1:
        return WHOLE
    parts = num_ids * (_FINDING + dim) // _PART_WORK
    parts = min(parts, workers.threads * _PARTS_A_THREAD, _PARTS_MAX)
    team = workers.native_team() if JIT_ENABLED else 0
    return Split(team, _body(id_type, weight_type) if team else 0, _WORDS, parts, min(parts, workers.threads))


def look_up(workers: Workers, dim: int, ids: Any, plan: Any, *arguments: Any) -> list[int]:
    """``kernels.look_up`` of all bags, by as many threads as it is worth.

    Args:
        dim: columns of a row.
        plan: the arguments of ``kernels.look_up`` from ``starts`` to ``bag_starts``.
        arguments: those behind.

    Returns:
        what ranges of bags returned, if that was not ``DONE``.
    """
    bag_starts = plan[-1]
    by = split(workers, int(bag_starts[-1]), dim, ids.dtype.type, arguments[_WEIGHTS].dtype.type)
    run: Any = kernels.look_up
    if by.parts == 1:
        said = [run(0, len(bag_starts) - 1, ids, *plan, *arguments)]
    elif by.team:
        run_by_team: Any = _look_up_by_team
        run_by_team(*by, ids, *plan, *arguments)
        said = _WORDS[_STATUS : _STATUS + by.parts].tolist()
    else:
        said = []
        workers.run(lambda begin, end: said.append(run(begin, end, ids, *plan, *arguments)), workers.split(bag_starts))
    return [status for status in said if status != kernels.DONE]


@uncounted_kernel
def cut(bag_starts: Any, part: int, parts: int) -> Any:
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
    import numba
    from llvmlite import ir
    from numba import carray, types
    from numba.extending import intrinsic

    @intrinsic
    def _fork(typing_context: Any, team: Any, body: Any, words: Any, threads: Any) -> Any:  # noqa: ARG001
        """``GOMP_parallel(body, words, threads, 0)``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer, unsigned = ir.IntType(8).as_pointer(), ir.IntType(32)
            shape = ir.FunctionType(ir.VoidType(), [pointer, pointer, unsigned, unsigned])
            data = context.make_array(signature.args[2])(context, builder, args[2]).data
            function, work = builder.inttoptr(args[0], shape.as_pointer()), builder.inttoptr(args[1], pointer)
            builder.call(
                function, [work, builder.bitcast(data, pointer), builder.trunc(args[3], unsigned), unsigned(0)]
            )
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, words, types.int64), generate

    @intrinsic
    def _take_next(typing_context: Any, words: Any, index: Any) -> Any:  # noqa: ARG001
        """``words[index]``, which is one more for the next thread."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.atomic_rmw("add", builder.gep(data, [args[1]]), ir.IntType(64)(1), "acq_rel")

        return types.int64(words, types.int64), generate

    @intrinsic
    def _address(typing_context: Any, array: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.ptrtoint(data, ir.IntType(64))

        return types.int64(array), generate

    @intrinsic
    def _pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

        return types.voidptr(types.int64), generate

    @uncounted_kernel
    def _look_up_by_team(
        team: int, body: int, words: Any, parts: int, threads: int, ids: Any, starts: Any, firsts: Any, num_rows: Any,
        batch: int, bag_starts: Any, flags: Any, asked: int, wanted: int, scale: Any, mode: int, weights: Any, dim: int,
        half: int, columns: Any, out: Any, arg_max: Any,
    ) -> None:  # fmt: skip
        words[_NEXT] = 0
        arguments = words[_ARGUMENTS:]
        arguments[0], arguments[1], arguments[2] = parts, _address(ids), ids.shape[0]
        arguments[3], arguments[4], arguments[5] = _address(starts), _address(firsts), _address(num_rows)
        arguments[6], arguments[7], arguments[8] = starts.shape[0], batch, _address(bag_starts)
        arguments[9], arguments[10], arguments[11] = bag_starts.shape[0], _address(flags), flags.shape[0]
        arguments[12], arguments[13], arguments[14] = asked, wanted, _address(scale)
        arguments[15], arguments[16], arguments[17] = scale.shape[0], mode, _address(weights)
        arguments[18], arguments[19], arguments[20] = weights.shape[0], weights.shape[1], dim
        arguments[21], arguments[22], arguments[23] = half, _address(columns), _address(out)
        arguments[24], arguments[25], arguments[26] = out.shape[0], out.shape[1], _address(arg_max)
        arguments[27] = arg_max.shape[0]
        _fork(team, body, words, threads)

    @functools.cache
    def look_up_at(id_type: Any) -> Callable[..., Any]:
        """A function that is ``kernels.look_up`` of all bags of one feature, for ids of that type, and checks offsets.

        Its arguments are the address and number of the ids, the address of the int64 offsets and the number of bags; a
        ``Split``; and those of ``kernels.look_up``: ``starts``, ``firsts``, ``num_rows``, and from ``flags`` on.
        """

        def work(
            ids_address: int, num_ids: int, offsets_address: int, bags: int, team: int, body: int, words: Any,
            parts: int, threads: int, starts: Any, firsts: Any, num_rows: Any, flags: Any, asked: int, wanted: int,
            scale: Any, mode: int, weights: Any, dim: int, half: int, columns: Any, out: Any, arg_max: Any,
        ) -> Any:  # fmt: skip
            ids = carray(_pointer(ids_address), (num_ids,), id_type)
            offsets = carray(_pointer(offsets_address), (bags + 1,), np.int64)
            if not kernels.are_offsets(offsets, num_ids):
                return np.int64(NOT_OFFSETS)
            if parts == 1:
                return kernels.look_up(
                    0, bags, ids, starts, firsts, num_rows, bags, offsets, flags, asked, wanted, scale, mode, weights,
                    dim, half, columns, out, arg_max,
                )  # fmt: skip
            _look_up_by_team(
                team, body, words, parts, threads, ids, starts, firsts, num_rows, bags, offsets, flags, asked, wanted,
                scale, mode, weights, dim, half, columns, out, arg_max,
            )  # fmt: skip
            for part in range(parts):
                if words[_STATUS + part] != kernels.DONE:
                    return words[_STATUS + part]
            return np.int64(kernels.DONE)

        return kernel(work)

    @functools.cache
    def _body(id_type: Any, weight_type: Any) -> int:
        """The address of what each thread runs."""

        def work(data: Any) -> None:
            words = carray(data, (_ARGUMENTS + 28,), np.int64)
            a = words[_ARGUMENTS:]
            parts, dim, batch = a[0], a[20], a[7]
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
            part = _take_next(words, _NEXT)
            while part < parts:
                words[_STATUS + part] = kernels.look_up(
                    cut(bag_starts, part, parts), cut(bag_starts, part + 1, parts), ids, starts, firsts, num_rows,
                    batch, bag_starts, flags, a[12], a[13], scale, a[16], weights, dim, a[21], columns, out, arg_max,
                )  # fmt: skip
                part = _take_next(words, _NEXT)

        compile_it: Callable[..., Any] = numba.cfunc(types.void(types.voidptr), cache=True)
        address: int = compile_it(work).address
        return address

"""Kernels over rows of the HBM tier in plain torch operations: the oracle of ``rows_triton``, on any device.

Every float32 operation and its place in the order are those of ``kernels.pool_rows``, ``kernels.dot_rows`` and
``optim.rules.merge_and_update``, so the bits are theirs too (but for the sign and payload of a NaN, which devices
choose). Each operation is one torch call of its own: nothing is there to contract. Divisors are tensors, because some
devices multiply by the reciprocal of a scalar. Calls wait for the device and are slow; all tensors are on one device.

Shape legend: N positions (ids of the batch), U unique rows, K = F * B bags, C output columns, S slots, D dim, T tables.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..kernels import slots as kernels
from ..optim.configs import SGD, Adagrad, RowWiseAdagrad
from ..optim.rules import RUN, SUPER_RUN
from .batch import Bags, DeviceIds, Groups

Pair = tuple[Tensor, ...]
"""Weights and state of rows, int64 [rows, words] each."""


def number_bags(bag_starts: Tensor, bag_of: Tensor) -> None:
    """Fill ``bag_of``, int32 [N], with the bag of each position: those of bag ``k`` are ``bag_starts[k:k + 2]``."""
    numbers = torch.arange(len(bag_starts) - 1, dtype=torch.int32, device=bag_of.device)
    bag_of.copy_(torch.repeat_interleave(numbers, bag_starts.diff().long()))


def join_ids(
    given: DeviceIds, firsts: Tensor, num_rows: Tensor, bags: Bags, rows: Tensor, is_right: Tensor, record: Tensor
) -> None:
    """Check ids and offsets, and join them: fill ``bag_starts``, ``bag_of`` and ``scale`` of ``bags``, and ``rows``.

    A wrong id is taken for row 0 of its table, and offsets are cut to [0, N], so that they may be used whatever they
    are.

    Args:
        firsts: int64 [F], the slot or key of row 0 of each feature's table; num_rows: int64 [F].
        rows: int32 (slots) or int64 (keys) [N].
        is_right: int32 [1], set to 0 if something is wrong, else left as it is.
        record: int64 [F + 1], zeros, or what an earlier batch left. A wrong id of a feature goes to the feature's
            place; one more than the index of an offset that is not from 0 to N, or less than the one before, to the
            last. Of several, any.
    """
    count, num_bags = len(rows), len(bags.bag_starts) - 1
    starts = given.offsets.long()
    starts = torch.cat([starts, starts.new_full((num_bags + 1 - len(starts),), count)])
    is_off = (starts < torch.cat([starts.new_zeros(1), starts[:-1]])) | (starts > count)
    is_off[0] |= starts[0] != 0
    is_off[-1] |= starts[-1] != count
    bags.bag_starts.copy_(starts.clamp(0, count))
    positions = torch.arange(count, device=rows.device)
    bag = (torch.searchsorted(starts, positions, right=True) - 1).clamp(0, num_bags - 1)
    bags.bag_of.copy_(bag)
    feature, ids = bag // bags.batch, given.ids.long()
    is_no_row = (ids < 0) | (ids >= num_rows[feature])
    rows.copy_(firsts[feature] + torch.where(is_no_row, torch.zeros_like(ids), ids))
    record[feature[is_no_row].to(record.device)] = ids[is_no_row].to(record.device)
    if is_off.any():
        record[len(firsts)] = is_off.int().argmax() + 1
    is_right.mul_((~(is_no_row.any() | is_off.any())).int())
    if given.scale is not None and bags.scale is not None:
        bags.scale.copy_(given.scale)


def pool_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, mode: int, weights: Tensor, dim: int,
    out: Tensor, arg_max: Tensor | None,
) -> None:  # fmt: skip
    """Sum the rows of the positions ``[first, last)`` by bag, each bag in id-list order.

    Calls with neighbouring ranges, in order, give the bits of one call.

    Args:
        slots: int32, the slot of each position, [last - first]; or of each distinct row, [>= U].
        inverse: int32 [last - first], the distinct row of each position; None if ``slots`` are the positions'.
        first: a call from position 0 on writes the result of every bag, once. One from a later position reads and
            writes only the bags that have positions in its range.
        mode: SUM, MEAN or MAX of ``kernels``; a mean is divided when its last position was added. MAX ignores scale.
        weights: float32, float16 or bfloat16 [S, >= D].
        out: float32 [B, C].
        arg_max: int32 [K, D], the first position of each maximum (MAX), -1 of an empty bag; else None.
    """
    stops = bags.bag_starts[1:]
    low, high = bags.bag_starts[:-1].clamp(min=first), stops.clamp(max=last)
    place = _places(bags, torch.arange(len(stops), device=out.device), dim)
    if first == 0:
        out[place] = 0
        if arg_max is not None:
            arg_max.fill_(-1)
    pooled = out[place]
    for bag, position in _steps(low, high):
        row = weights[_slots_of(slots, inverse, position - first), :dim].float()
        if arg_max is not None:
            wins = (arg_max[bag] < 0) | (row > pooled[bag])
            pooled[bag] = torch.where(wins, row, pooled[bag])
            arg_max[bag] = torch.where(wins, position.int()[:, None], arg_max[bag])
        elif bags.scale is not None:
            pooled[bag] = pooled[bag] + bags.scale[position][:, None] * row
        else:
            pooled[bag] = pooled[bag] + row
    if mode == kernels.MEAN:
        complete = torch.nonzero((low < high) & (high == stops))[:, 0]
        pooled[complete] = pooled[complete] / _counts(bags)[complete][:, None]
    out[place] = pooled


def dot_rows(
    bags: Bags, slots: Tensor, inverse: Tensor | None, first: int, last: int, *, weights: Tensor, dim: int,
    grad_out: Tensor, grad_scale: Tensor,
) -> None:  # fmt: skip
    """Gradient of per-sample weights: ``grad_scale[p] = row(p) . grad_out[bag of p]``, positions ``[first, last)``.

    Args:
        slots, inverse: as for ``pool_rows``.
        weights: float32, float16 or bfloat16 [S, >= D].
        grad_out: float32 [B, C].
        grad_scale: float32 [N], filled on ``[first, last)``.
    """
    source = grad_out[_places(bags, bags.bag_of[first:last].long(), dim)]
    slot = _slots_of(slots, inverse, torch.arange(last - first, device=slots.device))
    grad_scale[first:last] = _halving_sum(weights[slot, :dim].float() * source)


def update_rows(
    bags: Bags, groups: Groups, slots: Tensor, first_unique: int, *, grad_out: Tensor, arg_max: Tensor | None,
    mean: bool, codes: tuple[int, ...], code_of: Tensor, hyper: Tensor, weights: Tensor, state: Tensor, dim: int,
    dirty: Tensor | None,
) -> None:  # fmt: skip
    """Merge the gradients of distinct rows, and update each once: those from ``first_unique`` up to
    ``min(first_unique + len(slots), U)``.

    Args:
        slots: int32, the slot of each of these rows, all different; those behind U mean nothing.
        grad_out: float32 [B, C].
        arg_max: int32 [K, D], what ``pool_rows`` left (MAX), or None.
        mean: gradients are divided by the length of their bag; else scaled by ``bags.scale``, if there is one.
        codes: the optimizer of each table.
        code_of: int32 [T], the same on the device.
        hyper: float32 [T, NUM_HYPER].
        weights: float32, float16 or bfloat16 [S, >= D]; state: float32 [S, >= state_dim]. Both are changed.
        dirty: uint8 [S], set to 1 for each updated row, or None.
    """
    stop = min(first_unique + len(slots), int(groups.num_unique))
    if first_unique >= stop:
        return
    gradient = _merge(bags, groups, first_unique, stop, grad_out, arg_max, mean, dim)
    first_bags = bags.bag_of[groups.order[groups.starts[first_unique:stop].long()]]
    tables = bags.table_of[(first_bags // bags.batch).long()].long()
    slot = slots[: stop - first_unique].long()
    if dirty is not None:
        dirty[slot] = 1  # first, as an update may fail half done
    for code in set(codes):
        chosen = torch.nonzero(code_of[tables] == code)[:, 0]
        _update(code, hyper[tables[chosen]], gradient[chosen], slot[chosen], weights, state)


def move_rows(arenas: Pair, buffers: Pair, slots: Tensor, *, up: bool) -> None:
    """Copy whole rows between the device and page-locked memory of the host: ``arenas[slots[i]]`` from (``up``) or to
    ``buffers[i]``.

    Args:
        slots: int32 [n], distinct.
    """
    for arena, buffer in zip(arenas, buffers, strict=True):
        if up:
            arena[slots] = buffer[: len(slots)]
        else:
            torch.index_select(arena, 0, slots, out=buffer[: len(slots)])


def warm_up(**_: object) -> None:
    """Nothing here has to be compiled."""


def _slots_of(slots: Tensor, inverse: Tensor | None, place: Tensor) -> Tensor:
    """int64, of some positions, counted from the first of the call."""
    return slots[place if inverse is None else inverse[place].long()].long()


def _steps(low: Tensor, high: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(which ranges, an index of each): first ``low`` of every range ``[low, high)`` not empty, then the next, ..."""
    lengths = high - low
    for step in range(int(lengths.max()) if len(lengths) else 0):
        which = torch.nonzero(lengths > step)[:, 0]
        yield which, low[which] + step


def _sum_ranges(low: Tensor, high: Tensor, dim: int, term: Callable[[Tensor], Tensor]) -> Tensor:
    """float32 [ranges, dim]: from zero, ``term`` of each index of the range added one after another."""
    total = torch.zeros(len(low), dim, dtype=torch.float32, device=low.device)
    for which, index in _steps(low, high):
        total[which] = total[which] + term(index)
    return total


def _halving_sum(terms: Tensor) -> Tensor:
    width = kernels.padded_width(terms.shape[1])
    terms = torch.nn.functional.pad(terms, (0, width - terms.shape[1]))
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    return 0.0 + terms[:, 0]


def _places(bags: Bags, bag: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(samples, columns) that index a [B, C] matrix at the results of some bags (int64)."""
    column = bags.columns.long()[bag // bags.batch][:, None] + torch.arange(dim, device=bag.device)
    return (bag % bags.batch)[:, None], column


def _counts(bags: Bags) -> Tensor:
    return bags.bag_starts.diff().float()


def _merge(
    bags: Bags, groups: Groups, begin: int, end: int, grad_out: Tensor, arg_max: Tensor | None, mean: bool, dim: int
) -> Tensor:
    """float32 [end - begin, dim]: gradients in the canonical order, see ``optim.rules``."""

    def gradient_of(place: Tensor) -> Tensor:
        position = groups.order[place]
        bag = bags.bag_of[position].long()
        source = grad_out[_places(bags, bag, dim)]
        if arg_max is not None:
            return torch.where(arg_max[bag] == position[:, None], source, torch.zeros_like(source))
        if mean:
            return (torch.ones_like(_counts(bags)) / _counts(bags))[bag][:, None] * source
        return source if bags.scale is None else bags.scale[position][:, None] * source

    starts, stops = groups.starts[begin:end].long(), groups.starts[begin + 1 : end + 1].long()
    low, high, runs_low, runs_high = _cut(starts, stops, RUN)
    runs = _sum_ranges(low, high, dim, gradient_of)
    low, high, supers_low, supers_high = _cut(runs_low, runs_high, SUPER_RUN // RUN)
    super_runs = _sum_ranges(low, high, dim, lambda run: runs[run])
    return _sum_ranges(supers_low, supers_high, dim, lambda run: super_runs[run])


def _cut(low: Tensor, high: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ranges ``[low, high)`` cut into pieces of ``size``: begins and ends of the pieces, range after range; and the
    first piece of each range and the one behind its last."""
    num_pieces = (high - low + size - 1) // size
    ends = num_pieces.cumsum(0)
    owner = torch.repeat_interleave(num_pieces)
    number = torch.arange(len(owner), device=owner.device) - (ends - num_pieces)[owner]
    begin = low[owner] + number * size
    return begin, torch.minimum(begin + size, high[owner]), ends - num_pieces, ends


def _update(code: int, hyper: Tensor, gradient: Tensor, slot: Tensor, weights: Tensor, state: Tensor) -> None:
    """One optimizer step of rows that share a rule; the formulas are those of ``optim.configs``."""
    dim = gradient.shape[1]
    value = weights[slot, :dim].float()
    lr, weight_decay, eps = hyper[:, 0:1], hyper[:, 1:2], hyper[:, 2:3]
    gradient = torch.where(weight_decay != 0, gradient + weight_decay * value, gradient)
    if code == SGD.code:
        change = lr * gradient
    elif code == RowWiseAdagrad.code:
        accumulator = state[slot, 0] + _mean_square(gradient)
        state[slot, 0] = accumulator
        change = lr / (_root(accumulator)[:, None] + eps) * gradient
    elif code == Adagrad.code:
        squares = state[slot, :dim] + gradient * gradient
        state[slot, :dim] = squares
        change = lr * gradient / (_root(squares) + eps)
    else:
        change = _adam(hyper, gradient, slot, state)
    weights[slot, :dim] = (hyper[:, 7:8] * value - change).to(weights.dtype)


def _mean_square(gradient: Tensor) -> Tensor:
    total = _halving_sum(gradient * gradient)
    return total / torch.full_like(total, gradient.shape[1])


def _adam(hyper: Tensor, gradient: Tensor, slot: Tensor, state: Tensor) -> Tensor:
    dim = gradient.shape[1]
    eps, beta1, beta2, step_size, root_correction = (hyper[:, column : column + 1] for column in range(2, 7))
    first = beta1 * state[slot, :dim] + (1 - beta1) * gradient
    second = beta2 * state[slot, dim : 2 * dim] + (1 - beta2) * gradient * gradient
    state[slot, :dim] = first
    state[slot, dim : 2 * dim] = second
    return step_size * first / (_root(second) / root_correction + eps)


def _root(value: Tensor) -> Tensor:
    """Square root to nearest: torch's own in float32 may be off by one bit, in float64 it is near enough to round."""
    return value.double().sqrt().float()

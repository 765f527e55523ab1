"""Kernels over rows of the HBM tier: in any parts, those in Triton give the bits of the CPU's, which are the twin.

Without a CUDA device the Triton kernels run in Triton's interpreter.
"""

import math
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tierstore import optim
from tierstore.hbm import twin
from tierstore.hbm.kernel_types import Bags, DeviceIds, Groups
from tierstore.kernels import slots as kernels
from tierstore.optim.configs import NUM_HYPER
from tierstore.optim.rules import RUN, SUPER_RUN

launches = pytest.importorskip("tierstore.hbm.launches", reason="Triton is for Linux")

UNTOUCHED = 7.0
"""In the gaps of results."""


class Batch(NamedTuple):
    """Features of one pool, on the CPU.

    Attributes:
        groups: ``starts`` behind those of the distinct rows are far out of bounds.
        inverse: int32 [N], the unique row of each position; slots: int32 [U], its slot.
        weights: [64, > dim], of the storage type.
        grad_out: float32 [B, C], has gaps.
    """

    dim: int
    bags: Bags
    groups: Groups
    inverse: Tensor
    slots: Tensor
    weights: Tensor
    grad_out: Tensor


def make_batch(
    dim: int, dtype: torch.dtype, *, longest: int = 4, hot: tuple[int, ...] = (), samples: int = 7, tables: int = 1
) -> Batch:
    """Skewed positions in bags of ``longest`` at most, some empty; rows 2, 3, ... ``hot`` times more, in one bag.

    Two features of one table, or one feature of each of several ``tables``.
    """
    rng = np.random.default_rng([dim, longest, *hot])
    features, num_rows = (2, 20) if tables == 1 else (tables, 8)
    lengths = rng.integers(0, longest + 1, features * samples)
    lengths[samples // 2] = 0
    bags = [(rng.random(length) ** 2 * num_rows).astype(np.int32) for length in lengths]
    bags[1] = rng.permutation(np.concatenate([bags[1], np.repeat(np.arange(2, 2 + len(hot), dtype=np.int32), hot)]))
    bag_starts = np.cumsum([0, *(len(bag) for bag in bags)])
    bag_of = np.repeat(np.arange(len(bags)), np.diff(bag_starts))
    flat = np.concatenate(bags) + (bag_of // samples * num_rows if tables > 1 else 0)
    numbers, inverse = np.unique(flat, return_inverse=True)
    starts = np.full(len(flat) + 1, 10**9)
    starts[: len(numbers) + 1] = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(numbers)))])
    # Features side by side, the last one first, a gap before and behind.
    columns, table_of = 4 + dim * np.arange(features)[::-1], rng.permutation(tables)[np.arange(features) % tables]

    def numbered(*values: Any) -> Any:
        return [torch.from_numpy(np.ascontiguousarray(each, np.int32)) for each in values]

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    (first_of,) = numbered(starts)
    return Batch(
        dim, Bags(*numbered(bag_starts, bag_of, columns, table_of), samples, normal(len(flat)), math.gcd(dim, 4)),
        Groups(torch.from_numpy(np.argsort(inverse, kind="stable")), first_of, *numbered([len(numbers)]), first_of),
        *numbered(inverse, rng.permutation(64)[: len(numbers)]), normal(64, dim + 3).to(dtype),
        normal(samples, features * dim + 8),
    )  # fmt: skip


def bits(values: Any) -> Any:
    """Bit patterns on the CPU, those of NaN made one: devices differ in a NaN's sign and payload."""
    tensor = torch.as_tensor(values).detach().cpu().clone()
    if tensor.is_floating_point():
        tensor[tensor.isnan()] = float("nan")
        tensor = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return tensor.numpy()


DIMS = [1, 3, 8, 16, 20, 64, 128]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RULES = {
    "sgd": optim.SGD(lr=0.3, weight_decay=0.01),
    "rowwise_adagrad": optim.RowWiseAdagrad(lr=0.3, weight_decay=0.01),
    "adagrad": optim.Adagrad(lr=0.3, weight_decay=0.01),
    "adam": optim.Adam(lr=0.1, weight_decay=0.01),
    "adam, decoupled": optim.Adam(lr=0.1, weight_decay=0.01, decoupled=True),
}
MODES = {"sum": kernels.SUM, "mean": kernels.MEAN, "max": kernels.MAX}
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled for the CUDA device"
)


class Rows(NamedTuple):
    """One implementation and the device it runs on."""

    module: ModuleType
    device: str

    def put(self, given: Any) -> Any:
        """Copies there of tensors, and of those in tuples."""
        if isinstance(given, Tensor):
            return given.to(self.device, copy=True)
        return type(given)._make(map(self.put, given)) if hasattr(given, "_make") else given

    def bags(self, batch: Batch, *, scaled: bool = True) -> Bags:
        """``bag_of`` is what the kernels make of ``bag_starts``."""
        bags: Bags = self.put(batch.bags if scaled else batch.bags._replace(scale=None))
        bags.bag_of.fill_(-1)
        self.module.number_bags(bags.bag_starts, bags.bag_of)
        assert torch.equal(bags.bag_of.cpu(), batch.bags.bag_of)
        return bags


TWIN = Rows(twin, "cpu")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((twin, "cpu"), id="twin"),
        pytest.param((launches, "cpu"), id="interpreted", marks=needs_interpreter),
        pytest.param((launches, "cuda"), id="cuda", marks=pytest.mark.gpu),
    ],
)
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(launches, "PROGRAMS", 1)  # which takes all tiles of rows
        yield Rows(*request.param)


@pytest.mark.parametrize("words", [(2, 0), (5, 1), (3, 1000)])
def test_rows_are_moved_whole(rows, words):
    generator = torch.Generator().manual_seed(words[1])
    arenas, buffers = (
        tuple(torch.randint(-(2**63), 2**63 - 1, (count, width), generator=generator) for width in words)
        for count in (500, 210)
    )
    if rows.device == "cuda":
        buffers = tuple(each.pin_memory() for each in buffers)
    on_device = tuple(each.clone().to(rows.device) for each in arenas)
    slots = torch.randperm(500, generator=generator)[:203]
    there = slots.to(rows.device, torch.int32)
    given = [each.clone() for each in buffers]
    rows.module.move_rows(on_device, buffers, there[1:], up=True)
    for arena, moved, rest in zip(arenas, on_device, given, strict=True):
        arena[slots[1:]] = rest[:202]
        assert torch.equal(moved.cpu(), arena)
    rows.module.move_rows(on_device, buffers, there, up=False)
    if rows.device == "cuda":
        torch.cuda.synchronize()
    for arena, buffer, rest in zip(arenas, buffers, given, strict=True):
        assert torch.equal(buffer[:203], arena[slots])
        assert torch.equal(buffer[203:], rest[203:])


def join(rows: Rows, given: DeviceIds, batch: int, sizes: list[int], dtype: torch.dtype) -> tuple[Bags, list[Tensor]]:
    """What ``join_ids`` fills: bags, and rows, ``is_right`` and ``record``. Tables lie behind each other."""
    count, features = len(given.ids), len(sizes)
    firsts = torch.tensor([sum(sizes[:place]) for place in range(features)]) + 5

    def filled(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((length,), 99, dtype=dtype, device=rows.device)

    scale = None if given.scale is None else filled(count, torch.float32)
    bags = Bags(filled(features * batch + 1), filled(count), filled(features), filled(features), batch, scale)
    joined, is_right = filled(count, dtype), rows.put(torch.ones(1, dtype=torch.int32))
    record = torch.zeros(features + 1, dtype=torch.int64, pin_memory=rows.device == "cuda")
    rows.module.join_ids(
        rows.put(given), rows.put(firsts), rows.put(torch.tensor(sizes)), bags, joined, is_right, record
    )
    if rows.device == "cuda":
        torch.cuda.synchronize()
    return bags, [joined.cpu(), is_right.cpu(), record]


@settings(max_examples=settings.default.max_examples // 3)
@given(
    longest=st.sampled_from([1, 5, 40]), last=st.booleans(), dtype=st.sampled_from([torch.int32, torch.int64]),
    is_scaled=st.booleans(), wrong=st.dictionaries(st.floats(0, 0.99), st.sampled_from([-1, 9, 2**31 - 1]), max_size=3),
    offset=st.none() | st.tuples(st.floats(0, 0.999), st.sampled_from([-5, 1, 3, 10**6])),
)  # fmt: skip
def test_any_ids_are_joined_and_what_is_wrong_is_told(rows, longest, last, dtype, is_scaled, wrong, offset):
    """Also more bags than positions, and more of either than a program takes. What is wrong may be used."""
    rng, sizes, batch = np.random.default_rng([longest, last]), np.array([40, 1, 9]), 70 if longest > 1 else 300
    lengths = rng.integers(0, longest + 1, 3 * batch)
    lengths[[0, batch, -1]] = 0
    ids = (rng.random(lengths.sum()) * np.repeat(sizes, lengths.reshape(3, -1).sum(1))).astype(np.int64)
    for share, row in wrong.items():
        ids[int(share * len(ids))] = row
    whole = np.concatenate([[0], np.cumsum(lengths)])
    if offset is not None:
        whole[int(offset[0] * (len(whole) - 1 + last))] = offset[1]
    is_off = bool(whole[0] != 0 or whole[-1] != len(ids) or (np.diff(whole) < 0).any())
    other = torch.int64 if dtype == torch.int32 else torch.int32
    scale = torch.from_numpy(rng.random(len(ids), np.float32)) if is_scaled else None
    given = DeviceIds(torch.from_numpy(ids).to(dtype), torch.from_numpy(whole if last else whole[:-1]).to(other), scale)
    bags, (joined, is_right, record) = join(rows, given, batch, sizes.tolist(), other)
    if scale is not None:
        assert torch.equal(bags.scale.cpu(), scale)
    assert bool(record[-1]) == is_off
    if is_off:
        assert is_right.item() == 0
        assert 0 <= int(bags.bag_starts.min()) <= int(bags.bag_starts.max()) <= len(ids)
        assert 0 <= int(bags.bag_of.min()) <= int(bags.bag_of.max()) < 3 * batch
        assert 5 <= int(joined.min()) <= int(joined.max()) < 5 + sizes.sum()
        return
    bag_of = np.repeat(np.arange(3 * batch), np.diff(whole))
    feature = bag_of // batch
    is_wrong = (ids < 0) | (ids >= sizes[feature])
    assert bags.bag_of.tolist() == bag_of.tolist()
    assert bags.bag_starts.tolist() == whole.tolist()
    assert joined.tolist() == (5 + (np.cumsum(sizes) - sizes)[feature] + np.where(is_wrong, 0, ids)).tolist()
    assert is_right.item() == (not is_wrong.any())
    for place, told in enumerate(record[:-1].tolist()):
        bad = ids[is_wrong & (feature == place)]
        assert told in bad if len(bad) else not told


Parts = Iterator[tuple[int, int, Tensor, Tensor | None]]


def parts_of(rows: Rows, batch: Batch, cuts: list[int], *, by_row: bool) -> Parts:
    """Parts that end at each of ``cuts``; slots given by row or by position."""
    slots, inverse = rows.put(batch.slots), rows.put(batch.inverse)
    for first, last in zip([0, *cuts], [*cuts, len(inverse)], strict=True):
        part = inverse[first:last]
        yield first, last, slots if by_row else slots[part], part if by_row else None


def pool(
    rows: Rows, batch: Batch, mode: int, cuts: list[int], *, scaled: bool, by_row: bool
) -> tuple[Tensor, Tensor | None]:
    """(pooled, arg-maxima or None)."""
    out = torch.full(batch.grad_out.shape, UNTOUCHED, device=rows.device)
    shape = len(batch.bags.bag_starts) - 1, batch.dim
    arg_max = torch.full(shape, 99, dtype=torch.int32, device=rows.device) if mode == kernels.MAX else None
    for first, last, slots, inverse in parts_of(rows, batch, cuts, by_row=by_row):
        rows.module.pool_rows(
            rows.bags(batch, scaled=scaled), slots, inverse, first, last, mode=mode, weights=rows.put(batch.weights),
            dim=batch.dim, out=out, arg_max=arg_max,
        )  # fmt: skip
    return out, arg_max


def check_pool(rows: Rows, batch: Batch, mode: int, cuts: list[int], *, scaled: bool) -> None:
    expected, best = pool(TWIN, batch, mode, [], scaled=scaled, by_row=False)
    for by_row in (False, True):
        out, arg_max = pool(rows, batch, mode, cuts, scaled=scaled, by_row=by_row)
        assert np.array_equal(bits(out), bits(expected))
        if best is not None:
            assert torch.equal(arg_max.cpu(), best)


ODD = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-7, -1e-40, 3e38, -3e38])


@settings(max_examples=settings.default.max_examples // 3)
@given(
    dim=st.sampled_from(DIMS), dtype=st.sampled_from(DTYPES), mode=st.sampled_from(list(MODES)), scaled=st.booleans(),
    longest=st.sampled_from([0, 1, 5, 9]), is_odd=st.booleans(), is_wide=st.booleans(),
    cuts=st.lists(st.floats(0, 1), max_size=4).map(sorted),
)  # fmt: skip
def test_any_pooling(rows, dim, dtype, mode, scaled, longest, is_odd, is_wide, cuts):
    """In parts that end anywhere, of rows that may be no numbers, into results that may need int64 to be counted."""
    batch = make_batch(dim, dtype, longest=longest)
    if is_wide:
        batch = batch._replace(bags=batch.bags._replace(columns=batch.bags.columns.long()))
    if is_odd:
        some = batch.weights.view(-1)[::3]
        some[:] = ODD.to(dtype).repeat(len(some) // len(ODD) + 1)[: len(some)]
    with np.errstate(invalid="ignore", over="ignore"):
        check_pool(rows, batch, MODES[mode], [int(cut * len(batch.inverse)) for cut in cuts], scaled=scaled)


@pytest.mark.parametrize(("dim", "dtype"), [*zip([1, 20, 128], DTYPES, strict=True)])
def test_dot_products(rows, dim, dtype):
    batch = make_batch(dim, dtype)
    expected = dots(TWIN, batch, [], by_row=False)
    for by_row in (False, True):
        assert np.array_equal(bits(dots(rows, batch, [5, 5], by_row=by_row)), bits(expected))


def dots(rows: Rows, batch: Batch, cuts: list[int], *, by_row: bool) -> Tensor:
    out = torch.full((len(batch.inverse),), -1.0, device=rows.device)
    for first, last, slots, inverse in parts_of(rows, batch, cuts, by_row=by_row):
        rows.module.dot_rows(
            rows.bags(batch), slots, inverse, first, last, weights=rows.put(batch.weights), dim=batch.dim,
            grad_out=rows.put(batch.grad_out), grad_scale=out,
        )  # fmt: skip
    return out


def check_update(
    rows: Rows, batch: Batch, rules: list[optim.Optimizer], *, mode: str = "sum", scaled: bool = False, cut: int = 0
) -> None:
    """Two updates in a row, so that the second starts from state that is not zero; in two parts, cut at ``cut``."""
    number, codes = len(batch.slots), tuple(rule.code for rule in rules)
    arg_max = pool(TWIN, batch, kernels.MAX, [], scaled=False, by_row=False)[1] if mode == "max" else None
    expected = batch.weights.clone(), torch.zeros(64, max(rule.state_dim(batch.dim) for rule in rules) + 2)
    found = rows.put(expected[0]), rows.put(expected[1])
    # The last part has more slots than there are rows.
    slots = torch.cat([batch.slots, torch.full((9,), 10**9, dtype=torch.int32)])
    parts = [(0, cut), (cut, number + 9), (number, number + 9), (number + 2, number + 9)]

    def update(where: Rows, first: int, last: int, arenas: tuple[Tensor, Tensor], dirty: Tensor | None) -> None:
        where.module.update_rows(
            where.bags(batch, scaled=scaled), where.put(batch.groups), where.put(slots[first:last]), first,
            grad_out=where.put(batch.grad_out), arg_max=where.put(arg_max), mean=mode == "mean", codes=codes,
            code_of=where.put(torch.tensor(codes, dtype=torch.int32)), hyper=where.put(hyper), weights=arenas[0],
            state=arenas[1], dim=batch.dim, dirty=dirty,
        )  # fmt: skip

    for step in (1, 2):
        hyper = torch.tensor([rule.hyper(rule.lr, step) for rule in rules])
        assert hyper.shape[1] == NUM_HYPER
        dirty = torch.zeros(64, dtype=torch.uint8, device=rows.device) if step == 1 else None
        update(TWIN, 0, number, expected, None)
        for first, last in parts:
            update(rows, first, last, found, dirty)
        assert all(np.array_equal(bits(one), bits(other)) for one, other in zip(found, expected, strict=True))
        if dirty is not None:
            assert torch.nonzero(dirty.cpu() == 1)[:, 0].tolist() == sorted(batch.slots.tolist())
            assert int(dirty.sum()) == number


EVERY_RULE = [*RULES.values(), optim.RowWiseAdagrad(lr=0.1, eps=0.1), optim.Adam(lr=0.3, betas=(0.5, 0.7))]
HOT: list[tuple[int, ...]] = [(), (), (70,), (330, 10, 90), *((count,) for count in (63, 64, 65, 128, 129))]
"""Positions of rows that have many: runs of 64 that are just full, or a position more."""


@settings(max_examples=settings.default.max_examples // 6)  # each takes seconds in Triton's interpreter
@given(
    dim=st.sampled_from([1, 3, 8, 20]), dtype=st.sampled_from(DTYPES), mode=st.sampled_from(list(MODES)),
    rules=st.one_of(st.sampled_from(EVERY_RULE).map(lambda rule: [rule]), st.just(EVERY_RULE)), scaled=st.booleans(),
    longest=st.sampled_from([0, 3, 7]), hot=st.sampled_from(HOT), share=st.floats(0, 1),
)  # fmt: skip
def test_any_update(rows, dim, dtype, mode, rules, scaled, longest, hot, share):
    """By one rule or by one of each table, in two parts that meet anywhere."""
    batch = make_batch(dim, dtype, longest=longest, hot=hot, tables=len(rules))
    check_update(rows, batch, rules, mode=mode, scaled=scaled, cut=int(share * len(batch.slots)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates_round_ties_to_even(rows, dtype):
    """SGD at rate 1 on numbers with half a last place more or less; some become too large, or no number."""
    batch = make_batch(8, dtype, longest=1, samples=30)
    rng = np.random.default_rng(0)
    info = torch.finfo(dtype)
    batch.weights[:] = 1 + info.eps * torch.arange(8).repeat_interleave(88).view(batch.weights.shape)
    batch.weights[:, 3:5] = info.tiny * torch.arange(1, 3)
    too_large = min(info.max * (1 + info.eps / (4 - 2 * info.eps)), torch.finfo(torch.float32).max)
    halves = [0.5 * info.eps, -0.5 * info.eps, 1.5 * info.eps, -2.5 * info.eps, 0.5 * info.eps * info.tiny]
    choices = np.array([*halves, too_large, -too_large, float("inf"), 0], np.float32)
    choices[-1:].view(np.uint32)[:] = 0x7FFFFFFF  # the NaN that a GPU computes; carelessly rounded, it becomes -0.0
    batch.grad_out[:] = torch.from_numpy(rng.choice(choices, tuple(batch.grad_out.shape)))
    with np.errstate(invalid="ignore", over="ignore"):
        check_update(rows, batch, [optim.SGD(lr=1.0)])


def test_updates_of_rows_with_thousands_of_positions(rows):
    """Super-runs of 4096 that are just full, or a position more, and begin anywhere, in either of two parts."""
    assert (RUN, SUPER_RUN) == (64, 4096)  # stores go on in the bits of earlier releases
    batch = make_batch(4, torch.float32, hot=(10, SUPER_RUN + 1, SUPER_RUN))
    hottest = int(batch.groups.starts[: len(batch.slots) + 1].diff().argmax())
    check_update(rows, batch, [RULES["rowwise_adagrad"]], scaled=True, cut=hottest + 1)

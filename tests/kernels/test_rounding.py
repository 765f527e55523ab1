"""Stochastic rounding of updated rows, against its definition in float64, and what its mean comes to."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tierstore
from tierstore import errors, optim
from tierstore.cache.full import FullCache
from tierstore.exchange import export_store, import_files
from tierstore.kernels import floats
from tierstore.kernels.floats import stochastic_bits
from tierstore.kernels.jit import JIT_ENABLED, kernel
from tierstore.store.manifest import Manifest

HALFS = {"float16": floats.FLOAT16, "bfloat16": floats.BFLOAT16}
every_dtype = pytest.mark.parametrize("dtype", list(HALFS))
ROWS, DIM, SEED = 300, 21, 2**64 + 5
TIGHT = "412KiB"  # holds fewer than the 300 rows of a table, of any of the optimizers
OPTIMIZERS = [
    optim.SGD(lr=0.01),
    optim.SGD(lr=0.01, weight_decay=0.1),
    optim.RowWiseAdagrad(lr=0.01),
    optim.Adagrad(lr=0.01),
    optim.Adam(lr=0.001),
]


# The definition, by search among all halfs in float64.


def halfs(dtype: str) -> Any:
    """float64, ascending: every finite half that is not negative; the place of each is its bit pattern."""
    count = 0x7C00 if dtype == "float16" else 0x7F80
    return torch.arange(count, dtype=torch.int16).view(getattr(torch, dtype)).double().numpy()


def neighbours(values: Any, dtype: str) -> tuple[Any, Any]:
    """(bit pattern of the inner one, probability of the outer one), of values below the largest half."""
    known, size = halfs(dtype), np.abs(values.astype(np.float64))
    inner = np.searchsorted(known, size, side="right") - 1
    low, high = known[inner], known[inner + 1]
    return inner, (size - low) / (high - low)


def rounded(values: Any, random: Any, dtype: str) -> Any:
    """uint16, as ``values`` (float32): the outer neighbour where ``random / 2**64`` is below its share."""
    found = torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.int16).numpy().view(np.uint16).copy()
    is_inside = np.abs(values) < halfs(dtype)[-1]
    inner, share = neighbours(values[is_inside], dtype)
    fraction = (random[is_inside] >> np.uint64(11)).astype(np.float64) / 2.0**53
    sign = np.signbit(values[is_inside]).astype(np.uint16) << 15
    found[is_inside] = (inner + (fraction < share)).astype(np.uint16) | sign
    return found


def mixed(value: Any) -> Any:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def random_bits(seed: int, step: int, table_index: int, rows: Any, dim: int) -> Any:
    of_table = mixed(mixed(np.array([seed % 2**64], np.uint64)) ^ np.frombuffer(b"gnidnuor", "<u8"))
    of_update = mixed(of_table ^ np.uint64(step)) | np.uint64(1)
    of_rows = mixed(of_update ^ (rows.astype(np.uint64) + np.uint64(table_index << 40)))
    return mixed(of_rows[:, None] + np.arange(dim, dtype=np.uint64))


@kernel
def round_all(values: Any, random: Any, out: Any, dtype_code: int) -> None:
    for i in range(values.shape[0]):
        out[i] = stochastic_bits(values[i], dtype_code, random[i])


def by_kernel(values: Any, random: Any, dtype: str) -> Any:
    out = np.empty(len(values), np.uint16)
    round_all(values, random, out, HALFS[dtype])
    return out


def sampled(dtype: str) -> Any:
    generator = np.random.default_rng(0)
    known = halfs(dtype)
    places = generator.choice(len(known) - 1, 3000 if JIT_ENABLED else 100, replace=False)
    gaps = known[places + 1] - known[places]
    between = (known[places] + gaps * generator.random(len(places))).astype(np.float32)
    tiny = np.float32(2.0) ** np.arange(-149, -20, dtype=np.float32)
    return np.concatenate([between, tiny, known[places[:50]].astype(np.float32)])


@pytest.mark.kernel
@every_dtype
def test_the_outer_neighbour_has_exactly_its_share_of_the_random_numbers(dtype):
    values = sampled(dtype)
    values = values[np.abs(values) < halfs(dtype)[-1]]
    inner, share = neighbours(values, dtype)
    # Of 2**53 random numbers those below this one round up: all of them, for a share of 1, were there one.
    turn = np.ceil(share * 2.0**53).astype(np.uint64)
    assert (share == turn / 2.0**53).sum() > len(values) - 130
    for sign in (1, 0):
        signed, bit = (-values, 0x8000) if sign else (values, 0)
        assert np.array_equal(by_kernel(signed, turn << np.uint64(11), dtype), inner | bit)
        is_between = turn > 0
        last = ((turn[is_between] - np.uint64(1)) << np.uint64(11)) + np.uint64(2047)
        assert np.array_equal(by_kernel(signed[is_between], last, dtype), (inner[is_between] + 1) | bit)
    assert ((inner < 0x400) & (share > 0)).sum() > 5


@pytest.mark.kernel
@every_dtype
@given(pairs=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), min_size=1))
def test_any_float(dtype, pairs):
    values = np.array([pattern for pattern, _ in pairs], np.uint32).view(np.float32)
    random = np.array([bits for _, bits in pairs], np.uint64)
    found, expected = by_kernel(values, random, dtype), rounded(values, random, dtype)
    is_nan = np.isnan(values)
    assert torch.from_numpy(found[is_nan]).view(getattr(torch, dtype)).isnan().all()
    assert np.array_equal(found[~is_nan], expected[~is_nan])


def table_config(name: str, **changes: Any) -> tierstore.TableConfig:
    fields: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM}
    return tierstore.TableConfig(name=name, **fields | {"init": tierstore.init.Uniform(-1, 1, seed=SEED)} | changes)


def step(table: tierstore.Table, number: int) -> Tensor:
    """One update; the ids of its rows."""
    generator = torch.Generator().manual_seed(number)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 10, (20,), generator=generator).cumsum(0)])
    ids = (torch.rand(int(offsets[-1]), generator=generator) ** 2 * ROWS).long()
    pooled = tierstore.TieredEmbeddingBag(table, mode="sum", include_last_offset=True)(ids, offsets)
    (pooled * torch.linspace(-1, 1, pooled.numel()).view_as(pooled)).sum().backward()
    return ids.unique()


def bits_of(table: tierstore.Table) -> Any:
    return table.read(torch.arange(table.config.num_embeddings)).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(
    ("optimizer", "ddr", "dim", "dtype"),
    [
        (rule, *[(TIGHT, DIM), ("8MiB", 64), ("8MiB", 3)][place % 3], [*HALFS][place % 2])
        for place, rule in enumerate(OPTIMIZERS)
    ],
)
def test_each_update_is_that_in_float32_rounded(tmp_path, ddr, dim, optimizer, dtype):
    """A table in float32 is given the rows before each update, and so has what is to be rounded after it."""
    own = {"optimizer": optimizer, "embedding_dim": dim}
    with (
        tierstore.open(tmp_path / "plain", ddr="8MiB") as exact,
        tierstore.open(tmp_path / "store", ddr=ddr, policy="lru") as store,
    ):
        plain = exact.create_table(table_config("plain", **own))
        store.create_table(table_config("first", dtype=dtype, **own))
        table = store.create_table(table_config("second", dtype=dtype, rounding="stochastic", **own))
        for number in range(1, 5):
            before = table.read(torch.arange(ROWS))
            plain.write(torch.arange(ROWS), before.float())
            touched = step(plain, number)
            step(table, number)
            random = random_bits(SEED, number, 1, touched.numpy(), dim)
            expected = before.view(torch.int16).numpy().view(np.uint16).copy()
            values = plain.read(touched).numpy()
            expected[touched] = rounded(values.ravel(), random.ravel(), dtype).reshape(values.shape)
            assert np.array_equal(bits_of(table), expected)
        assert (not isinstance(table.pool.cache, FullCache)) == (ddr != "8MiB")


def test_a_training_goes_on_in_the_same_bits_after_it_was_reopened(tmp_path):
    config = table_config("t", dtype="float16", rounding="stochastic", optimizer=optim.Adam())
    with tierstore.open(tmp_path / "whole", ddr="8MiB") as store:
        table = store.create_table(config)
        for number in range(5):
            step(table, number)
        expected = bits_of(table)
    with tierstore.open(tmp_path / "parts", ddr=TIGHT, policy="lru") as store:
        table = store.create_table(config)
        for number in range(4):
            if number == 3:
                store.commit()
            step(table, number)  # the last one is lost
    with tierstore.open(tmp_path / "parts", ddr="1MiB", policy="lfu", threads=2) as store:
        for _ in range(2):
            for number in (3, 4):
                step(store["t"], number)
            assert np.array_equal(bits_of(store["t"]), expected)
            store.rollback(1)


def test_the_device_tier_refuses_it_at_once(tmp_path):
    config = table_config("t", dtype="bfloat16", rounding="stochastic")
    refusal = "'t' has rounding='stochastic', which is not supported with hbm; open the store with hbm=0"
    with tierstore.open(tmp_path / "store", ddr="2MiB", hbm="1% of tables") as store:
        with pytest.raises(errors.TableError, match=refusal):
            store.create_table(config)
        assert not store.tables
    with tierstore.open(tmp_path / "store", ddr="2MiB") as store:
        expected = store.create_table(config).read(torch.arange(ROWS))
        store.commit()
    with pytest.raises(errors.TableError, match=refusal):
        tierstore.open(tmp_path / "store", ddr="2MiB", hbm="1MiB")
    with tierstore.open(tmp_path / "store", mode="r", ddr="2MiB", hbm="1MiB") as store:
        assert torch.equal(store["t"].read(torch.arange(ROWS)), expected)


def test_exports_carry_it_and_stores_for_inference_are_without(tmp_path):
    exported = tmp_path / "t.safetensors"
    with tierstore.open(tmp_path / "store", ddr="1MiB") as store:
        for name in ("t", "u"):
            store.create_table(table_config(name, dtype="bfloat16", rounding="stochastic"))
        store.commit()
    export_store(tmp_path / "store", exported)
    tierstore.quantize(tmp_path / "store", tmp_path / "new", dtype="int8", tables=["t"])
    assert [table.rounding for table in Manifest.read(tmp_path / "new").tables] == ["nearest", "stochastic"]
    for asked, rounding in (
        ({}, "stochastic"),
        ({"dtype": "float32"}, "nearest"),
        ({"rounding": "nearest"}, "nearest"),
    ):
        for _ in range(2):
            import_files(tmp_path / f"{asked}", [exported], **asked)
            assert Manifest.read(tmp_path / f"{asked}").tables[0].rounding == rounding
    with pytest.raises(errors.TableError, match="rounding=nearest, not stochastic; leave the rounding as it is"):
        import_files(tmp_path / f"{asked}", [exported], rounding="stochastic")


every_half = pytest.mark.parametrize(
    ("dtype_code", "dtype"), [(floats.FLOAT16, torch.float16), (floats.BFLOAT16, torch.bfloat16)]
)
every = 1 if JIT_ENABLED else 37


@kernel
def widen(bits: np.ndarray, out: np.ndarray, dtype_code: int) -> None:
    for i in range(bits.shape[0]):
        out[i] = floats.bits_to_float(bits[i], dtype_code)


@kernel
def narrow(values: np.ndarray, out: np.ndarray, dtype_code: int) -> None:
    for i in range(values.shape[0]):
        out[i] = floats.float_to_bits(values[i], dtype_code)


@pytest.mark.kernel
@every_half
def test_every_bit_pattern_widens_as_in_torch(dtype_code, dtype):
    bits = np.arange(0, 65536, every, dtype=np.uint16)
    out = np.empty(len(bits), np.float32)
    widen(bits, out, dtype_code)
    expected = torch.from_numpy(bits).view(dtype).float().numpy()
    number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(out), ~number)
    assert np.array_equal(out[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.kernel
@every_half
def test_ties_their_neighbours_and_extremes_narrow_as_in_torch(dtype_code, dtype):
    exact = torch.arange(0, 0x7C00, every * 3, dtype=torch.int32).to(torch.int16).view(torch.float16)
    lower = exact.to(dtype).float()
    upper = (exact.to(dtype).view(torch.int16) + 1).view(dtype).float()
    bits = ((lower.double() + upper.double()) / 2).float().view(torch.int32)
    largest = torch.finfo(dtype).max
    others = torch.tensor([float("nan"), float("inf"), largest, largest * (1 + 2**-9), 1e-45, 1e-40, 3e38, 70000.0])
    around = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    values = torch.cat([around, -around, others, -others])
    out = np.empty(len(values), np.uint16)
    narrow(values.numpy(), out, dtype_code)
    expected = values.to(dtype)
    nan = torch.from_numpy(out).view(dtype).isnan()
    assert torch.equal(nan, expected.isnan())
    assert np.array_equal(out[~nan.numpy()], expected[~nan].view(torch.int16).numpy().view(np.uint16))

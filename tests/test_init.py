"""First values of rows, against arithmetic on Python's own integers and floats."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import tierstore
from tests.recordings import hashed as splitmix
from tierstore import init
from tierstore.kernels import slots
from tierstore.layout import KEY_ROW_BITS

pytestmark = pytest.mark.kernel
MASK = 2**64 - 1


def unit(bits: int) -> float:
    return (bits >> 11) / 2**53


def bits_of(seed: int, key: int, column: int) -> int:
    row = splitmix(splitmix(seed & MASK) ^ key)
    return splitmix((row + column) & MASK)


def filled(rule: init.Initializer, keys: list[int], dim: int) -> np.ndarray:
    weights = np.full((len(keys), dim + 1), 7, np.float32)
    rule.fill(np.array(keys, np.int64), np.arange(len(keys), dtype=np.int32)[::-1].copy(), weights, dim, 0)
    assert not weights[:, dim].any()
    return weights[::-1, :dim]


KEYS = [0, 1, 2**40 - 1, (5 << KEY_ROW_BITS) | 77]


def test_splitmix_gives_the_published_sequence() -> None:
    """The first outputs for seed 1234567, as its author's test vectors list them."""
    state, golden, seen = 1234567, 0x9E3779B97F4A7C15, []
    for _ in range(3):
        seen.append(int(slots.mix64(np.uint64(state))))
        state = (state + golden) & MASK
    assert seen == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 3, -1, 2**70])
def test_uniform_normal_and_constant_values(seed: int) -> None:
    bits = [[bits_of(seed, key, column) for column in range(5)] for key in KEYS]
    uniform = np.array([[-0.25 + 0.75 * unit(each) for each in row] for row in bits], np.float32)
    assert np.array_equal(filled(init.Uniform(-0.25, 0.5, seed=seed), KEYS, 5), uniform)
    angles = [[2 * math.pi * unit(splitmix(each ^ 0xD1B54A32D192ED03)) for each in row] for row in bits]
    lengths = [[math.sqrt(-2 * math.log(1 - unit(each))) for each in row] for row in bits]
    normal = 0.5 + 2 * np.array(lengths) * np.cos(angles)
    np.testing.assert_allclose(filled(init.Normal(0.5, 2.0, seed=seed), KEYS, 5), normal, rtol=1e-6)
    assert (filled(init.Constant(-3.5), KEYS, 4) == -3.5).all()


def test_uniform_stays_below_its_upper_end() -> None:
    values = filled(init.Uniform(1.0, 1.0 + 2**-20), list(range(200)), 16)
    assert (values >= 1.0).all()
    assert (values < np.float32(1.0 + 2**-20)).all()


@pytest.mark.parametrize("rule", [init.Constant(0.5), init.Uniform(-1, 1, seed=2), init.Normal(0.1, 3.0, seed=3)])
def test_rules_are_read_back_and_a_range_of_columns_has_the_values_of_the_whole_row(rule: init.Initializer) -> None:
    assert init.from_dict(rule.to_dict()) == rule
    part = init.from_dict(rule.from_column(4).to_dict())
    assert np.array_equal(filled(part, KEYS, 3), filled(rule, KEYS, 7)[:, 4:])
    with pytest.raises(ValueError, match="initializer kind 'xavier' is not one of"):
        init.from_dict({"kind": "xavier"})


def test_tables_looked_up_together_have_first_values_and_state_of_their_own(tmp_path: Path) -> None:
    rules = [tierstore.optim.Adagrad(lr=0.1, initial_accumulator_value=first) for first in (0.0, 0.5)]
    kinds = [(init.Constant(value), rule) for value in (0.0, -0.0) for rule in rules]
    with tierstore.open(tmp_path / "store", ddr="1MiB") as store:
        for number, (first, rule) in enumerate([*kinds, *kinds]):
            config = tierstore.TableConfig(
                name=f"t{number}", num_embeddings=9, embedding_dim=3, init=first, optimizer=rule
            )
            store.create_table(config)
        names = list(store.tables)
        features = tierstore.KeyedJaggedTensor(names, torch.arange(8), lengths=torch.ones(8, dtype=torch.int64))
        with torch.no_grad():
            tierstore.TieredEmbeddingBagCollection(store)(features)
        found = [store[name].read(torch.tensor([number])).signbit().all() for number, name in enumerate(names)]
        assert found == [False, False, True, True] * 2
        states = [store[name].read_state(torch.tensor([number])).max() for number, name in enumerate(names)]
        assert states == [0.0, 0.5] * 4

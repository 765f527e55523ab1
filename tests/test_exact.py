"""Promise 1: tier sizes, policy, prefetch depth and threads change no bit of what training ends in."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore import optim

ROWS, DIM, BAGS, STEPS = 1000, 8, 16, 12
TIGHT = "404KiB"  # holds about a hundred of the two thousand rows: fewer than one batch needs
TINY = "36KiB"  # of the HBM tier, likewise
OPTIMIZERS = [
    optim.SGD(lr=0.1, weight_decay=0.01),
    optim.RowWiseAdagrad(lr=0.1),
    optim.Adagrad(lr=0.1),
    optim.Adam(lr=0.1),
]
POOLINGS = ["sum", "mean", "max"]
KINDS = [("float32", "nearest"), ("float16", "nearest"), ("float32", "nearest"), ("bfloat16", "stochastic")]
SETTINGS: list[dict[str, Any]] = [
    {"ddr": TIGHT, "policy": "lru"},
    {"ddr": TIGHT, "policy": "lru", "depth": 3, "threads": 3},
    {"ddr": "440KiB", "policy": "lfu", "depth": 1, "threads": 2},
    {"ddr": "440KiB", "policy": "lru", "depth": 5},
    {"ddr": "480KiB", "policy": "tinylfu", "depth": 3, "threads": 2},
    {"ddr": TIGHT, "policy": "lfu"},
    {"ddr": "2MiB", "depth": 2, "threads": 4},
    {"ddr": TIGHT, "policy": "lru", "depth": 2, "threads": 2, "cold": "memory"},
    {"ddr": "2MiB", "hbm": "1MiB", "depth": 2},
    {"ddr": "2MiB", "hbm": TINY, "depth": 8, "policy": "lfu"},
    {"ddr": "480KiB", "hbm": TINY, "depth": 1, "policy": "lru"},
    {"ddr": "480KiB", "hbm": "64KiB", "depth": 3, "threads": 2},
]


def batches(pooling: str) -> list[tierstore.KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 5, (4 * BAGS,), generator=generator)
        count = int(lengths.sum())
        ids = (torch.rand(count, generator=generator) ** 2 * ROWS).long()
        weights = torch.rand(count, generator=generator) if pooling == "sum" else None
        made.append(tierstore.KeyedJaggedTensor(["a", "b", "c", "d"], ids, weights=weights, lengths=lengths))
    return made


def train(folder: Path | None, config: dict[str, Any], *, depth: int = 0, **settings: Any) -> tuple[torch.Tensor, Any]:
    """(all rows after training and, if there is a folder, reopening; statistics of training)."""
    everything = torch.arange(ROWS)
    with tierstore.open(folder, **settings) as store:
        for seed, names in enumerate((("a", "b"), ("c", "d"))):
            store.create_table(
                tierstore.TableConfig(
                    name=f"table {seed}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=names,
                    init=tierstore.init.Uniform(-1, 1, seed=seed), **config,
                )
            )  # fmt: skip
        collection = tierstore.TieredEmbeddingBagCollection(store)
        for features in tierstore.prefetch(batches(config["pooling"]), collection, depth=depth):
            out = collection(features).values()
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            for pool in {table.pool for table in store.tables.values()}:
                with pool.arena.lock:
                    pool.cache.check_integrity()
                pool.tier.check_integrity()
        for table in store.tables.values():
            assert not table.pool.in_use
        live = torch.cat([table.read(everything) for table in store.tables.values()])
        store.commit()
        stats = store.stats()
    if folder is None:
        return live, stats
    with tierstore.open(folder, mode="r", ddr="2MiB") as store:
        assert torch.equal(torch.cat([table.read(everything) for table in store.tables.values()]), live)
    return live, stats


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_training_ends_in_the_same_bits(tmp_path: Path, optimizer: optim.Optimizer, pooling: str) -> None:
    turn = OPTIMIZERS.index(optimizer) + POOLINGS.index(pooling)
    dtype, rounding = KINDS[turn % len(KINDS)]
    config = {"optimizer": optimizer, "pooling": pooling, "dtype": dtype, "rounding": rounding}
    expected, stats = train(None, config, cold="memory", ddr="2MiB", threads=1)
    assert stats.ddr.evictions == 0
    usable = [each for each in SETTINGS if rounding == "nearest" or "hbm" not in each]
    for number, setting in enumerate(usable[turn // 2 % 2 :: 2]):
        ended, stats = train(None if "cold" in setting else tmp_path / f"{number}", config, **setting)
        assert torch.equal(ended.float(), expected.float()), setting
        if setting["ddr"] == TIGHT and dtype == "float32":
            assert stats.ddr.split_batches > 0
            assert stats.ddr.evictions > ROWS
        if setting.get("hbm") == TINY and dtype == "float32":
            assert stats.hbm.split_batches > 0
            assert stats.hbm.evictions > ROWS
        elif setting.get("hbm") == "1MiB":
            assert stats.hbm.capacity_rows == 2 * ROWS
            assert stats.hbm.evictions == 0
    if rounding == "stochastic":
        nearest, _ = train(None, config | {"rounding": "nearest"}, cold="memory", ddr="2MiB", threads=1)
        assert not torch.equal(nearest.float(), expected.float())


def test_large_batches_are_split_over_threads_without_changing_a_bit(tmp_path: Path) -> None:
    """Enough ids that ``Workers`` really splits the kernels."""
    ended = []
    ids = (torch.rand(40_000, generator=torch.Generator().manual_seed(0)) ** 3 * 5000).long()
    offsets = torch.arange(0, 40_000, 7)
    for threads, mode in itertools.product((1, 2, 5), ("sum", "mean", "max", "rounded")):
        with tierstore.open(tmp_path / f"{threads} {mode}", ddr="16MiB", threads=threads) as store:
            table = store.create_table(
                tierstore.TableConfig(
                    name="t", num_embeddings=5000, embedding_dim=16,
                    init=tierstore.init.Uniform(-1, 1), optimizer=optim.RowWiseAdagrad(lr=0.1),
                    **({"dtype": "bfloat16", "rounding": "stochastic"} if mode == "rounded" else {"pooling": mode}),  # type: ignore[arg-type]
                )
            )  # fmt: skip
            bag = tierstore.TieredEmbeddingBag(table)
            out = bag(ids, offsets)
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            ended.append((mode, torch.cat([out.detach(), table.read(torch.arange(5000))])))
    for mode, bits in ended[4:]:
        assert torch.equal(bits, dict(ended[:4])[mode])

"""A store with rows in device memory is a store without, to the bit: for any tiers, types, optimizers and work.

What a store without shows is held against torch's own modules in tests/nn.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tierstore
from tests.hbm import tracing
from tests.hbm.stores import ALL, MODES, ROWS, bits, config, jagged, least, open_store
from tierstore import optim
from tierstore.exchange.rows import read_rows
from tierstore.hbm.base import DeviceRows
from tierstore.store import arguments
from tierstore.system.sizes import parse_size

RULES = [
    optim.SGD(lr=0.1, weight_decay=0.01), optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.1),
    optim.Adagrad(lr=0.1, initial_accumulator_value=0.5), optim.Adam(lr=0.2, weight_decay=0.01),
]  # fmt: skip
NAMES = ["a", "b", "c"]


class Case(SimpleNamespace):
    """What is drawn below.

    Attributes:
        dims: columns of each table; tables of equal columns and state share a pool.
        share: device memory, as a multiple of the least that the tables allow; 0 for all rows.
        is_there: whether ids count as being on the device.
        backwards: whether the backward passes of lookups that wait for theirs come in the opposite order.
    """

    @property
    def is_one_pool(self) -> bool:
        """So that a slot's number says which slot it is."""
        layouts = {(dim, rule.state_dim(dim)) for dim, rule in zip(self.dims, self.rules, strict=True)}
        return len(layouts) == 1 and self.share != 4  # where another table is made

    @property
    def tables(self) -> list[tierstore.TableConfig]:
        return [
            config(name, embedding_dim=dim, optimizer=rule, dtype=self.dtype, pooling=self.pooling)
            for name, dim, rule in zip(NAMES, self.dims, self.rules, strict=True)
        ]


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    dims=st.one_of(st.sampled_from([1, 3, 4, 64]).map(lambda dim: [dim] * 3), st.just([4, 4, 15]), st.just([1, 5, 3])),
    rules=st.one_of(
        st.sampled_from(RULES).map(lambda rule: [rule] * 3), st.permutations(RULES).map(lambda rules: rules[:3])
    ),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    pooling=st.sampled_from(MODES),
    policy=st.sampled_from(["lru", "lfu", "tinylfu"]),
    ddr=st.sampled_from(["1200KiB", "4MiB"]),
    share=st.sampled_from([1, 1, 1.5, 4, 0]),
    depth=st.integers(0, 4),
    is_there=st.booleans(),
    is_traced=st.booleans(),
    is_weighted=st.booleans(),
    backwards=st.booleans(),
)  # fmt: skip


def train(out: Tensor) -> list[Tensor]:
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out]


def batches(order: np.random.Generator, is_weighted: bool) -> list[tierstore.KeyedJaggedTensor]:
    made = []
    for _ in range(4):
        ids, offsets = jagged(order, len(NAMES) * 9, 8)
        weights = torch.from_numpy(order.random(len(ids), np.float32)) if is_weighted else None
        made.append(tierstore.KeyedJaggedTensor(NAMES, ids, weights, offsets=offsets))
    return made


def lookups(store: tierstore.Store, order: np.random.Generator, case: Case) -> list[Any]:
    """Each kind of lookup and of write of table "a", trained where it can be."""
    table, kind = store["a"], (torch.int64, torch.int32)[case.seed % 2]
    written = torch.from_numpy(order.integers(0, ROWS, 150)).to(kind)
    table.write(written, torch.from_numpy(order.standard_normal((150, table.layout.dim))).to(table.layout.torch_dtype))
    ids, offsets = jagged(order, 30, 17)
    seen: list[Any] = [table.read(written), table.read(ids[:0])]
    seen.append(table.pooled(ids.to(kind), offsets.to(kind), mode=MODES[case.seed % 3]))
    bag = tierstore.TieredEmbeddingBag(table, include_last_offset=True)
    scale = torch.from_numpy(order.random(len(ids), np.float32)).requires_grad_() if case.pooling == "sum" else None
    seen += [*train(bag(ids.to(kind), offsets.to(kind), scale)), None if scale is None else scale.grad]
    seen += train(bag(torch.tensor([7], dtype=kind), torch.tensor([0, 0, 1])))
    seen += train(tierstore.TieredEmbedding(table, padding_idx=3)(torch.from_numpy(order.integers(0, 9, (5, 8)))))
    matrix = torch.from_numpy(order.integers(0, ROWS, (30, 3)))
    seen += train(tierstore.TieredEmbeddingBag(table)(matrix) + bag(ids, offsets))  # two lookups, one update
    waiting = [bag(ids[first:], torch.tensor([0, len(ids) - first])) for first in range(0, 60, 15)]
    for out in reversed(waiting) if case.backwards else waiting:
        seen += train(out)
    return seen


def everything(directory: Path | None, case: Case, **settings: Any) -> tuple[list[bytes], Any]:
    """What a store shows while all kinds of things are done to it, and its statistics."""
    order = np.random.default_rng(case.seed)
    made = batches(order, case.is_weighted and case.pooling == "sum")
    with open_store(directory, *case.tables, **settings) as store:
        model, seen = tierstore.TieredEmbeddingBagCollection(store), list[Any]()
        for number, batch in enumerate(tierstore.prefetch(made, model, depth=case.depth, features=lambda batch: batch)):
            seen += train(model(batch).values())
            if number == 1:
                store["b"].learning_rate = 0.05
                seen += lookups(store, order, case)
                store.commit()
            elif number == 3:
                with torch.no_grad():
                    seen.append(model(made[number - 1]).values())
        assert not any(table.pool.in_use for table in store.tables.values())
        ids = ALL.repeat(2)
        everywhere = tierstore.TieredEmbeddingBag(store["a"])(ids, torch.arange(0, 2 * ROWS, 7))
        ids.zero_()  # a reader uses its buffer again
        if case.share == 4 and not store["a"].pool.in_use:  # a batch this large pins no rows in a small tier
            store.create_table(config("late", embedding_dim=1))  # and so the pool is another one in backward
        seen += train(everywhere)
        store["a"].pool.tier.check_integrity()
        seen += [part for name in NAMES for part in read_rows(store[name], 0, ROWS)[:2]]
        before, stats = store["a"].read(ALL), store.stats().hbm
        version = store.commit()
        train(tierstore.TieredEmbeddingBag(store["a"])(ALL[:99], torch.arange(0, 99, 3)))
        store.rollback(version)
        assert bits(store["a"].read(ALL)) == bits(before)
        rows = [bits(store[name].read(ALL)) for name in NAMES]
    if directory is not None:
        with tierstore.open(directory, mode="r", ddr="4MiB") as store:
            assert [bits(store[name].read(ALL)) for name in NAMES] == rows
    return [b"" if each is None else bits(each) for each in seen], stats


@settings(max_examples=settings.default.max_examples // 12)
@given(case=cases)
def test_any_work_has_the_bits_of_host_memory(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        expected, _ = everything(None, case, hbm=0, ddr="4MiB")
        enough = least(case.tables, case.policy)
        hbm = int(case.share * parse_size(enough, name="hbm")) or 2**22
        joined: list[int] = []
        if case.is_there:
            join = DeviceRows.join
            patch.setattr(DeviceRows, "join", lambda *given: joined.append(1) or join(*given))
            patch.setattr(arguments, "is_there", lambda ids, _: isinstance(ids, Tensor))
        trace = tracing.install(patch, case.seed) if case.is_traced and case.is_one_pool else None
        ended, stats = everything(Path(folder) / "with", case, hbm=hbm, ddr=case.ddr, policy=case.policy)
        assert [place for place, pair in enumerate(zip(ended, expected, strict=True)) if pair[0] != pair[1]] == []
        assert stats.hits + stats.misses == stats.unique
        if case.share == 1 and case.is_one_pool:  # of several, those of small rows may have most of theirs
            assert min(stats.evictions, stats.split_batches) > 0
        elif not case.share:
            assert (stats.evictions, stats.split_batches) == (0, 0)
        assert not case.is_there or joined
        assert trace is None or (trace.problems == [] and trace.num_accesses > 1000)

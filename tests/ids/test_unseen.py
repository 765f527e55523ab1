"""Ids without a row that count (``unseen="init"``), beside torch over a table's rows and those that they would get."""

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tierstore
from tests.hbm.stores import MODES, few_slots
from tests.ids.test_machine import INIT
from tests.ids.test_tables import config
from tests.serve.models.stores import asked, tensor
from tierstore.ids import DynamicIds, Frequency
from tierstore.serve.models import Models

SAMPLES, COUNT = 4, 40
IDS = (torch.arange(COUNT) * 0x1E3779B97F4A7C15).sort().values
COUNTED = DynamicIds(admission=Frequency(2), unseen="init")
RULES = {"item": COUNTED, "left": replace(COUNTED, unseen="zeros"), "all": DynamicIds()}


def pooled(rows: Tensor, known: Tensor, mode: str) -> Tensor:
    """One bag of rows, float32 [n, dim]: float32 [dim]."""
    if not known.all() and known.any():
        one, other, share = *(pooled(rows[own], known[own], mode) for own in (known, ~known)), known.float().mean()
        if mode == "max":
            return torch.where(other > one, other, one)
        return one * share + other * (1 - share) if mode == "mean" else one + other
    if mode == "max" and len(rows):
        return rows.max(0).values
    total: Tensor = sum(rows, torch.zeros(rows.shape[1]))
    return total / len(rows) if mode == "mean" and len(rows) else total


@pytest.mark.parametrize(("mode", "is_weighted"), [("sum", True), *((mode, False) for mode in MODES)])
@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]), seed=st.integers(0, 2**16), is_deferred=st.booleans(),
    depth=st.sampled_from([0, 2]), hbm=st.sampled_from([0, 9, 500]),
)  # fmt: skip
def test_an_id_without_a_row_counts_as_the_row_that_it_would_get(
    mode: Any, is_weighted: bool, dtype: Any, seed: int, is_deferred: bool, depth: int, hbm: int
) -> None:
    """In a lookup with a table whose unseen ids are left out."""
    random, seen, taken, batches = torch.Generator().manual_seed(seed), Counter[int](), [], []
    for _ in range(5):
        lengths = torch.randint(0, 6, (2 * SAMPLES,), generator=random)
        taken.append(torch.randint(0, COUNT, (int(lengths.sum()),), generator=random))
        given, names = torch.randn(len(taken[-1]), generator=random).repeat(2), ["item", "item2", "left", "left2"]
        weights = given.requires_grad_() if is_weighted else None
        batches.append(tierstore.KeyedJaggedTensor(names, IDS[taken[-1]].repeat(2), weights, lengths=lengths.repeat(2)))
    options: Any = {"hbm": "1MiB", "device": "cpu"} if hbm else {}
    few = few_slots(hbm) if hbm else contextlib.nullcontext()
    with few, tierstore.open(cold="memory", ddr="2MiB", **options) as store:
        for name, rules in RULES.items():
            made = replace(config(name), init=INIT, dtype=dtype, pooling=mode, optimizer=tierstore.optim.SGD(lr=0.5))
            store.create_table(replace(made, feature_names=(name, f"{name}2"), ids=rules))
        item, every = store["item"], store["all"]
        every.admit(IDS)
        start, module = every.read(IDS), tierstore.TieredEmbeddingBagCollection(store, tables=["item", "left"])
        optimizer = store.optimizer() if is_deferred else None
        for places, batch in zip(taken, tierstore.prefetch(batches, module, depth=depth), strict=True):
            out, weights = module(batch).values(), batch.weights_or_none()
            seen.update(places.tolist())
            known = torch.tensor([seen[place] > 1 for place in range(COUNT)])
            bags = torch.split(torch.arange(len(places)), batch.lengths()[: 2 * SAMPLES].tolist())
            scale = torch.ones(len(places)) if weights is None else weights.detach()[: len(places)].clone()
            leaves, expected = [scale.requires_grad_()], []
            for table in module.tables:
                leaves.append(torch.where(known[:, None], table.read(IDS), start).float().requires_grad_())
                values = leaves[-1][places] * scale[:, None]
                own = bags if table is item else [each[known[places[each]]] for each in bags]
                expected += [pooled(values[each], known[places[each]], mode) for each in own]
            whole = torch.stack(expected).view(4, SAMPLES, -1).transpose(0, 1).reshape(out.shape)
            assert torch.equal(out, whole)
            gradient = torch.randn(out.shape, generator=random)
            out.backward(gradient)
            of_scale, *found = torch.autograd.grad(whole, leaves, gradient, materialize_grads=True)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            for table, rows, each in zip(module.tables, leaves[1:], found, strict=True):
                torch.testing.assert_close(table.read(IDS)[known], (rows.detach() - 0.5 * each).to(start.dtype)[known])
            if weights is not None:
                torch.testing.assert_close(weights.grad.view(2, -1).sum(0), of_scale)
        rows, ids = torch.where(known[:, None], item.read(IDS), start).float(), tensor("INT64", IDS.tolist())
        models, lengths = Models(store).by_name, tensor("INT32", [COUNT])
        assert torch.equal(torch.from_numpy(asked(models["rows.item"], {"ids": ids})[0]["rows"]), rows)
        bag = asked(models["pooled.item"], {"ids": ids, "lengths": lengths})[0]["embeddings"][0]
        assert torch.equal(torch.from_numpy(bag), pooled(rows, known, mode))
        padding = int(torch.nonzero(~known)[0])
        rows[padding] = 0
        assert torch.equal(tierstore.TieredEmbedding(item, padding_idx=int(IDS[padding]))(IDS), rows)

"""Ids without a row that count (``unseen="init"``), beside torch over a table's rows and those that they would get."""

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tierstore
from tests.hbm.stores import MODES, few_slots
from tests.ids.test_machine import INIT
from tests.serve.models.stores import asked, models_of, tensor
from tierstore.ids import DynamicIds, Frequency

DIM, SAMPLES, COUNT = 21, 4, 40
IDS = (torch.arange(COUNT) * 0x1E3779B97F4A7C15).sort().values


def pooled(rows: Tensor, known: Tensor, mode: str) -> Tensor:
    """One bag, float32 [DIM]."""
    if not known.all() and known.any():
        one, other, share = *(pooled(rows[own], known[own], mode) for own in (known, ~known)), known.float().mean()
        if mode == "max":
            return torch.where(other > one, other, one)
        return one * share + other * (1 - share) if mode == "mean" else one + other
    if mode == "max" and len(rows):
        return rows.max(0).values
    total: Tensor = sum(rows, torch.zeros(DIM))
    return total / len(rows) if mode == "mean" and len(rows) else total


@settings(max_examples=15, deadline=None)
@given(
    mode=st.sampled_from(MODES), dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    how=st.sets(st.sampled_from(["weighted", "deferred", "ahead"])), hbm=st.sampled_from([0, 9, 500]),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_an_id_without_a_row_counts_as_the_row_that_it_would_get(
    mode: Any, dtype: Any, hbm: int, how: set[str], seed: int
) -> None:
    """In a lookup with a table whose unseen ids are left out."""
    random, seen, taken, batches = torch.Generator().manual_seed(seed), Counter[int](), [], []
    for _ in range(5):
        lengths = torch.randint(0, 6, (2 * SAMPLES,), generator=random)
        taken.append(torch.randint(0, COUNT, (int(lengths.sum()),), generator=random))
        ids, given = IDS[taken[-1]].repeat(2), torch.randn(len(taken[-1]), generator=random).repeat(2).requires_grad_()
        weights = given if "weighted" in how and mode == "sum" else None
        names = ["item", "item2", "left", "left2"]
        batches.append(tierstore.KeyedJaggedTensor(names, ids, weights, lengths=lengths.repeat(2)))
    options: Any = {"hbm": "1MiB", "device": "cpu"} if hbm else {}
    rules, few = DynamicIds(admission=Frequency(2), unseen="init"), few_slots(hbm) if hbm else contextlib.nullcontext()
    config = tierstore.TableConfig(
        name="item", num_embeddings=200, embedding_dim=DIM, dtype=dtype, pooling=mode, init=INIT,
        optimizer=tierstore.optim.SGD(lr=0.5), ids=rules,
    )  # fmt: skip
    kinds = {"item": rules, "left": replace(rules, unseen="zeros"), "all": DynamicIds()}
    with few, tierstore.open(cold="memory", ddr="2MiB", **options) as store:
        for name, ids_of in kinds.items():
            store.create_table(replace(config, name=name, feature_names=(name, f"{name}2"), ids=ids_of))
        store["all"].admit(IDS)
        item, start = store["item"], store["all"].read(IDS)
        module = tierstore.TieredEmbeddingBagCollection(store, tables=["item", "left"])
        optimizer = store.optimizer() if "deferred" in how else None
        for places, batch in zip(taken, tierstore.prefetch(batches, module, depth=2 * ("ahead" in how)), strict=True):
            out, weights = module(batch).values(), batch.weights_or_none()
            seen.update(places.tolist())
            known = torch.tensor([seen[place] > 1 for place in range(COUNT)])
            bags = torch.split(torch.arange(len(places)), batch.lengths()[: 2 * SAMPLES].tolist())
            scale = torch.ones(len(places)) if weights is None else weights.detach()[: len(places)].clone()
            leaves, expected = [scale.requires_grad_()], []
            for table in module.tables:
                leaves.append(torch.where(known[:, None], table.read(IDS), start).float().requires_grad_())
                values, own = leaves[-1][places] * scale[:, None], bags
                if table is not item:
                    own = [each[known[places[each]]] for each in bags]
                expected += [pooled(values[each], known[places[each]], mode) for each in own]
            whole = torch.stack(expected).view(4, SAMPLES, DIM).transpose(0, 1).reshape(SAMPLES, 4 * DIM)
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
        assert torch.equal(torch.cat([*item.written()]), IDS[known])
        rows, ids = torch.where(known[:, None], item.read(IDS), start).float(), tensor("INT64", IDS.tolist())
        models = models_of(store).by_name
        assert torch.equal(torch.from_numpy(asked(models["rows.item"], {"ids": ids})[0]["rows"]), rows)
        bag = asked(models["pooled.item"], {"ids": ids, "lengths": tensor("INT32", [COUNT])})[0]["embeddings"][0]
        assert torch.equal(torch.from_numpy(bag), pooled(rows, known, mode))
        padding = int(torch.nonzero(~known)[0])
        rows[padding] = 0
        assert torch.equal(tierstore.TieredEmbedding(item, padding_idx=int(IDS[padding]))(IDS), rows)

"""Dynamic ids between passes: applied gradients, passes that end early, times, other rules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.ids.test_tables import config, listed, train
from tierstore.ids import LFU, TTL, DynamicIds, Frequency, Probability


@pytest.mark.parametrize("steps", ["train", "step", "zero", "rollback"])
@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("hbm", [0, "1MiB"])
def test_a_gradient_that_was_applied_trains_no_other_id(steps: str, is_merged: bool, hbm: Any) -> None:
    with tierstore.open(cold="memory", ddr="2MiB", hbm=hbm) as store:
        table = store.create_table(config(rows=2))
        module, optimizer = tierstore.TieredEmbeddingBag(table), store.optimizer()
        version = store.commit()
        train(module, 1, 2)
        if is_merged:
            optimizer.clip_grad_norm_(max_norm=1e9)
        optimizer.step()
        if steps == "rollback":
            store.rollback(version)
        if steps == "zero":
            optimizer.zero_grad(set_to_none=False)
        table.admit(torch.tensor([3, 4]))  # they get the rows of 1 and 2
        rows = table.read(torch.tensor([3, 4]))
        if steps in ("train", "rollback"):
            with pytest.warns(RuntimeWarning, match="zero_grad"):
                train(module, 3)
        if steps == "zero":
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="zero_grad"):
                optimizer.step()
        assert torch.equal(table.read(torch.tensor([3, 4])), rows)
        optimizer.zero_grad()
        train(module, 3)
        optimizer.step()
        assert (table.read(torch.tensor([3, 4])) < rows).any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize("last", [0, 1])
def test_a_pass_that_on_evict_ends_takes_no_row(last: int) -> None:
    """By age, or, of the same pass, for want of rows."""
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(replace(config(), num_embeddings=4, ids=DynamicIds(eviction=TTL(steps=2))))
        for key in (1, 2, 3):
            table.admit(torch.tensor([key]))
        table.write(torch.tensor([1, 2, 3]), torch.full((3, 8), 2.0))
        calls: list[list[int]] = []

        def refuse(ids: torch.Tensor, rows: torch.Tensor) -> None:
            calls.append(ids.tolist())
            if len(calls) > last:
                raise KeyError("keep them")

        table.on_evict(refuse)
        with pytest.raises(KeyError):
            table.admit(torch.tensor([7, 8, 9, 10]))
        assert calls == [[1], [2, 3]][: last + 1]
        assert listed(table) == [1, 2, 3]
        assert (table.read(torch.tensor([1, 2, 3])) == 2).all()
        assert table.ids is not None
        table.ids.check_integrity()
        assert table.id_stats().evicted == 0
        table.on_evict(None)
        table.admit(torch.tensor([7, 8, 9, 10]))
        assert listed(table) == [7, 8, 9, 10]


@pytest.mark.parametrize("minute", [0, 1, 50])
@pytest.mark.parametrize("is_given", [False, True])
def test_any_minute_is_a_time(minute: int, is_given: bool, tmp_path: Path) -> None:
    """Also the first; rows that are given when it is known are of it. It lasts, whatever becomes of the tables."""
    rules = DynamicIds(eviction=TTL(minutes=16))
    with tierstore.open(tmp_path, ddr="2MiB") as store:
        table = store.create_table(replace(config(), ids=rules))
        with pytest.raises(RuntimeError, match="set_time"):
            table.admit(torch.tensor([1]))
        store.set_time(60 * minute)
        if is_given:
            table.give_rows(np.array([1]))
        else:
            table.admit(torch.tensor([1]))
        store.commit()
        table = store.change_table("item", num_embeddings=2000)
        assert table.admit(torch.tensor([2])) == 1
        store.rollback(store.version)
        assert table.admit(torch.tensor([3])) == 1
        with pytest.raises(ValueError, match="back"):
            store.set_time(60 * minute - 1)
        store.set_time(60 * minute + 1000)
        table.admit(torch.tensor([2]))
        assert listed(table) == [1, 2, 3]
        store.set_time(60 * minute + 1020)
        table.admit(torch.tensor([2]))
        assert listed(table) == [2]


def test_rules_that_would_read_stored_scores_or_counts_otherwise_are_refused() -> None:
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        table = store.create_table(config(admission=Frequency(2, 40)))
        store.create_table(tierstore.TableConfig(name="plain", num_embeddings=9, embedding_dim=8))
        for ids in (
            DynamicIds(), DynamicIds(admission=Frequency(2, 39)), DynamicIds(admission=Probability(0.5)),
            DynamicIds(admission=Frequency(2, 40), eviction=LFU()),
            DynamicIds(admission=Frequency(2, 40), eviction=TTL(minutes=4)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"cannot follow .* import"):
                store.change_table("item", ids=ids)
        with pytest.raises(ValueError, match=r"cannot follow None .* import"):
            store.change_table("plain", ids=DynamicIds())
        assert store["item"] is table

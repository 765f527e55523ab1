"""What torch does to gradients and would have done to rows: one warning that names ``store.optimizer()``."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tierstore

IDS = torch.tensor([[1, 2]])


class Case:
    """A model with fused rows and one optimizer of all its parameters."""

    def __init__(self, store: tierstore.Store, weight_decay: float = 0.0) -> None:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=4))
        self.model = nn.Sequential(tierstore.TieredEmbeddingBag(store["t"]), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, weight_decay=weight_decay)
        self.scaler = torch.amp.GradScaler("cpu")

    def backward(self) -> None:
        self.model(IDS).sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def clipped(case: Case) -> None:
    case.backward()
    torch.nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)


def clipped_by_value(case: Case) -> None:
    case.backward()
    torch.nn.utils.clip_grad_value_(case.model.parameters(), 1.0)


def scaled(case: Case) -> None:
    case.scaler.scale(case.model(IDS).sum()).backward()
    case.scaler.unscale_(case.optimizer)


def accumulated(case: Case) -> None:
    for _ in range(2):
        case.backward()
        case.step()


HABITS: dict[str, tuple[Callable[[Case], None], float]] = {
    "clipping does not reach them": (clipped, 0),
    "clipping does not reach .*clip_grad_norm_": (clipped_by_value, 0),
    "a GradScaler does not reach them": (scaled, 0),
    "several passes before a step are several updates": (accumulated, 0),
    "weight_decay=0.5 of SGD does not reach them": (Case.step, 0.5),
}


@pytest.mark.parametrize(("told", "habit"), HABITS.items())
def test_what_does_not_reach_rows_is_told_once(told: str, habit: Any) -> None:
    do, decay = habit
    with tierstore.open(cold="memory", ddr="4MiB") as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        case = Case(store, decay)
        for _ in range(3):
            do(case)
            case.optimizer.zero_grad()
            case.scaler.update() if do is scaled else None
        messages = [str(each.message) for each in caught]
        assert len(messages) == 1, messages
        assert re.search(told + r".*store.optimizer\(\)", messages[0])


def test_habits_that_rows_have_no_part_in_are_not_told() -> None:
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        case = Case(store)
        for _ in range(3):
            case.step()
            torch.nn.utils.clip_grad_norm_(case.model[1].parameters(), 1.0)
        case.backward()
        case.step()  # once is no habit
        case.step()
        case.model[0].requires_grad_(False)
        for _ in range(3):
            accumulated(case)
            clipped(case)
        case.model[0].requires_grad_(True)
        rows = store.optimizer()
        for _ in range(3):
            accumulated(case)
            rows.clip_grad_norm_(case.model.parameters(), 1.0)
            rows.step()
            rows.zero_grad()

"""The same run in plain numpy arrays: what every version must hold, to the bit.

It shares the plan and the dense layer with the run under test, and no code of the store's but the first values of rows.
Sums run over ids in their order, in float32, as the store promises; formulas are those of Duchi's Adagrad and Kingma
and Ba's Adam.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore import optim

from .dense import Dense
from .plan import FEATURES, SAMPLES, Action, Batch, configs, make_batch
from .state import State, bits_of

__all__ = ["RATE_DECAY", "expected_states", "first_rows"]

Floats = NDArray[np.float32]
RATE_DECAY = 0.995
"""Each step multiplies the tables' learning rates by it."""
_ONE = np.float32(1)


class _Table:
    """One table in memory: ``weights`` [rows, dim], and ``state`` as the store lays it out, [rows, state_dim]."""

    def __init__(self, config: tierstore.TableConfig, first: Floats) -> None:
        self.optimizer: Any = config.optimizer
        self.weights = first.copy()
        self.state = np.full((len(first), config.optimizer.state_dim(first.shape[1])), 0, np.float32)
        self.rate = config.optimizer.lr
        self.step = 0

    def pooled(self, ids: Any, bag_of: Any) -> Floats:
        """float32 [SAMPLES, dim]: the rows of each bag, added in their order."""
        out = np.zeros((SAMPLES, self.weights.shape[1]), np.float32)
        np.add.at(out, bag_of, self.weights[ids])
        return out

    def update(self, ids: Any, gradients: Floats) -> None:
        """One optimizer step on the rows of ``ids``, each position with its gradient."""
        merged = np.zeros_like(self.weights)
        np.add.at(merged, ids, gradients)
        rows = np.unique(ids)
        self.step += 1
        rule = self._adam if isinstance(self.optimizer, optim.Adam) else self._adagrad
        rule(rows, merged[rows])
        self.rate *= RATE_DECAY

    def _adagrad(self, rows: Any, gradient: Floats) -> None:
        self.state[rows] += gradient * gradient
        root = np.sqrt(self.state[rows]) + np.float32(self.optimizer.eps)
        self.weights[rows] -= np.float32(self.rate) * gradient / root

    def _adam(self, rows: Any, gradient: Floats) -> None:
        dim = gradient.shape[1]
        first, second = (np.float32(beta) for beta in self.optimizer.betas)
        mean = first * self.state[rows, :dim] + (_ONE - first) * gradient
        square = second * self.state[rows, dim:] + (_ONE - second) * gradient * gradient
        self.state[rows] = np.hstack([mean, square])
        size = np.float32(self.rate / (1 - self.optimizer.betas[0] ** self.step))
        correction = np.float32(math.sqrt(1 - self.optimizer.betas[1] ** self.step))
        root = np.sqrt(square) / correction + np.float32(self.optimizer.eps)
        self.weights[rows] -= size * mean / root


class _Twin:
    def __init__(self, first: dict[str, Floats]) -> None:
        self._configs = configs()
        self._tables = {config.name: _Table(config, first[config.name]) for config in self._configs}
        self._dims = [first[config.name].shape[1] for config in self._configs for _ in config.feature_names]
        self._dense = Dense(sum(self._dims))

    def train(self, batch: Batch) -> None:
        ids = np.split(batch.sparse.values().numpy(), self._ends(batch))
        lengths = batch.sparse.lengths().numpy().reshape(len(FEATURES), SAMPLES)
        bags = [np.repeat(np.arange(SAMPLES), own) for own in lengths]
        owners = [self._tables[config.name] for config in self._configs for _ in config.feature_names]
        parts = [table.pooled(own, bag) for table, own, bag in zip(owners, ids, bags, strict=True)]
        # Into torch's own memory: what it computes may depend on how its arguments are aligned.
        pooled = torch.from_numpy(np.hstack(parts)).clone().requires_grad_()
        self._dense.step(pooled, batch.target)
        assert pooled.grad is not None
        columns = np.split(pooled.grad.numpy(), np.cumsum(self._dims)[:-1], axis=1)
        spread = [own[bag] for own, bag in zip(columns, bags, strict=True)]
        for table in self._tables.values():
            features = [index for index, owner in enumerate(owners) if owner is table]
            table.update(
                np.concatenate([ids[index] for index in features]), np.vstack([spread[index] for index in features])
            )

    @staticmethod
    def _ends(batch: Batch) -> list[int]:
        return [int(batch.sparse.offsets()[feature * SAMPLES]) for feature in range(1, len(FEATURES))]

    def state(self, position: int, *, is_committed: bool) -> State:
        return State(
            position=position,
            rows={
                name: np.hstack([table.weights.view(np.uint8), table.state.view(np.uint8)])
                for name, table in self._tables.items()
            },
            tables={name: (table.step, table.rate) for name, table in self._tables.items()},
            tensors=bits_of(self._dense.tensors()) if is_committed else {},
        )

    def copy(self) -> Any:
        tables = {name: (t.weights.copy(), t.state.copy(), t.step, t.rate) for name, t in self._tables.items()}
        return tables, self._dense.tensors()

    def go_back(self, copy: Any) -> None:
        tables, tensors = copy
        for name, (weights, state, step, rate) in tables.items():
            table = self._tables[name]
            table.weights, table.state, table.step, table.rate = weights.copy(), state.copy(), step, rate
        self._dense.load(tensors)


def first_rows(directory: Path) -> dict[str, Floats]:
    """All rows before anything was written, from a store of their own."""
    with tierstore.open(directory, ddr="8MiB", threads=1) as store:
        return {
            config.name: store.create_table(config).read(torch.arange(config.num_embeddings)).numpy()
            for config in configs()
        }


def expected_states(plan: Sequence[Action], first: dict[str, Floats]) -> dict[int, State]:
    """Of each version by its position, what it holds; at 0, what there is before the first."""
    twin = _Twin(first)
    states = {0: twin.state(0, is_committed=False)}
    copies: dict[int, Any] = {}
    for position, action in enumerate(plan, 1):
        if action.kind == "train":
            twin.train(make_batch(action.number))
        elif action.kind == "rollback":
            twin.go_back(copies[action.number])
        else:
            states[position], copies[position] = twin.state(position, is_committed=True), twin.copy()
    return states

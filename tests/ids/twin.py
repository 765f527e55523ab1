"""A dict of ids and their rows that is trained as a table is; what it holds is known without the package's map."""

from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import tierstore
from tests.ids.model import Model
from tests.ids.test_machine import ADMISSIONS, EVICTIONS, INIT, first_values
from tierstore.ids import DynamicIds

RULES = st.builds(DynamicIds, admission=ADMISSIONS, eviction=EVICTIONS)
SMALL: dict[str, Any] = {"ddr": "2MiB", "threads": 1}
LR = 0.125
Rows = dict[int, list[float]]


def config(rules: DynamicIds | None = DynamicIds(), rows: int = 12, **options: Any) -> tierstore.TableConfig:  # noqa: B008
    fields = {"name": "item", "optimizer": tierstore.optim.SGD(lr=LR)} | options
    return tierstore.TableConfig(num_embeddings=rows, embedding_dim=6, ids=rules, init=INIT, **fields)


class Twin:
    def __init__(self, config: tierstore.TableConfig) -> None:
        self.model = Model(config.ids, config.num_embeddings)
        self.values: dict[int, torch.Tensor] = {}

    @property
    def rows(self) -> Rows:
        return {key: self.values[key].tolist() for key in self.model.rows}

    def train(self, table: tierstore.Table, ids: list[int]) -> None:
        """One bag of both, whose rows get a gradient of one each time they are in it."""
        tierstore.TieredEmbeddingBag(table)(torch.tensor([ids])).sum().backward()
        given = self.model.train(ids)
        self.values |= dict(zip(given, first_values(given, 6), strict=True))
        self.values |= {key: self.values[key] - LR * ids.count(key) for key in {*ids} & self.model.rows.keys()}

    def evict(self, table: tierstore.Table, ids: list[int]) -> None:
        assert table.evict(torch.tensor(ids, dtype=torch.long)) == len({*ids} & self.model.rows.keys())
        self.model.evict(set(ids))


def contents(table: tierstore.Table) -> Rows:
    table.ids.check_integrity()
    ids = torch.cat([*table.written()])
    return dict(zip(ids.tolist(), table.read(ids).tolist(), strict=True))


def read(directory: Path, **options: Any) -> Rows:
    with tierstore.open(directory, mode="r", **SMALL, **options) as store:
        store.verify()
        return contents(store["item"])


def make(directory: Path, *steps: list[int], **options: Any) -> tuple[Twin, list[Rows]]:
    twin, found = Twin(config(**options)), []
    with tierstore.open(directory, keep=9, **SMALL) as store:
        table = store.create_table(config(**options))
        for ids in steps:
            twin.train(table, ids)
            store.commit()
            found.append(twin.rows)
    return twin, found

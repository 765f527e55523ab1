"""Stores whose device memory holds few of their rows, and what is done with them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.errors import BudgetError
from tierstore.hbm.cache import HbmSize
from tierstore.hbm.pool import HbmPool
from tierstore.store import pools

ROWS = 600
ALL = torch.arange(ROWS)
LEAST = -1
"""Stands for the smallest budget of device memory that the tables allow: room for about 130 rows."""
ENOUGH = 2**20
"""Holds all rows."""
MODES: Any = ("sum", "mean", "max")


def config(name: str = "t", **fields: Any) -> tierstore.TableConfig:
    given: dict[str, Any] = {"embedding_dim": 4, "init": tierstore.init.Uniform(-1, 1), "num_embeddings": ROWS}
    return tierstore.TableConfig(name=name, **(given | fields))


def simple(**fields: Any) -> tierstore.TableConfig:
    """Rows that count down by one each time they are trained."""
    return config(init=tierstore.init.Constant(0.0), optimizer=optim.SGD(lr=1.0), **fields)


def least(configs: Iterable[tierstore.TableConfig], policy: str) -> str:
    """The smallest budget that these tables allow, as its error says."""
    with tierstore.open(cold="memory", hbm=1, ddr="8MiB", policy=policy) as store:
        for each in configs:
            store.create_table(each)
        with pytest.raises(BudgetError) as caught:
            store.pool_of(next(iter(store.tables.values())).layout)
    return re.search(r"give at least (\d+KiB)", str(caught.value))[1]


def open_store(
    directory: Path | None, *configs: tierstore.TableConfig, hbm: int = LEAST, **settings: Any
) -> tierstore.Store:
    configs = configs or (simple(),)
    settings["hbm"] = least(configs, settings.get("policy", "lru")) if hbm == LEAST else hbm
    cold: Any = "lmdb" if directory else "memory"
    given: dict[str, Any] = {"ddr": "2MiB", "threads": 1} | settings
    store = tierstore.open(directory, cold=cold, **given)
    for each in configs:
        store.create_table(each)
    return store


def few_slots(count: int) -> Any:
    """Within it, pools are made with so many slots in device memory, and four for overflow, whatever the budget."""
    size = HbmSize(count, overflow_rows=4, staging_rows=16)
    return mock.patch.object(pools, "divide_hbm", lambda _, rows, **_named: dict.fromkeys(rows, size))


def hot(store: tierstore.Store) -> HbmPool:
    found: Any = store["t"].pool.tier
    assert found.on_device
    return found  # type: ignore[no-any-return]


def step(bag: Any, ids: Tensor) -> None:
    bag(ids, torch.arange(0, len(ids), 3)).sum().backward()


def shown(directory: Path) -> Tensor:
    with tierstore.open(directory, mode="r", ddr="2MiB") as store:
        store.verify()
        return store["t"].read(ALL)


def bits(tensor: Any) -> bytes:
    values = torch.as_tensor(tensor).detach().cpu().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


def jagged(order: np.random.Generator, bags: int, longest: int) -> tuple[Tensor, Tensor]:
    """Skewed ids and the offsets of bags, some empty."""
    offsets = np.cumsum([0, *order.integers(0, longest + 1, bags)])
    return torch.from_numpy((order.random(offsets[-1]) ** 2 * ROWS).astype(np.int64)), torch.from_numpy(offsets)

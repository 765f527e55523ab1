"""Recommendation models as others publish them, made to be served: tables, layers, queries, servers."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

import tierstore
from tierstore.layout import KEY_ROW_BITS
from tierstore.plan.measure import page_cache
from tierstore.plan.presets import preset
from tierstore.plan.traces import generate
from tierstore.serve.hot_rows import hot_rows_path, save_hot_rows

from ..common import Run
from ..data import ROOT
from ..dense_ways import DensePart, model_of
from .queries import Query
from .server import ServerProcess
from .shape import build_once, fill_tables

__all__ = ["IN_MEMORY", "MODELS", "PLACEMENTS", "ZooModel"]

MODELS: Final = ("rmc1", "rmc2", "rmc3", "mlperf-dlrm-v2")
"""Presets of ``tierstore plan``, which has their sources."""
IN_MEMORY, _TENTH, _INT8 = PLACEMENTS = ("all in memory", "a tenth in memory", "all in memory, int8")


class _Scored(nn.Module):
    """All but the tables, as ``tierstore serve --model`` takes it."""

    def __init__(self, part: DensePart) -> None:
        super().__init__()
        self.part = part

    def forward(self, dense: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"probabilities": torch.sigmoid(self.part(dense, torch.cat(list(rows.values()), 1)))}


class ZooModel:
    """A model, its store and its exported program, built unless they were built before; tables have ``rows_max`` rows
    at most."""

    def __init__(self, request: Run, name: str) -> None:
        self.name, self.config, self._log = name, request.config, request.folder / "serve.log"
        published, most = preset(name), self.config["rows_max"]
        cut = (replace(each, num_embeddings=min(each.num_embeddings, most)) for each in published.tables)
        self.workload = replace(published, tables=tuple(cut))
        self.tables = {each.name: each.num_embeddings for each in self.workload.tables}
        self.sample_ids = sum(int(each.pooling_factor) for each in published.tables)
        known = tomllib.loads((ROOT / "bench" / "dense.toml").read_text())["shapes"]
        self.shape: Any = next(each for each in [*self.config["shapes"], *known] if each["name"] == name)
        self.row_bytes = 4 * int(self.shape["embedding_dim"])
        self.table_bytes = sum(self.tables.values()) * self.row_bytes
        self.whole_ddr = 2 * self.table_bytes + (64 << 20)  # every row fits
        self.store, self.program = request.folder / f"zoo_{name}", request.folder / f"{name}.pt2"
        made_of = {"tables": self.tables, "shape": self.shape, "torch": torch.__version__}
        build_once(self.store, made_of, self._build)

    def part(self) -> DensePart:
        """All but the tables."""
        torch.manual_seed(1)
        return model_of(self.shape)

    def _build(self, store: tierstore.Store) -> None:
        batch, dim = torch.export.Dim("batch"), self.shape["embedding_dim"]
        inputs = torch.zeros(2, self.shape["num_dense"]), {name: torch.zeros(2, dim) for name in self.tables}
        shapes = {"dense": {0: batch}, "rows": {name: {0: batch} for name in self.tables}}
        torch.export.save(torch.export.export(_Scored(self.part()), inputs, dynamic_shapes=shapes), self.program)
        fill_tables(store, self.tables, dim, seed=1)

    def queries(self, sizes: Sequence[int], *, seed: int, store_name: str = "") -> list[Query]:
        """Queries of so many candidates each; of several stores of a server, to the one that is named."""
        tables = generate(self.workload, samples=sum(sizes), seed=seed).tables.values()
        lengths = np.stack([np.diff(each.offsets) for each in tables]).astype(np.int32)
        counts = np.random.default_rng(seed).integers(0, 1000, (sum(sizes), self.shape["num_dense"]), np.int32)
        model, found = f"{store_name}.{self.name}" if store_name else self.name, []
        for first, last in pairwise(np.cumsum([0, *sizes]).tolist()):
            values = np.concatenate([each.ids[each.offsets[first] : each.offsets[last]] for each in tables])
            dense, own = np.log1p(counts[first:last], dtype=np.float32), np.ascontiguousarray(lengths[:, first:last])
            found.append(Query(model, {"dense": dense, "values": values, "lengths": own}))
        return found

    @cached_property
    def keys_by_use(self) -> Any:
        """int64: keys of all rows as ``STORE.hot`` has them, those that are looked up most often last."""
        ids = [each.ids for each in generate(self.workload, samples=1000, seed=0).tables.values()]
        rows = list(self.tables.values())
        uses = np.concatenate([np.bincount(own, minlength=count) for own, count in zip(ids, rows, strict=True)])
        keys = np.concatenate([np.arange(count) | (index << KEY_ROW_BITS) for index, count in enumerate(rows)])
        return keys[np.argsort(uses, kind="stable")]

    def server(self, placement: str, *flags: str, stores: Sequence[str]) -> ServerProcess:
        """It begins with the rows in memory that are looked up most often, and the file of rows in the page cache.
        ``stores``: names of one or several, all of this model, each with rows and program of its own."""
        save_hot_rows(hot_rows_path(self.store.absolute()), self.keys_by_use)
        page_cache.warm(self.store / "rows.lmdb")
        ddr = max(self.table_bytes // 10, 8 << 20) if placement == _TENTH else self.whole_ddr
        first, *others = [f"{name}={self.store},model={self.program}" for name in stores]
        flags = (*(f"--store={each}" for each in others), "--dtype", "int8" if placement == _INT8 else "stored", *flags)
        return ServerProcess(first, ddr * len(stores), log=self._log, flags=flags)

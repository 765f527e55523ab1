"""Tables as models: pooled bags or plain rows, for other model servers to look up in."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ...nn.collection import TieredEmbeddingBagCollection
from ...nn.jagged import KeyedJaggedTensor
from ...store import Table
from ..base import Model, Outputs, Pause
from ..messages import InferTensor, ModelMetadata, TensorSpec
from .jagged import Dropped, Features, JaggedIds, Merged, check_inputs, merge, part_sizes, parts_of

_WEIGHTS: Final = TensorSpec("weights", "FP32", (-1,))
_SAMPLE_ROWS: Final = 16
_SAMPLE_BYTES: Final = 16 << 10
"""What counts for one sample where plain rows are asked for. 4,096 of them, the most of a batch by default, are 65,536
rows and at most 64 MiB."""
_TABLE_INPUTS: Final = (TensorSpec("ids", "INT64", (-1,)), TensorSpec("lengths", "INT32", (-1,)))


_QUICK_BYTES: Final = 256 << 10
"""Of rows: so many are copied, or pooled, in some 0.1 ms."""


def _is_quick(tables: Sequence[Table], ids: Any) -> bool:
    row_bytes: int = tables[0].config.embedding_dim * np.dtype(np.float32).itemsize
    return len(tables) == 1 and len(ids) * row_bytes <= _QUICK_BYTES


def feature_inputs(num_features: int) -> tuple[TensorSpec, TensorSpec]:
    """Jagged ids of some features: values INT64 [N] and lengths INT32 [F, B]."""
    return TensorSpec("values", "INT64", (-1,)), TensorSpec("lengths", "INT32", (num_features, -1))


def joined(pieces: Sequence[Any]) -> Any:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def split_rows(outputs: Any, name: str, bounds: Any) -> list[Outputs]:
    return [{name: InferTensor("FP32", outputs[bounds[part] : bounds[part + 1]])} for part in range(len(bounds) - 1)]


class Pooled(Model):
    """Models "pooled.TABLE" and "pooled": bags of ids of every feature, pooled as their tables say, side by side.

    Inputs: ids INT64 [N] and lengths INT32 [B] of one table, or values INT64 [N] and lengths INT32 [F, B], feature by
    feature; optionally weights FP32 [N] where every pooling is "sum". Output: embeddings FP32 [B, sum of D].
    """

    def __init__(
        self, metadata: ModelMetadata, features: Features, owners: Sequence[Table], pool: Callable[[Merged], Any]
    ) -> None:
        self.metadata = metadata
        self._features = features
        self.tables = owners
        self._optional = (_WEIGHTS,) if all(table.config.pooling == "sum" for table in owners) else ()
        self._pool = pool

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        check_inputs(inputs, self.metadata.inputs, self._optional)
        return self._features.parse(inputs)

    def answer_at_once(self, query: JaggedIds) -> Outputs | None:
        if not _is_quick(self.tables, query.values):
            return None
        return self.run([query])[0] if self.tables[0].are_in_memory(torch.from_numpy(query.values)) else None

    def run(self, queries: Sequence[JaggedIds], pause: Pause | None = None) -> list[Outputs]:
        batch = merge(queries)
        with torch.inference_mode():
            pooled = joined([self._pool(part) for part in parts_of(batch, pause)])
        return split_rows(pooled, "embeddings", batch.samples)


def _embeddings(owners: Sequence[Table]) -> TensorSpec:
    return TensorSpec("embeddings", "FP32", (-1, sum(table.config.embedding_dim for table in owners)))


def pooled_table(table: Table, dropped: Dropped | None) -> Pooled:
    name, num_rows = f"pooled.{table.name}", table.config.num_embeddings

    def pool(batch: Merged) -> Any:
        scale = None if batch.weights is None else torch.from_numpy(batch.weights)
        values, offsets = torch.from_numpy(batch.values), torch.from_numpy(batch.offsets)
        return table.pooled(values, offsets, per_sample_weights=scale).numpy()

    metadata = ModelMetadata(
        name=name,
        inputs=_TABLE_INPUTS,
        outputs=(_embeddings([table]),),
        parameters={"rows": num_rows, "pooling": table.config.pooling},
    )
    return Pooled(metadata, Features(name, limits_of({table.name: table}), dropped, ids="ids"), [table], pool)


def owners_of(collection: TieredEmbeddingBagCollection) -> dict[str, Table]:
    """The table of each feature, in the order of the output's columns."""
    tables = {feature: table for table in collection.tables for feature in table.config.feature_names}
    return {feature: tables[feature] for feature in collection.feature_names}


def pool_features(collection: TieredEmbeddingBagCollection, batch: Merged) -> Tensor:
    """float32 [B, sum of D] of a batch."""
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    values, offsets = torch.from_numpy(batch.values), torch.from_numpy(batch.offsets)
    pooled: Tensor = collection(KeyedJaggedTensor(collection.feature_names, values, weights, offsets=offsets)).values()
    return pooled


def _of_features(name: str, owners: Mapping[str, Table], output: TensorSpec) -> ModelMetadata:
    parameters = {"features": ",".join(owners)}
    return ModelMetadata(name=name, inputs=feature_inputs(len(owners)), outputs=(output,), parameters=parameters)


def limits_of(owners: Mapping[str, Table]) -> dict[str, int | None]:
    """``rows`` of ``Features``, by each feature's table."""
    return {feature: None if table.config.ids else table.config.num_embeddings for feature, table in owners.items()}


def pooled_features(collection: TieredEmbeddingBagCollection, dropped: Dropped | None) -> Pooled:
    owners = owners_of(collection)
    tables = list(owners.values())
    metadata = _of_features("pooled", owners, _embeddings(tables))
    features = Features("pooled", limits_of(owners), dropped)
    return Pooled(metadata, features, tables, lambda batch: pool_features(collection, batch).numpy())


class RowsModel(Model):
    """Models "rows.TABLE" and "rows", of tables of one width: rows as they are.

    Inputs: ids INT64 [N] of one table, or values and lengths as of "pooled". Output: rows FP32 [N, D].
    """

    def __init__(self, metadata: ModelMetadata, features: Features, tables: Sequence[Table]) -> None:
        self.metadata = metadata
        self._features = features
        self.tables = tables
        row_bytes = tables[0].config.embedding_dim * np.dtype(np.float32).itemsize
        self._rows_per_sample = max(len(tables), min(_SAMPLE_ROWS, _SAMPLE_BYTES // row_bytes))

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        check_inputs(inputs, self.metadata.inputs)
        if "lengths" in inputs:
            return self._features.parse(inputs, are_pooled=False)._replace(ids_per_sample=self._rows_per_sample)
        ids = np.array(inputs["ids"].data, np.int64)
        lengths = np.array([[len(ids)]])
        outside = self._features.outside(ids, lengths)
        ids = ids if outside is None else np.where(outside, 0, ids)
        return JaggedIds(ids, lengths, outside=outside, ids_per_sample=self._rows_per_sample)

    def answer_at_once(self, query: JaggedIds) -> Outputs | None:
        if not _is_quick(self.tables, query.values):
            return None
        rows = self.tables[0].rows_in_memory(query.values)
        return None if rows is None else _rows_of(query, rows)

    def run(self, queries: Sequence[JaggedIds], pause: Pause | None = None) -> list[Outputs]:
        batch = merge(queries)
        bounds = batch.offsets[np.arange(len(self.tables))[:, None] * batch.samples[-1] + batch.samples]
        ids = torch.from_numpy(batch.values)
        read = [_read(table, ids[span[0] : span[-1]], pause) for table, span in zip(self.tables, bounds, strict=True)]
        outputs = []
        for part, query in enumerate(queries):
            ranges = (bounds[:, part : part + 2] - bounds[:, :1]).tolist()
            pieces = [rows[first:last] for rows, (first, last) in zip(read, ranges, strict=True)]
            outputs.append(_rows_of(query, joined(pieces)))
        return outputs


def _read(table: Table, ids: Tensor, pause: Pause | None) -> Any:
    pieces, first = list[Any](), 0
    for size in part_sizes() if pause else (len(ids),):
        pieces.append(table.read(ids[first : first + size]).to(torch.float32).numpy())
        first += size
        if first >= len(ids) or pause is None:
            break
        pause()
    return joined(pieces)


def _rows_of(query: JaggedIds, rows: Any) -> Outputs:
    if query.outside is not None:
        rows[query.outside] = 0
    return {"rows": InferTensor("FP32", rows)}


def _rows(table: Table) -> TensorSpec:
    return TensorSpec("rows", "FP32", (-1, table.config.embedding_dim))


def table_rows(table: Table, dropped: Dropped | None) -> RowsModel:
    """Model "rows.TABLE"; the rows of ids that are none are zeros, unless they are refused."""
    name, num_rows = f"rows.{table.name}", table.config.num_embeddings
    metadata = ModelMetadata(
        name=name, inputs=_TABLE_INPUTS[:1], outputs=(_rows(table),), parameters={"rows": num_rows}
    )
    return RowsModel(metadata, Features(name, limits_of({table.name: table}), dropped, ids="ids"), [table])


def feature_rows(collection: TieredEmbeddingBagCollection) -> RowsModel:
    """Model "rows". Ids that are no rows are refused always: there would be no row of theirs in the output."""
    owners = owners_of(collection)
    tables = list(owners.values())
    return RowsModel(_of_features("rows", owners, _rows(tables[0])), Features("rows", limits_of(owners), None), tables)

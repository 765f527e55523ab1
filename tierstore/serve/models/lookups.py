"""Tables as models: pooled bags or plain rows, for other model servers to look up in."""

from collections.abc import Mapping, Sequence
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
_QUICK_BYTES: Final = 256 << 10
"""Of rows: so many are copied, or pooled, in some 0.1 ms."""
_ELEMENT_BYTES: Final = 4
_TABLE_INPUTS: Final = (TensorSpec("ids", "INT64", (-1,)), TensorSpec("lengths", "INT32", (-1,)))


def feature_inputs(num_features: int) -> tuple[TensorSpec, TensorSpec]:
    """Jagged ids of some features: values INT64 [N] and lengths INT32 [F, B]."""
    return TensorSpec("values", "INT64", (-1,)), TensorSpec("lengths", "INT32", (num_features, -1))


def joined(pieces: Sequence[Any]) -> Any:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def split_rows(outputs: Any, name: str, bounds: Any) -> list[Outputs]:
    return [{name: InferTensor("FP32", outputs[bounds[part] : bounds[part + 1]])} for part in range(len(bounds) - 1)]


def owners_of(collection: TieredEmbeddingBagCollection) -> dict[str, Table]:
    """The table of each feature, in the order of the output's columns."""
    tables = {feature: table for table in collection.tables for feature in table.config.feature_names}
    return {feature: tables[feature] for feature in collection.feature_names}


def limits_of(owners: Mapping[str, Table]) -> dict[str, int | None]:
    """``rows`` of ``Features``, by each feature's table."""
    return {feature: None if table.config.ids else table.config.num_embeddings for feature, table in owners.items()}


def pool_features(collection: TieredEmbeddingBagCollection, batch: Merged) -> Tensor:
    """float32 [B, sum of D] of a batch."""
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    values, offsets = torch.from_numpy(batch.values), torch.from_numpy(batch.offsets)
    pooled: Tensor = collection(KeyedJaggedTensor(collection.feature_names, values, weights, offsets=offsets)).values()
    return pooled


class _Lookup(Model):
    """Model "KIND.TABLE" of one table, or "KIND" of all features of a collection."""

    kind: str

    def __init__(self, of: Table | TieredEmbeddingBagCollection, dropped: Dropped | None) -> None:
        is_pooled = self.kind == "pooled"
        self._collection = of if isinstance(of, TieredEmbeddingBagCollection) else None
        inputs: tuple[TensorSpec, ...] = _TABLE_INPUTS[: 1 + is_pooled]
        parameters: dict[str, int | str] = {}
        if isinstance(of, TieredEmbeddingBagCollection):
            name, ids, owners = self.kind, "values", owners_of(of)
            inputs, parameters["features"] = feature_inputs(len(owners)), ",".join(owners)
        else:
            name, ids, owners = f"{self.kind}.{of.name}", "ids", {of.name: of}
            parameters["rows"] = of.config.num_embeddings
            parameters |= {"pooling": of.config.pooling} if is_pooled else {}
        self.tables = list(owners.values())
        widths = [table.config.embedding_dim for table in self.tables]
        self._row_bytes = widths[0] * _ELEMENT_BYTES
        self._features = Features(name, limits_of(owners), dropped, ids=ids)
        output = ("embeddings", sum(widths)) if is_pooled else ("rows", widths[0])
        outputs = (TensorSpec(output[0], "FP32", (-1, output[1])),)
        self.metadata = ModelMetadata(name=name, inputs=inputs, outputs=outputs, parameters=parameters)

    def _is_quick(self, query: JaggedIds) -> bool:
        return len(self.tables) == 1 and len(query.values) * self._row_bytes <= _QUICK_BYTES


class Pooled(_Lookup):
    """Models "pooled.TABLE" and "pooled": bags of ids of every feature, pooled as their tables say, side by side.

    Inputs: ids INT64 [N] and lengths INT32 [B] of one table, or values INT64 [N] and lengths INT32 [F, B], feature by
    feature; optionally weights FP32 [N] where every pooling is "sum". Output: embeddings FP32 [B, sum of D].
    """

    kind = "pooled"

    def __init__(self, of: Table | TieredEmbeddingBagCollection, dropped: Dropped | None) -> None:
        super().__init__(of, dropped)
        self._optional = (_WEIGHTS,) if all(table.config.pooling == "sum" for table in self.tables) else ()

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        inputs = check_inputs(inputs, self.metadata.inputs, self._optional)
        return self._features.parse(inputs)

    def answer_at_once(self, query: JaggedIds) -> Outputs | None:
        if not self._is_quick(query):
            return None
        return self.run([query])[0] if self.tables[0].are_in_memory(torch.from_numpy(query.values)) else None

    def run(self, queries: Sequence[JaggedIds], pause: Pause | None = None) -> list[Outputs]:
        batch = merge(queries)
        with torch.inference_mode():
            pooled = joined([self._pool(part) for part in parts_of(batch, pause)])
        return split_rows(pooled, "embeddings", batch.samples)

    def _pool(self, batch: Merged) -> Any:
        if self._collection is not None:
            return pool_features(self._collection, batch).numpy()
        scale = None if batch.weights is None else torch.from_numpy(batch.weights)
        values, offsets = torch.from_numpy(batch.values), torch.from_numpy(batch.offsets)
        return self.tables[0].pooled(values, offsets, per_sample_weights=scale).numpy()


class Rows(_Lookup):
    """Models "rows.TABLE" and "rows", of tables of one width: rows as they are; of ids that are no rows, zeros.

    Inputs: ids INT64 [N] of one table, or values and lengths as of "pooled". Output: rows FP32 [N, D]. "rows" always
    refuses ids that are no rows: there would be no row of theirs in the output.
    """

    kind = "rows"

    def __init__(self, of: Table | TieredEmbeddingBagCollection, dropped: Dropped | None) -> None:
        super().__init__(of, None if isinstance(of, TieredEmbeddingBagCollection) else dropped)
        self._rows_per_sample = max(len(self.tables), min(_SAMPLE_ROWS, _SAMPLE_BYTES // self._row_bytes))

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        inputs = check_inputs(inputs, self.metadata.inputs)
        if "lengths" in inputs:
            return self._features.parse(inputs, are_pooled=False)._replace(ids_per_sample=self._rows_per_sample)
        ids = np.array(inputs["ids"].data, np.int64)
        lengths = np.array([[len(ids)]])
        outside = self._features.outside(ids, lengths)
        ids = ids if outside is None else np.where(outside, 0, ids)
        return JaggedIds(ids, lengths, outside=outside, ids_per_sample=self._rows_per_sample)

    def answer_at_once(self, query: JaggedIds) -> Outputs | None:
        rows = self.tables[0].rows_in_memory(query.values) if self._is_quick(query) else None
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

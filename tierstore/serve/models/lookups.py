"""Tables as models: pooled bags or plain rows, for other model servers to look up in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...nn import KeyedJaggedTensor, TieredEmbeddingBagCollection
from ...store import Table
from ..base import Outputs
from ..config import OutOfRange
from ..messages import InferTensor, ModelMetadata, TensorSpec
from .bags import BagCaches
from .inputs import check_inputs, invalid, lengths_of, require_finite, values_of
from .jagged import JaggedIds, Merged, RowBounds, merge

__all__ = ["PLATFORM", "FeatureRows", "PooledFeatures", "PooledTable", "TableRows", "jagged_of", "split_rows"]

PLATFORM: Final = "tierstore"
_WEIGHTS: Final = TensorSpec("weights", "FP32", (-1,))


def jagged_of(inputs: Mapping[str, InferTensor], values: str, lengths: str, num_features: int) -> JaggedIds:
    """The jagged ids of a request, and its weights if it has any; ServeError for what does not fit together."""
    ids = values_of(inputs, values)
    shaped = lengths_of(inputs, lengths, len(ids), values).reshape(num_features, -1)
    if not shaped.shape[1]:
        raise invalid(lengths, "is empty: send at least one sample")
    weights = inputs.get(_WEIGHTS.name)
    if weights is None:
        return JaggedIds(ids, shaped)
    if weights.data.shape != ids.shape:
        raise invalid(_WEIGHTS.name, f"has {len(weights.data)} elements; {values!r} has {len(ids)}")
    require_finite(_WEIGHTS.name, weights.data)
    return JaggedIds(ids, shaped, np.array(weights.data, np.float32))


def split_rows(outputs: Any, name: str, bounds: Any) -> list[Outputs]:
    """Rows of a batch's output to its requests."""
    return [{name: InferTensor("FP32", outputs[bounds[part] : bounds[part + 1]])} for part in range(len(bounds) - 1)]


def _float_array(rows: Tensor) -> Any:
    return rows.to(torch.float32).numpy()


def _of_table(name: str, version: str, table: Table, inputs: tuple[TensorSpec, ...], output: str) -> ModelMetadata:
    return ModelMetadata(
        name=name,
        versions=(version,),
        platform=PLATFORM,
        inputs=inputs,
        outputs=(TensorSpec(output, "FP32", (-1, table.config.embedding_dim)),),
        parameters={"rows": table.config.num_embeddings},
    )


class PooledTable:
    """Model "pooled.TABLE": bags of ids of one table, pooled as its configuration says.

    Inputs: ids INT64 [N], lengths INT32 [B], of the bags, and optionally weights FP32 [N] where the pooling is "sum".
    Output: embeddings FP32 [B, D].

    Args:
        out_of_range: what becomes of ids that are no rows.
        count: told the model and how many of them were dropped.
        bags: keeps pooled rows, or None; used by ``run`` alone.
    """

    def __init__(
        self,
        table: Table,
        *,
        out_of_range: OutOfRange,
        count: Callable[[str, int], None],
        bags: BagCaches | None = None,
    ) -> None:
        self.name = f"pooled.{table.name}"
        self._bags = bags
        self._table = table
        self._pooling = table.config.pooling
        self._inputs = (TensorSpec("ids", "INT64", (-1,)), TensorSpec("lengths", "INT32", (-1,)))
        self._optional = (_WEIGHTS,) if self._pooling == "sum" else ()
        rows = table.config.num_embeddings
        self._bounds = RowBounds([table.name], [rows], out_of_range, lambda dropped: count(self.name, dropped))

    def metadata(self, version: str) -> ModelMetadata:
        found = _of_table(self.name, version, self._table, self._inputs, "embeddings")
        return replace(found, parameters={**found.parameters, "pooling": self._pooling})

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        check_inputs(inputs, self._inputs, self._optional)
        return self._bounds.checked(jagged_of(inputs, "ids", "lengths", 1), "ids")

    def run(self, queries: Sequence[JaggedIds]) -> list[Outputs]:
        batch = merge(queries)
        with torch.inference_mode():
            if self._bags is None:
                pooled = self._pooled(batch.values, batch.offsets, batch.weights)
            else:
                pooled = self._bags.pooled(self._table.index, self._table.config.embedding_dim, batch, self._pooled)
        return split_rows(pooled, "embeddings", batch.samples)

    def _pooled(self, values: Any, offsets: Any, weights: Any) -> Any:
        scale = None if weights is None else torch.from_numpy(weights)
        ids, starts = torch.from_numpy(values), torch.from_numpy(offsets)
        return self._table.pooled(ids, starts, per_sample_weights=scale).numpy()


class _Ids:
    """Ids without bags."""

    def __init__(self, values: Any, outside: Any) -> None:
        self.values = values
        self.outside = outside
        self.num_samples = max(1, len(values))


class TableRows:
    """Model "rows.TABLE": rows as they are. Inputs: ids INT64 [N]. Output: rows FP32 [N, D]."""

    def __init__(self, table: Table, *, out_of_range: OutOfRange, count: Callable[[str, int], None]) -> None:
        self.name = f"rows.{table.name}"
        self._table = table
        self._drops = out_of_range == "zero"
        self._count = count
        self._inputs = (TensorSpec("ids", "INT64", (-1,)),)

    def metadata(self, version: str) -> ModelMetadata:
        return _of_table(self.name, version, self._table, self._inputs, "rows")

    def parse(self, inputs: Mapping[str, InferTensor]) -> _Ids:
        check_inputs(inputs, self._inputs)
        ids, num_rows = values_of(inputs, "ids"), self._table.config.num_embeddings
        if not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < num_rows):
            return _Ids(ids, None)
        outside = (ids < 0) | (ids >= num_rows)
        if not self._drops:
            first = int(outside.argmax())
            raise invalid("ids", f"has {int(ids[first])} at position {first}: ids are in [0, {num_rows})")
        self._count(self.name, int(np.count_nonzero(outside)))
        return _Ids(np.where(outside, 0, ids), outside)

    def run(self, queries: Sequence[_Ids]) -> list[Outputs]:
        ids = queries[0].values if len(queries) == 1 else np.concatenate([query.values for query in queries])
        rows = _float_array(self._table.read(torch.from_numpy(ids)))
        bounds = np.cumsum([0, *(len(query.values) for query in queries)])
        for first, query in zip(bounds, queries, strict=False):
            if query.outside is not None:
                rows[first : first + len(query.values)][query.outside] = 0
        return split_rows(rows, "rows", bounds)


class _FeatureIds(NamedTuple):
    """Ids of every feature. They count by the rows of the answer, too: bags may be of any length."""

    jagged: JaggedIds

    @property
    def num_samples(self) -> int:
        num_features, num_samples = self.jagged.lengths.shape
        return max(int(num_samples), -(-len(self.jagged.values) // int(num_features)))


class FeatureRows:
    """Model "rows": the rows of every feature's ids. Inputs as of "pooled". Output: rows FP32 [N, D]."""

    name = "rows"

    def __init__(self, pooled: "PooledFeatures") -> None:
        self._pooled = pooled
        self._tables = pooled.tables
        self._dim = pooled.tables[0].config.embedding_dim

    def metadata(self, version: str) -> ModelMetadata:
        outputs = (TensorSpec("rows", "FP32", (-1, self._dim)),)
        return replace(self._pooled.metadata(version), name=self.name, outputs=outputs)

    def parse(self, inputs: Mapping[str, InferTensor]) -> _FeatureIds:
        """See ``Model``; ids that are no rows are rejected, as there would be no row of theirs in the output."""
        check_inputs(inputs, self._pooled.inputs)
        jagged = jagged_of(inputs, "values", "lengths", len(self._tables))
        return _FeatureIds(self._pooled.bounds.required(jagged, "values"))

    def run(self, queries: Sequence[_FeatureIds]) -> list[Outputs]:
        return [{"rows": InferTensor("FP32", self._rows(query.jagged))} for query in queries]

    def _rows(self, query: JaggedIds) -> Any:
        parts = np.split(query.values, np.cumsum(query.lengths.sum(1))[:-1])
        rows = [table.read(torch.from_numpy(ids)) for table, ids in zip(self._tables, parts, strict=True)]
        return _float_array(torch.cat(rows))


class PooledFeatures:
    """Model "pooled": every feature of every table, pooled, side by side.

    Inputs: values INT64 [N], lengths INT32 [F, B], feature by feature in the order that the metadata's parameter
    ``features`` gives, and optionally weights FP32 [N] where every pooling is "sum".
    Output: embeddings FP32 [B, sum of D].
    """

    name = "pooled"

    def __init__(
        self,
        collection: TieredEmbeddingBagCollection,
        *,
        out_of_range: OutOfRange,
        count: Callable[[str, int], None],
    ) -> None:
        self.collection = collection
        self.features = collection.feature_names
        tables = {feature: table for table in collection.tables for feature in table.config.feature_names}
        self.tables = owners = [tables[feature] for feature in self.features]
        self._columns = sum(table.config.embedding_dim for table in owners)
        self.inputs = (TensorSpec("values", "INT64", (-1,)), TensorSpec("lengths", "INT32", (len(owners), -1)))
        self._optional = (_WEIGHTS,) if all(table.config.pooling == "sum" for table in owners) else ()
        num_rows = [table.config.num_embeddings for table in owners]
        self.bounds = RowBounds(self.features, num_rows, out_of_range, lambda dropped: count(self.name, dropped))

    def metadata(self, version: str) -> ModelMetadata:
        return ModelMetadata(
            name=self.name,
            versions=(version,),
            platform=PLATFORM,
            inputs=self.inputs,
            outputs=(TensorSpec("embeddings", "FP32", (-1, self._columns)),),
            parameters={"features": ",".join(self.features)},
        )

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        check_inputs(inputs, self.inputs, self._optional)
        return self.bounds.checked(jagged_of(inputs, "values", "lengths", len(self.features)), "values")

    def run(self, queries: Sequence[JaggedIds]) -> list[Outputs]:
        batch = merge(queries)
        with torch.inference_mode():
            pooled = self.pooled(batch)
        return split_rows(pooled.numpy(), "embeddings", batch.samples)

    def pooled(self, batch: Merged) -> Tensor:
        """float32 [B, sum of D] of a batch."""
        weights = None if batch.weights is None else torch.from_numpy(batch.weights)
        values, offsets = torch.from_numpy(batch.values), torch.from_numpy(batch.offsets)
        pooled: Tensor = self.collection(KeyedJaggedTensor(self.features, values, weights, offsets=offsets)).values()
        return pooled

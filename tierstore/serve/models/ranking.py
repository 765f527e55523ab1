"""The ranking model: what ``tierstore train`` trained, its rows from the store's tiers.

A request holds what a row of the training data holds: dense values and categories, as they were before the run's own
treatment of them (``data.log_dense``, ``data.hashing``), which is repeated here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import DamagedError
from ...train.build import build_model
from ...train.checkpoint import load_model, saved_config
from ...train.config import RunConfig
from ...train.readers import FeatureHasher, dense_features
from ..base import Outputs
from ..config import OutOfRange
from ..messages import InferTensor, ModelMetadata, ServeError, Status, TensorSpec
from .inputs import check_inputs, invalid, require_finite
from .jagged import JaggedIds, merge
from .lookups import PLATFORM, PooledFeatures, jagged_of, split_rows

__all__ = ["Ranking"]


class _Query(NamedTuple):
    dense: Any
    jagged: JaggedIds

    @property
    def num_samples(self) -> int:
        return self.jagged.num_samples


class Ranking:
    """Model "ranking": probabilities of the label.

    Inputs: dense FP32 [B, C], in the order of the metadata's parameter ``dense``, 0 where missing; values INT64 [N] and
    lengths INT32 [F, B], categories from 0 on, feature by feature in the order of ``features``, none where missing.
    Output: probabilities FP32 [B].

    Args:
        pooled: the run's tables.
        config: the run's.
        out_of_range: what becomes of negative categories.
    """

    name = "ranking"

    def __init__(
        self, pooled: PooledFeatures, config: RunConfig, *, out_of_range: OutOfRange, count: Callable[[str, int], None]
    ) -> None:
        self._pooled = pooled
        self.config = config
        self._model = build_model(config, pooled.collection).eval()
        self._hasher = FeatureHasher(config.table_sizes, mode=config.data.hashing)
        self._drops = out_of_range == "zero"
        self._count = count
        self._inputs = (TensorSpec("dense", "FP32", (-1, len(config.data.dense_columns))), *pooled.inputs)

    def is_of(self, extra: Mapping[str, Any]) -> bool:
        """Whether a commit with this ``extra`` is of the same run, so that ``load`` takes its weights."""
        found = saved_config(extra, "the newest commit")
        return found is not None and all(
            getattr(found, part) == getattr(self.config, part) for part in ("data", "embedding", "model")
        )

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """DamagedError unless these are weights that ``load`` takes whole."""
        for name, parameter in self._model.named_parameters():
            found = tensors.get(f"model.{name}")
            if found is None or found.shape != parameter.shape:
                have = "is missing" if found is None else f"has shape {list(found.shape)}"
                raise DamagedError(f"model.{name} of the newest commit {have}: expected {list(parameter.shape)}")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the dense weights of a commit. Not beside ``run``."""
        load_model(self._model, tensors)

    def metadata(self, version: str) -> ModelMetadata:
        data = self.config.data
        return ModelMetadata(
            name=self.name,
            versions=(version,),
            platform=PLATFORM,
            inputs=self._inputs,
            outputs=(TensorSpec("probabilities", "FP32", (-1,)),),
            parameters={"dense": ",".join(data.dense_columns), "features": ",".join(data.sparse_columns)},
        )

    def parse(self, inputs: Mapping[str, InferTensor]) -> _Query:
        check_inputs(inputs, self._inputs)
        dense = inputs["dense"].data
        require_finite("dense", dense)
        jagged = jagged_of(inputs, "values", "lengths", len(self._pooled.features))
        if len(dense) != jagged.num_samples:
            raise invalid("dense", f"has {len(dense)} samples; 'lengths' has {jagged.num_samples}")
        if len(jagged.values) and int(jagged.values.min()) < 0:
            jagged = self._without_negative(jagged)
        ids = self._hasher.jagged(jagged.values, jagged.lengths)
        treated = dense_features(np.array(dense, np.float32), log=self.config.data.log_dense)
        return _Query(treated, JaggedIds(ids, jagged.lengths))

    def _without_negative(self, jagged: JaggedIds) -> JaggedIds:
        good = jagged.values >= 0
        if not self._drops:
            first = int(good.argmin())
            raise invalid("values", f"has {int(jagged.values[first])} at position {first}: categories are 0 or more")
        self._count(self.name, int(len(good) - np.count_nonzero(good)))
        return jagged.chosen(good)

    def run(self, queries: Sequence[_Query]) -> list[Outputs]:
        batch = merge([query.jagged for query in queries])
        dense = queries[0].dense if len(queries) == 1 else np.concatenate([query.dense for query in queries])
        with torch.inference_mode():
            logits = self._model.dense_part(torch.from_numpy(dense), self._pooled.pooled(batch))
            probabilities = torch.sigmoid(logits).numpy()
        if not np.isfinite(probabilities).all():
            raise ServeError(Status.INTERNAL, "the model gave a probability that is no number; look at its weights")
        return split_rows(probabilities, "probabilities", batch.samples)

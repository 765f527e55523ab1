"""The ranking model: what ``tierstore train`` trained, its rows from the store's tiers.

A request holds what a row of the training data holds: the run's own treatment of that is repeated here.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...errors import DamagedError
from ...ids.texts import text_categories
from ...models.dlrm import logits_of
from ...nn.collection import TieredEmbeddingBagCollection
from ...store import Store
from ...train.build import build_model
from ...train.checkpoint import load_model
from ...train.config import RunConfig
from ...train.readers import FeatureHasher, dense_features
from ..base import Model, Outputs, Pause
from ..messages import InferTensor, ModelMetadata, ServeError, Status, TensorSpec
from .dense import Dense, in_float32, low_layers, pack_linears
from .jagged import Dropped, Features, JaggedIds, check_inputs, invalid, lengths_name, merge, parts_of, require_finite
from .lookups import feature_inputs, joined, owners_of, pool_features, split_rows


class Ranking(Model):
    """Model "ranking": probabilities of the label.

    Inputs: dense FP32 [B, C], in the order of the metadata's parameter ``dense``, 0 where missing; values INT64 [N], or
    BYTES for categories as texts, and lengths INT32 [F, B], feature by feature in the order of ``features``, none where
    missing. Output: probabilities FP32 [B], or [B, L] of several ``labels``, in that order. Layers that the commit has
    in fewer bits are computed in them.
    DamagedError: the commit has no weights for the model. ValueError: it has no layers for ``dense``.
    """

    def __init__(self, store: Store, config: RunConfig, dropped: Dropped | None, dense: Dense = "float32") -> None:
        data = config.data
        self._config = config
        self._collection = TieredEmbeddingBagCollection(store, tables=list(data.sparse_columns))
        self.tables = list(owners_of(self._collection).values())
        self._model = build_model(config, self._collection).eval()
        tensors = store.tensors()
        self._low = low_layers(tensors)
        self._packed = pack_linears(self._model, dense, self._low)
        self._hasher = FeatureHasher(config.table_sizes, mode=data.hashing)
        self._rule = data.rule
        limits = dict(zip(self._collection.feature_names, self._hasher.limits, strict=True))
        self._features = Features("ranking", limits, dropped)
        self._refuses = dropped is None or self._rule.are_ids
        parameters = {"dense": data.dense_columns, "features": data.sparse_columns}
        parameters |= {"labels": data.labels} if len(data.labels) > 1 else {}
        self.metadata = ModelMetadata(
            name="ranking",
            inputs=(
                TensorSpec("dense", "FP32", (-1, len(data.dense_columns))),
                *feature_inputs(len(self._features.names)),
            ),
            outputs=(TensorSpec("probabilities", "FP32", (-1, len(data.labels)) if len(data.labels) > 1 else (-1,)),),
            parameters={name: ",".join(columns) for name, columns in parameters.items()},
        )
        self.require(tensors)
        self.load(tensors)

    def is_of(self, config: RunConfig | None) -> bool:
        """Whether a commit of that run, or of none, is of the same one, so that ``load`` takes its weights."""
        parts = ("data", "embedding", "model")
        return config is not None and all(getattr(config, part) == getattr(self._config, part) for part in parts)

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """DamagedError unless these are weights that ``load`` takes whole."""
        tensors = in_float32(tensors)
        for name, parameter in self._model.dense_parameters().items():
            found = tensors.get(f"model.{name}")
            if found is None or found.shape != parameter.shape:
                have = "is missing" if found is None else f"has shape {list(found.shape)}"
                raise DamagedError(f"model.{name} of the newest commit {have}: expected {list(parameter.shape)}")

    def is_stored_as(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a commit of these has the same layers in fewer bits."""
        return low_layers(tensors) == self._low

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the dense weights of a commit. Not during ``run``."""
        load_model(self._model, in_float32(tensors))
        for layer in self._packed:
            layer.pack()

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        if "values" in inputs and inputs["values"].datatype == "BYTES":
            inputs = {**inputs, "values": self._categories_of(inputs["values"])}
        inputs = check_inputs(inputs, self.metadata.inputs)
        dense = inputs["dense"].data
        require_finite("dense", dense, "send finite numbers, 0 where one is missing")
        num_samples = inputs["lengths"].data.shape[1]
        if len(dense) != num_samples:
            raise invalid("dense", f"has {len(dense)} samples; {lengths_name(inputs)!r} has {num_samples}")
        jagged = self._features.parse(inputs, longest=self._config.data.max_list_length)
        ids = self._hasher.ids(jagged.values, jagged.lengths.sum(1))
        treated = dense_features(np.array(dense, np.float32), log=self._config.data.log_dense)
        return jagged._replace(values=ids, dense=treated)

    def _categories_of(self, values: InferTensor) -> InferTensor:
        texts = values.data.reshape(-1).tolist()
        if self._refuses and b"" in texts:  # which in data is a missing category
            where = f"has '' at position {texts.index(b'')}"
            raise invalid("values", f"{where}: leave a missing category out of its bag")
        return InferTensor("INT64", text_categories(texts, self._rule).reshape(values.data.shape))

    def run(self, queries: Sequence[JaggedIds], pause: Pause | None = None) -> Sequence[Outputs | ServeError]:
        batch = merge(queries)
        dense = joined([query.dense for query in queries])
        with torch.inference_mode():
            pooled = [pool_features(self._collection, part) for part in parts_of(batch, pause)]
            rows = pooled[0] if len(pooled) == 1 else torch.cat(pooled)
            probabilities = torch.sigmoid(logits_of(self._model, torch.from_numpy(dense), rows)).numpy()
        answers = split_rows(probabilities, "probabilities", batch.samples)
        if np.isfinite(probabilities).all():
            return answers
        way_out = "look for dense values that are too large, else at the model's weights"
        says = f"the model gave a probability that is no number; {way_out}"
        is_good = [np.isfinite(each["probabilities"].data).all() for each in answers]
        return [
            each if good else ServeError(Status.INTERNAL, says) for each, good in zip(answers, is_good, strict=True)
        ]

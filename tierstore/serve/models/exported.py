"""A model of one's own: a program of torch.export, its rows from the store's tiers."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ...nn.collection import TieredEmbeddingBagCollection
from ...nn.jagged import KeyedJaggedTensor
from ...settings.sections import nearest
from ...store import Store, Table
from ..base import Model, Outputs, Pause
from ..messages import DATATYPES, InferTensor, ModelMetadata, TensorSpec
from .jagged import Dropped, Features, JaggedIds, Merged, check_inputs, invalid, merge, parts_of, require_finite
from .lookups import feature_inputs, limits_of
from .program import Program

_OTHER_INPUTS: Final = ("values", "lengths")
_OTHER_MODELS: Final = re.compile(r"(ranking|pooled|rows|stats)|(pooled|rows)\..*")
"""Names that are not free, whether or not the store has such a model now; "stats" stands for all models in a path."""


class Exported(Model):
    """A model named like its file. An input of the program that is named like a feature of the store gets that
    feature's rows, every other comes with the request, with values INT64 [N] and lengths INT32 [F, B] as of "pooled".
    ``features``: inputs that get rows; None for all that can. ValueError: the program's inputs and the store's features
    do not fit."""

    def __init__(
        self, store: Store, program: Program, dropped: Dropped | None, *, features: Sequence[str] | None = None
    ) -> None:
        if _OTHER_MODELS.fullmatch(program.name):
            raise ValueError(f"{program.path}: {program.name!r} is the name of another model; rename the file")
        owners = {name: table for table in store.tables.values() for name in table.config.feature_names}
        _require_features(program, owners, features)
        if features is not None:
            owners = {name: owners[name] for name in features}
        self._program = program
        self._specs = {spec.name: spec for spec in program.inputs if spec.name in owners}
        self._dense = [spec for spec in program.inputs if spec.name not in owners]
        self._tables = {name: owners[name] for name in self._specs}
        self.tables = list(self._tables.values())
        for spec in program.inputs:
            _require_fit(program, spec, owners)
        pooled = [table.name for name, table in self._tables.items() if len(self._specs[name].shape) == 2]
        self._collection = TieredEmbeddingBagCollection(store, tables=list(dict.fromkeys(pooled)))
        self._features = Features(program.name, limits_of(self._tables), dropped)
        self.metadata = ModelMetadata(
            name=program.name,
            inputs=(*self._dense, *feature_inputs(len(self._specs))),
            outputs=program.outputs,
            parameters={"features": ",".join(self._specs)},
        )

    def take_weights(self, found: Mapping[str, Tensor]) -> None:
        """Compute with these dense weights, ``Program.weights_of`` a commit, or the file's. Not during ``run``."""
        self._program.load(found)
        where = "of the version" if found else "of the file"
        self.metadata = replace(self.metadata, parameters={**self.metadata.parameters, "dense_weights": where})

    @property
    def features(self) -> list[str]:
        return self._features.names

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        check_inputs(inputs, self.metadata.inputs)
        num_samples = inputs["lengths"].data.shape[1]
        dense = []
        for spec in self._dense:
            array = np.array(inputs[spec.name].data, DATATYPES[spec.datatype])
            require_finite(spec.name, array)
            if len(array) != num_samples:
                raise invalid(spec.name, f"has {len(array)} samples; 'lengths' has {num_samples}")
            dense.append(array)
        jagged = self._features.parse(inputs)
        for spec, lengths in zip(self._specs.values(), jagged.lengths, strict=True):
            if len(spec.shape) == 3 and lengths.max() > spec.shape[1]:
                what = f"has {lengths.max()} at sample {lengths.argmax()} of feature {spec.name!r}"
                raise invalid("lengths", f"{what}; the model takes up to {spec.shape[1]} ids a sample")
        return jagged._replace(dense=dense)

    def run(self, queries: Sequence[JaggedIds], pause: Pause | None = None) -> list[Outputs]:
        batch = merge(queries)
        dense = [np.concatenate(parts) for parts in zip(*(query.dense for query in queries), strict=True)]
        given = {spec.name: torch.from_numpy(each) for spec, each in zip(self._dense, dense, strict=True)}
        with torch.inference_mode():
            parts = [self._rows(part) for part in parts_of(batch, pause)]
            given |= (
                parts[0] if len(parts) == 1 else {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
            )
            found = self._program.run([given[spec.name] for spec in self._program.inputs])
            arrays = [each.contiguous().numpy() for each in found]
        return [
            {
                spec.name: InferTensor(spec.datatype, array[first:last])
                for spec, array in zip(self._program.outputs, arrays, strict=True)
            }
            for first, last in zip(batch.samples[:-1], batch.samples[1:], strict=True)
        ]

    def _rows(self, batch: Merged) -> dict[str, Tensor]:
        rows = self._pooled(batch)
        for place, (name, spec) in enumerate(self._specs.items()):
            if len(spec.shape) == 3:
                rows[name] = _padded(self._tables[name], batch, place, spec.shape[1])
        return rows

    def _pooled(self, batch: Merged) -> dict[str, Tensor]:
        """float32 [B, D] of each feature that is pooled, by name."""
        names = list(self._specs)
        others = [name for name in self._collection.feature_names if name not in self._specs]  # of the same tables
        empty = np.full(len(others) * int(batch.samples[-1]), len(batch.values))
        offsets = torch.from_numpy(np.concatenate([batch.offsets, empty]))
        jagged = KeyedJaggedTensor([*names, *others], torch.from_numpy(batch.values), offsets=offsets)
        found = self._collection(jagged).to_dict() if self._collection.feature_names else {}
        return {name: found[name].contiguous() for name, spec in self._specs.items() if len(spec.shape) == 2}


def _require_features(program: Program, known: Mapping[str, Any], features: Sequence[str] | None) -> None:
    """ValueError if a feature that the program must have is missing."""
    names = [spec.name for spec in program.inputs]
    wanted = [*(features or ()), *(name for names in program.dicts if known.keys() & names for name in names)]
    for name in wanted:
        if name not in known:
            hint = nearest(name, known, all_are="its features are")
            raise ValueError(f"{program.path}: input {name!r} takes rows, and the store has no such feature; {hint}")
    if not known.keys() & names:
        hint = nearest("", known, all_are="the store's features are")
        raise ValueError(f"{program.path}: none of its inputs ({', '.join(names)}) is named like a feature; {hint}")


def _require_fit(program: Program, spec: TensorSpec, owners: Mapping[str, Table]) -> None:
    """ValueError unless the input takes the rows of its feature, or comes with requests and looks like no feature."""
    found = f"{program.path}: input {spec.name!r} is {spec.datatype} {list(spec.shape)}"
    table = owners.get(spec.name)
    if table is None:
        for near in difflib.get_close_matches(spec.name, owners, 1):
            if spec.datatype == "FP32" and spec.shape[1:][-1:] == (owners[near].config.embedding_dim,):
                raise ValueError(
                    f"{found}, and the store has no such feature; name it {near!r} if it takes those rows, and less "
                    "alike if it comes with requests"
                )
        if spec.name in _OTHER_INPUTS:
            raise ValueError(f"{found}; requests carry ids by the name {spec.name!r}: rename it")
        return
    dim = table.config.embedding_dim
    if spec.datatype != "FP32" or len(spec.shape) not in (2, 3) or spec.shape[-1] != dim:
        raise ValueError(
            f"{found}; rows of table {table.name!r} have {dim} numbers: export it with float32 [batch, {dim}] for "
            f"pooled rows, or [batch, K, {dim}] for up to K rows a sample"
        )


def _padded(table: Table, batch: Merged, place: int, width: int) -> Tensor:
    """float32 [B, K, D]: the rows of each sample, then zeros."""
    num_samples = int(batch.samples[-1])
    offsets = batch.offsets[place * num_samples : (place + 1) * num_samples + 1]
    lengths = np.diff(offsets)
    rows = table.read(torch.from_numpy(batch.values[offsets[0] : offsets[-1]])).to(torch.float32)
    padded = torch.zeros(num_samples, width, table.config.embedding_dim)
    slots = np.arange(len(rows)) - np.repeat(offsets[:-1] - offsets[0], lengths)
    padded[torch.from_numpy(np.repeat(np.arange(num_samples), lengths)), torch.from_numpy(slots)] = rows
    return padded

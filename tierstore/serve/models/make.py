"""Which models a store has, also after it moved to another version."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from torch import Tensor

from ...errors import TierstoreError
from ...nn.collection import TieredEmbeddingBagCollection
from ...store import Store
from ...store.refresh import Newer
from ...train.checkpoint import saved_config
from ..base import Model
from ..messages import DATATYPES, InferTensor, TensorSpec
from .dense import Dense
from .exported import Exported, Program
from .jagged import Dropped
from .lookups import Pooled, Rows
from .ranking import Ranking

_LOG: Final = logging.getLogger("tierstore.serve")


class Models:
    """The lookups of a store's tables, the ranking model of the run that committed it, and a model of one's own.

    ``dense``: what linear layers compute in. ConfigError: the run is of another release. DamagedError: it has no
    weights for its model. ValueError: the program does not fit the store, or ``dense`` a model. ``by_name`` is another
    mapping after each move that changes it.
    """

    def __init__(
        self, store: Store, *, dropped: Dropped | None = None, program: Program | None = None, dense: Dense = "float32"
    ) -> None:
        self._store = store
        self._dropped = dropped
        self._dense = dense
        config = saved_config(store.extra, str(store.directory))
        self._ranking = None if config is None else Ranking(store, config, dropped, dense)
        self._tables = list(store.tables.values())
        self._program = program
        self._exported = None if program is None else Exported(store, program, dropped)
        self._features = None if self._exported is None else self._exported.features  # a later table adds none
        if dense != "float32" and self._ranking is None and program is None:
            raise ValueError(f"dense={dense!r}: {store.directory} has no model; serve it with --dense float32")
        self.by_name: Mapping[str, Model] = self._made(self._ranking)
        if program is not None and program.weights:
            self._take_weights(program.weights_of(store.tensors()))

    def _made(self, ranking: Ranking | None) -> dict[str, Model]:
        models: list[Model] = [] if ranking is None else [ranking]
        tables = list(self._store.tables.values())
        for table in tables:
            models += [Pooled(table, self._dropped), Rows(table, self._dropped)]
        features = [name for table in tables for name in table.config.feature_names]
        if features and len(set(features)) == len(features):  # else none of its own stands for one of them
            collection = TieredEmbeddingBagCollection(self._store)
            models.append(Pooled(collection, self._dropped))
            if len({table.config.embedding_dim for table in tables}) == 1:
                models.append(Rows(collection, self._dropped))
        if self._exported is not None:
            models.append(self._exported)
        # Models that predict first, where a list is cut short.
        models.sort(key=lambda model: (not isinstance(model, Ranking | Exported), model.metadata.name))
        return {model.metadata.name: model for model in models}

    def show(self, newer: Newer) -> None:
        """Have the store show another version, between two batches, and serve that; models that it does not change stay
        the same. A run whose model cannot be made is left out, with a word in the log.

        ConfigError: the commit's run is of another release. DamagedError: its weights are not all there. Or as
        ``Newer.show``. Nothing has changed then. After another error the next call makes the models again.
        """
        config = saved_config(newer.version.extra, "the newest commit")
        ranking = self._ranking if self._ranking is not None and self._ranking.is_of(config) else None
        program = self._program if self._program is not None and self._program.weights else None
        weights = {} if ranking is None and program is None else newer.tensors()
        ranking = ranking if ranking is not None and ranking.is_stored_as(weights) else None
        own = {} if program is None else program.weights_of(weights)
        if ranking is not None:
            ranking.require(weights)
        newer.show()
        tables = list(self._store.tables.values())
        are_there = set(self._tables) <= set(tables)  # one that has changed is another
        if ranking is not None and are_there:
            ranking.load(weights)
        elif config is not None:
            try:
                ranking = Ranking(self._store, config, self._dropped, self._dense)
            except Exception:
                ranking = None
                _LOG.exception("version %d is served without its ranking model", self._store.version)
        if tables != self._tables:
            self._exported = None if self._program is None else self._new_exported(self._program)
        if tables != self._tables or ranking is not self._ranking:
            made = {name: self._same(model) if are_there else model for name, model in self._made(ranking).items()}
            self._tables, self._ranking, self.by_name = tables, ranking, made
        self._take_weights(own)

    def _take_weights(self, found: Mapping[str, Tensor]) -> None:
        own, program = self._exported, self._program
        if own is not None and program is not None and program.weights:
            own.take_weights(found)
            where = "the version" if found else "its file"
            _LOG.info("model %s: version %d with the dense weights of %s", program.name, self._store.version, where)

    def _new_exported(self, program: Program) -> Exported | None:
        try:
            return Exported(self._store, program, self._dropped, features=self._features)
        except (ValueError, TierstoreError) as error:
            _LOG.error("version %d is served without the model of %s", self._store.version, error)
            return None

    def _same(self, made: Model) -> Model:
        """The model that there was, if it is the same as one just made."""
        old = self.by_name.get(made.metadata.name)
        return made if old is None or old.metadata != made.metadata or isinstance(made, Ranking | Exported) else old


def rehearse(models: Iterable[Model]) -> None:
    """Ask each model for its tables' first rows, alone and two together, so that no request waits until kernels are
    compiled."""
    for model in models:
        specs = {spec.name: spec for spec in model.metadata.inputs}
        num_ids = specs["lengths"].shape[0] if "lengths" in specs else 1
        inputs = {name: _input(spec, max(1, num_ids)) for name, spec in specs.items()}
        try:
            query = model.parse(inputs)
            model.run([query])
            model.answer_at_once(query)
            model.run([query, query])
        except TierstoreError as error:
            _LOG.warning("model %s fails on its first row: %s", model.metadata.name, error)


def _input(spec: TensorSpec, num_ids: int) -> InferTensor:
    """One sample: each feature has id 0."""
    dtype: Any = DATATYPES[spec.datatype]
    if spec.name == "lengths":
        return InferTensor(spec.datatype, np.ones([max(1, size) for size in spec.shape], dtype))
    shape = (num_ids,) if spec.name in ("ids", "values") else tuple(abs(size) for size in spec.shape)  # -1: any
    return InferTensor(spec.datatype, np.zeros(shape, dtype))

"""The log loss of a run on held-out rows, with any of its tables and layers in fewer bits.

Rows are looked up by the store in each type: it converts them as they are read, to the bits of a store in that type.
Each table's pooled rows are kept for each type, and a choice puts them together.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..errors import DamagedError, TableError
from ..layout import DtypeName
from ..nn.collection import TieredEmbeddingBagCollection
from ..pool.converting import layout_as
from ..serve.models.dense import LOW, WEIGHTS_MIN, in_float32, low_layers, lowered
from ..serve.models.ranking import logits_of
from ..store import Store, open_store
from ..train.build import build_model, open_data, open_test_data
from ..train.checkpoint import load_model, saved_config
from ..train.config import RunConfig
from ..train.metrics import log_loss
from ..train.readers import Batch

Choice = Mapping[str, str]
"""The type of each unit that is lowered."""
Part = Literal["search", "check"]
_CHUNK: Final = 2048
"""Rows that go through the layers at a time."""
_PARTS: Final[dict[Part, slice]] = {"search": slice(0, None, 2), "check": slice(1, None, 2)}
ROWS, LAYER, OTHERS = "rows of ", "layer ", "other weights"
"""Units, with the name of the table or layer."""
_DDR: Final = "256MiB"


class Unit(NamedTuple):
    """A table's rows, or a layer's weights. ``size_bytes``: by type; the first is what it has, the others are fewer."""

    name: str
    size_bytes: Mapping[str, int]

    @property
    def own(self) -> str:
        return next(iter(self.size_bytes))


class HeldOut:
    """A run's last commit, and labelled rows, every second one to search on. ``units``: what can be lowered.
    ``digests`` tell runs and rows apart. Memory: 4 bytes for each row, column of a table, and type.

    ``data``: a file in the format of the run's; "": its own test rows. ValueError: the store is of no run, or in fewer
    bits already, or there are fewer than two rows. DataError, StoreNotFoundError, DamagedError.
    """

    def __init__(self, directory: Path, data: str, max_rows: int) -> None:
        with open_store(directory, mode="r", ddr=_DDR) as store:
            config, tensors, self.version = _config_of(store), store.tensors(), store.version
            self._batch = batch = _held_out(config, data, max_rows)
            self._names = names = list(config.data.sparse_columns)
            layouts = [replace(store[name].layout, state_dim=0) for name in names]
            counts = [sum(map(len, store.written_rows(store[name]))) for name in names]
            self._model = build_model(config, TieredEmbeddingBagCollection(store, tables=names)).eval()
            first = [self._look_up(store, name) for name in names]
        self._pooled: list[dict[Any, Tensor]]  # of each table, by type; its own comes first
        self._pooled = [{layout.dtype: each} for layout, each in zip(layouts, first, strict=True)]
        for dtype in get_args(DtypeName):
            with contextlib.suppress(TableError), open_store(directory, mode="r", ddr=_DDR, dtype=dtype) as store:
                if store.version != self.version:
                    raise ValueError(f"{directory} was committed to meanwhile; end its training first")
                for name, layout, own in zip(names, layouts, self._pooled, strict=True):
                    with contextlib.suppress(DamagedError):  # a row that does not fit the type
                        if layout_as(layout, dtype).row_bytes < layout.row_bytes:
                            own[dtype] = self._look_up(store, name)
        self.units = [
            Unit(ROWS + name, {each: count * layout_as(layout, each).row_bytes for each in own})
            for name, count, layout, own in zip(names, counts, layouts, self._pooled, strict=True)
        ]
        load_model(self._model, tensors)
        lower = {dtype: low for dtype, low in LOW.items() if low.is_fast()}  # else float32 is faster
        dense = list(self._model.dense_parameters().values())
        others = sum(each.nbytes for each in dense)
        linears = {name: each for name, each in self._model.named_modules() if type(each) is nn.Linear}
        self._linears: dict[str, dict[str, nn.Module]] = {}  # of each layer, by type
        for name, each in linears.items():
            if each.weight.numel() >= WEIGHTS_MIN:
                key = f"model.{name}.weight"
                stored = {dtype: lowered({key: tensors[key]}, {name: dtype}) for dtype in lower}
                sizes = {dtype: sum(part.nbytes for part in parts.values()) for dtype, parts in stored.items()}
                served = {dtype: lower[dtype](in_float32(parts)[key], each.bias) for dtype, parts in stored.items()}
                self._linears[name] = {"float32": each, **served}
                self.units.append(Unit(LAYER + name, {"float32": each.weight.nbytes, **sizes}))
                others -= each.weight.nbytes
        self.units.append(Unit(OTHERS, {"float32": others}))
        of_data = [batch.labels, batch.dense, batch.sparse.values(), batch.sparse.offsets()]
        self.digests = {"data": _digest(of_data), "run": _digest([*first, *dense])}  # pooled rows depend on the data

    def __len__(self) -> int:
        return len(self._batch)

    def _look_up(self, store: Store, name: str) -> Tensor:
        """float32 [rows, D]: pooled."""
        jagged, first = self._batch.sparse, self._names.index(name) * len(self)
        offsets = jagged.offsets()[first : first + len(self) + 1]
        return store[name].pooled(jagged.values()[offsets[0] : offsets[-1]], offsets - offsets[0])

    def logits(self, choice: Choice, part: Part) -> Tensor:
        """float32 [rows of the part]."""
        for name, each in self._linears.items():
            self._model.set_submodule(name, each[choice.get(LAYER + name, "float32")])
        own = _PARTS[part]
        of_tables = zip(self._names, self._pooled, strict=True)
        rows = [each[choice.get(ROWS + name, next(iter(each)))][own] for name, each in of_tables]
        chunks = zip(torch.split(self._batch.dense[own], _CHUNK), torch.split(torch.cat(rows, 1), _CHUNK), strict=True)
        with torch.inference_mode():
            return torch.cat([logits_of(self._model, *each) for each in chunks])

    def measure(self, choice: Choice, part: Part) -> float:
        return log_loss(self._batch.labels[_PARTS[part]].numpy(), self.logits(choice, part).numpy())


def _config_of(store: Store) -> RunConfig:
    found = saved_config(store.extra, str(store.directory))
    if found is None:
        raise ValueError(f"{store.directory} is of no run of tierstore train; quantize it with --dtype")
    low = [name for name in found.data.sparse_columns if store[name].layout.dtype != found.embedding.dtype]
    if low := [*low, *low_layers(store.tensors())]:
        raise ValueError(f"{store.directory}: {low[0]} is in fewer bits already; give the run that it is made of")
    return found


def _held_out(config: RunConfig, data: str, max_rows: int) -> Batch:
    own, first = config.data, 0
    if not data and not own.has_test:
        raise ValueError("the run has no test rows; name labelled rows that it was not trained on with --data")
    reader, hasher = open_data(replace(config, data=replace(own, path=data)) if data else config)
    if not data:
        reader, first = open_test_data(config, reader), 0 if own.test_path else own.train_rows
        max_rows = min(max_rows, own.test_rows or max_rows)
    found = next(reader.batches(hasher, batch_size=max_rows, start_row=first, log_dense=own.log_dense), None)
    if found is None or len(found) < 2:
        raise ValueError(f"{reader.path} has fewer than two rows from row {first} on")
    return found


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().contiguous().numpy().data)
    return found.hexdigest()

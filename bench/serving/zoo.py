"""Recommendation models as others publish them, made to be served, and where their time goes by operator."""

import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import tierstore
from tierstore.layout import KEY_ROW_BITS
from tierstore.plan.measure import page_cache
from tierstore.plan.traces import generate
from tierstore.plan.workload import load_workload
from tierstore.serve.base import LONG_IDS
from tierstore.serve.config import ServeConfig
from tierstore.serve.hot_rows import hot_rows_path, save_hot_rows
from tierstore.serve.messages import InferTensor
from tierstore.serve.models import Models, load_program

from ..common import Part, Report, Run, Table, median_of
from ..data import ROOT
from ..precision import DensePart, model_of
from .queries import DATATYPES, Query
from .rig import ServerProcess
from .shape import built, fill_tables

MODELS: Final = ("rmc1", "rmc2", "rmc3", "mlperf-dlrm-v2")
"""Presets of ``tierstore plan``, which has their sources."""
_, _TENTH, _INT8 = PLACEMENTS = ("all in memory", "a tenth in memory", "all in memory, int8")
OPERATORS: Final = ("embedding", "dense", "interaction", "rest")
_OF_MODULES: Final = {"bottom": "dense", "top": "dense", "interaction": "interaction"}
_PUBLISHED: Final = {"rmc1": "embedding", "rmc2": "embedding", "rmc3": "dense"}
"""What dominates each, as DeepRecSys says."""
_TORCH: Final = ("torch's embedding_bag", "torch's layers")


class _Scored(DensePart):
    """All but the tables, as ``tierstore serve --model`` takes it."""

    def forward(self, dense: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"probabilities": torch.sigmoid(super().forward(dense, torch.cat(list(rows.values()), 1)))}


class ZooModel:
    """A model, its store and its program, built unless they were before; tables have up to ``rows_max`` rows."""

    def __init__(self, request: Run, name: str) -> None:
        self.name, self.config, self._log = name, request.config, request.folder / "serve.log"
        whole, most = load_workload(name), self.config["rows_max"]
        self.tables = {each.name: min(each.num_embeddings, most) for each in whole.tables}
        cut = [replace(each, num_embeddings=self.tables[each.name]) for each in whole.tables]
        self._workload = replace(whole, tables=tuple(cut))
        self.sample_ids = sum(int(each.pooling_factor) for each in cut)
        known = tomllib.loads((ROOT / "bench" / "precision.toml").read_text())["dense"]["shapes"]
        self.shape: Any = next(each for each in [*self.config["shapes"], *known] if each["name"] == name)
        torch.manual_seed(1)
        self.part = model_of(self.shape)  # all but the tables
        row_bytes = 4 * int(self.shape["embedding_dim"])
        self.sample_bytes, self.table_bytes = self.sample_ids * row_bytes, sum(self.tables.values()) * row_bytes
        self.whole_ddr = 2 * self.table_bytes + (64 << 20)  # every row fits
        self.store, self.program = request.folder / f"zoo_{name}", request.folder / f"{name}.pt2"
        made_of = {"rows": self.tables, "shape": self.shape, "torch": torch.__version__, "seed": 1}
        built(self.store, made_of, self._build)

    def _build(self, store: tierstore.Store, generator: np.random.Generator) -> None:
        batch, dim = torch.export.Dim("batch"), self.shape["embedding_dim"]
        inputs = torch.zeros(2, self.shape["num_dense"]), {name: torch.zeros(2, dim) for name in self.tables}
        shapes = {"dense": {0: batch}, "rows": {name: {0: batch} for name in self.tables}}
        torch.export.save(torch.export.export(_Scored(self.part.model), inputs, dynamic_shapes=shapes), self.program)
        fill_tables(store, self.tables, dim, generator)

    def queries(self, sizes: Sequence[int], *, seed: int) -> list[Query]:
        """Queries of so many candidates each."""
        tables = generate(self._workload, samples=sum(sizes), seed=seed).tables.values()
        lengths = np.stack([np.diff(each.offsets) for each in tables]).astype(np.int32)
        counts = np.random.default_rng(seed).integers(0, 1000, (sum(sizes), self.shape["num_dense"]), np.int32)
        found = []
        for first, last in pairwise(np.cumsum([0, *sizes]).tolist()):
            values = np.concatenate([each.ids[each.offsets[first] : each.offsets[last]] for each in tables])
            dense, own = np.log1p(counts[first:last], dtype=np.float32), np.ascontiguousarray(lengths[:, first:last])
            found.append(Query(self.name, {"dense": dense, "values": values, "lengths": own}))
        return found

    @cached_property
    def _keys_by_use(self) -> Any:
        """int64: keys of all rows as ``STORE.hot`` has them, those that are looked up most often last."""
        ids, rows = generate(self._workload, samples=1000, seed=0).tables.values(), self.tables.values()
        uses = np.concatenate([np.bincount(own.ids, minlength=count) for own, count in zip(ids, rows, strict=True)])
        keys = np.concatenate([np.arange(count) | (index << KEY_ROW_BITS) for index, count in enumerate(rows)])
        return keys[np.argsort(uses, kind="stable")]

    def server(self, placement: str) -> ServerProcess:
        """It begins with the rows in memory that are looked up most often, and the file of rows in the page cache."""
        save_hot_rows(hot_rows_path(self.store.absolute()), self._keys_by_use)
        page_cache.warm(self.store / "rows.lmdb")
        ddr = max(self.table_bytes // 10, 8 << 20) if placement == _TENTH else self.whole_ddr
        flags = ("--model", str(self.program), "--dtype", "int8" if placement == _INT8 else "stored")
        return ServerProcess(self.store, ddr, log=self._log, flags=flags)


class _Clock:
    """Seconds of each operator, by marks where one ends and the next begins."""

    def begin(self) -> None:
        self.seconds = dict.fromkeys((*OPERATORS, *_TORCH), 0.0)
        self._name, self._since = "rest", time.perf_counter()

    def mark(self, name: str, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds[self._name] += now - self._since
        self._name, self._since = name, now

    def put_into(self, program: Any) -> None:
        """Have a program's graph mark where it goes from one operator to another."""
        now = ""
        for node in list(program.graph.nodes):
            if node.op not in ("placeholder", "get_attr") and (name := _operator_of(node)) != now:
                with program.graph.inserting_before(node):
                    program.graph.call_function(self.mark, (now := name,))
        program.recompile()


def _operator_of(node: Any) -> str:
    if node.target is torch.ops.aten.cat.default:
        return "interaction"
    names = [name for path, _ in node.meta.get("nn_module_stack", {}).values() for name in path.split(".")]
    return next((_OF_MODULES[name] for name in names if name in _OF_MODULES), "rest")


def _looked_up(query: Query, tables: list[Tensor]) -> Tensor:
    """Float32 [B, F * D], by torch alone from plain tables."""
    lengths = query.inputs["lengths"]
    values = torch.split(torch.from_numpy(query.inputs["values"]), lengths.sum(1).tolist())
    offsets = torch.from_numpy(np.cumsum(np.pad(lengths, [(0, 0), (1, 0)]), 1, np.int64))
    bag = partial(torch.nn.functional.embedding_bag, mode="sum", include_last_offset=True)
    return torch.cat([bag(ids, rows, own) for ids, rows, own in zip(values, tables, offsets, strict=True)], 1)


@torch.inference_mode()
def by_operator(model: ZooModel) -> dict[str, Any]:
    """Of each size of a query the median seconds of each operator in the model of the server's engine, of "all" of
    them, and of torch alone. RuntimeError: the two do not agree on a probability."""
    config, clock, found = model.config, _Clock(), {}
    threads = ServeConfig(store=str(model.store)).num_threads
    torch.set_num_threads(threads)
    program = load_program(model.program, max_samples=max(config["batches"]))
    clock.put_into(program.module)
    with tierstore.open(model.store, mode="r", ddr=model.whole_ddr, threads=threads) as store:
        tables = [store[name].read(torch.arange(rows)) for name, rows in model.tables.items()]
        served: Any = Models(store, program=program).by_name[model.name]
        served._collection.register_forward_pre_hook(partial(clock.mark, "embedding"))
        served._collection.register_forward_hook(partial(clock.mark, "rest"))
        for size in config["batches"]:
            count = 2 + min(200, max(5, config["queries_ids"] // (size * model.sample_ids)))
            queries = model.queries([size] * count, seed=size)
            own = median_of([_timed(clock, served, tables, model.part, query) for query in queries][2:])
            found[str(size)] = own | {"all": sum(own[name] for name in OPERATORS)}
    return {"sizes": found, "sample_bytes": model.sample_bytes, "table_bytes": model.table_bytes}


def _timed(clock: _Clock, served: Any, tables: list[Tensor], layers: Any, query: Query) -> dict[str, float]:
    inputs = {name: InferTensor(DATATYPES[each.dtype.name], each) for name, each in query.inputs.items()}
    clock.begin()
    parsed = served.parse(inputs)
    (answer,) = served.run([parsed], (lambda: None) if parsed.num_ids > LONG_IDS else None)
    clock.mark(_TORCH[0])
    rows = _looked_up(query, tables)
    clock.mark(_TORCH[1])
    logits = layers(torch.from_numpy(query.inputs["dense"]), rows)
    clock.mark("rest")
    off = np.abs(answer["probabilities"].data - torch.sigmoid(logits).numpy()).max()
    if not off < 1e-3:  # sums are in another order
        raise RuntimeError(f"{len(logits)} probabilities differ from torch's by {off:.3g}")
    return clock.seconds


def _measure(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    return {"models": {name: by_operator(ZooModel(request, name)) for name in MODELS}}


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    rows = []
    for size, own in figures["sizes"].items():
        shares = [f"{1e3 * own[each]:.3g} ({own[each] / own['all']:.0%})" for each in OPERATORS]
        whole, *torchs = (f"{1e3 * own[each]:.3g}" for each in ("all", *_TORCH))
        speed = int(size) * figures["sample_bytes"] / own["embedding"] / 1e9
        rows.append([size, whole, *shares, *torchs, f"{speed:.1f}"])
    return Table(f"{name}: ms by operator (share)", ["candidates", "all", *OPERATORS, *_TORCH, "rows, GB/s"], rows)


def _compared(name: str, sizes: Mapping[str, Mapping[str, float]]) -> str:
    (least, first), (most, last) = list(sizes.items())[0 :: len(sizes) - 1]
    taken = last["all"] / int(most) / (first["all"] / int(least))
    shares = " to ".join(f"{own['embedding'] / own['all']:.0%}" for own in (first, last))
    same = [size for size, own in sizes.items() if own[_PUBLISHED[name]] == max(own[each] for each in OPERATORS)]
    here = f"here with {', '.join(same) or 'none'} of {', '.join(sizes)} candidates"
    shift = f"the embedding's share goes from {shares}, a candidate's time to {taken:.0%}"
    return f"{name} by {_PUBLISHED[name]}, {here}; from the fewest to the most {shift}"


def _tell(figures: dict[str, Any]) -> Report:
    models = figures["models"]
    compared = ". ".join(_compared(name, models[name]["sizes"]) for name in _PUBLISHED)
    cut = ", ".join(f"{name} {own['table_bytes'] / 2**20:,.0f} MiB" for name, own in models.items())
    return Report(
        [_table(name, own) for name, own in models.items()],
        notes=[
            "Operators: in process, by the model that the server's engine makes of the store and of a program of "
            "torch.export, with its number of threads; medians of queries that are asked once, every row in memory. "
            "Marks in the program's graph, and hooks of the TieredEmbeddingBagCollection, say where an operator ends. "
            "Dense: bottom and top MLP. Rest: reading and checking a request, and copies between the others; of more "
            "than 32,768 ids also what it takes to look up in parts, so that others need not wait. Torch scored the "
            "same queries in turns, to the same probabilities: embedding_bag over plain tables, and the layers as they "
            f"were before the export. Layers and lookups are as published, tables are cut off ({cut}), so more of the "
            "popular rows are in the processor's caches.",
            f"The papers' models are dominated (DeepRecSys, 2020): {compared}.",
        ],
    )


PART: Final = Part(_measure, _tell)

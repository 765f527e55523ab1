"""Part "operators": where a model's time goes, by the size of a query, beside torch alone."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules import module as modules

import tierstore
from tierstore.nn import TieredEmbeddingBagCollection
from tierstore.serve.base import LONG_IDS
from tierstore.serve.config import ServeConfig
from tierstore.serve.messages import InferTensor
from tierstore.serve.models import Models, load_program

from ..common import Part, Run, Table, Told
from .queries import DATATYPES, Query
from .zoo import MODELS, ZooModel

__all__ = ["OPERATORS", "PART", "operator_of", "operator_seconds"]

OPERATORS: Final = ("embedding", "dense", "interaction", "rest")
_OF_MODULES: Final = {"bottom": "dense", "top": "dense", "interaction": "interaction"}
_PUBLISHED: Final = {"rmc1": "embedding", "rmc2": "embedding", "rmc3": "dense"}
"""What dominates each, as DeepRecSys says."""
_TORCH: Final = ("torch's embedding_bag", "torch's layers")


class _Clock:
    """Seconds of each operator, by marks where one ends and the next begins."""

    def begin(self) -> None:
        self.seconds = dict.fromkeys(OPERATORS, 0.0)
        self._name, self._since = "rest", time.perf_counter()

    def mark(self, name: str, module: Any = None, *_: Any) -> None:
        """From now on it is this one; of a module's hook, if the module is that of the tables."""
        if module is None or isinstance(module, TieredEmbeddingBagCollection):
            now = time.perf_counter()
            self.seconds[self._name] += now - self._since
            self._name, self._since = name, now

    def put_into(self, program: Any) -> None:
        """Have a program's graph mark where it goes from one operator to another."""
        now = ""
        for node in list(program.graph.nodes):
            if node.op not in ("placeholder", "get_attr") and (name := operator_of(node)) != now:
                with program.graph.inserting_before(node):
                    program.graph.call_function(self.mark, (name,))
                now = name
        program.recompile()


def operator_of(node: Any) -> str:
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
def operator_seconds(model: ZooModel) -> dict[str, dict[str, float]]:
    """Of each size of a query the median seconds of each operator in the model of the server's engine, of "all" of
    them, and of torch alone. RuntimeError: the two do not agree on a probability."""
    config, found, clock = model.config, {}, _Clock()
    threads = ServeConfig(store=str(model.store)).num_threads
    torch.set_num_threads(threads)
    program = load_program(model.program, max_samples=max(config["batches"]))
    clock.put_into(program.module)
    with ExitStack() as stack:
        stack.enter_context(modules.register_module_forward_pre_hook(partial(clock.mark, "embedding")))
        stack.enter_context(modules.register_module_forward_hook(partial(clock.mark, "rest")))
        store = stack.enter_context(tierstore.open(model.store, mode="r", ddr=model.whole_ddr, threads=threads))
        tables = [store[name].read(torch.arange(rows)) for name, rows in model.tables.items()]
        served, layers = Models(store, program=program).by_name[model.name], model.part()
        for size in config["batches"]:
            count = 2 + min(200, max(5, config["queries_ids"] // (size * model.sample_ids)))
            queries = model.queries([size] * count, seed=size)
            timed = [_timed(clock, served, tables, layers, query) for query in queries][2:]
            own = found[str(size)] = {name: float(np.median([each[name] for each in timed])) for name in timed[0]}
            own["all"] = sum(own[name] for name in OPERATORS)
    return found


def _timed(
    clock: _Clock, served: Any, tables: list[Tensor], layers: Callable[..., Tensor], query: Query
) -> dict[str, float]:
    inputs = {name: InferTensor(DATATYPES[each.dtype.name], each) for name, each in query.inputs.items()}
    clock.begin()
    parsed = served.parse(inputs)
    (answer,) = served.run([parsed], (lambda: None) if parsed.num_ids > LONG_IDS else None)
    clock.mark("rest")
    times = [time.perf_counter()]
    rows = _looked_up(query, tables)
    times.append(time.perf_counter())
    logits = layers(torch.from_numpy(query.inputs["dense"]), rows)
    times.append(time.perf_counter())
    off = np.abs(answer["probabilities"].data - torch.sigmoid(logits).numpy()).max()
    if not off < 1e-3:  # sums are in another order
        raise RuntimeError(f"{len(logits)} probabilities differ from torch's by {off:.3g}")
    return clock.seconds | dict(zip(_TORCH, np.diff(times).tolist(), strict=True))


def _measure(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name in MODELS:
        print(f"  {name}", flush=True)
        model = ZooModel(request, name)
        own = {"sample_bytes": model.sample_ids * model.row_bytes, "table_bytes": model.table_bytes}
        found[name] = {"sizes": operator_seconds(model), **own}
    return {"models": found}


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    rows = [
        [
            size, f"{1e3 * own['all']:.3g}",
            *(f"{1e3 * own[each]:.3g} ({own[each] / own['all']:.0%})" for each in OPERATORS),
            *(f"{1e3 * own[each]:.3g}" for each in _TORCH),
            f"{int(size) * figures['sample_bytes'] / own['embedding'] / 1e9:.1f}",
        ]
        for size, own in figures["sizes"].items()
    ]  # fmt: skip
    columns = ["candidates", "all", *OPERATORS, *_TORCH, "rows, GB/s"]
    return Table(title=f"{name}: ms by operator (share)", columns=columns, rows=rows)


def _compared(name: str, sizes: Mapping[str, Mapping[str, float]]) -> str:
    """With the papers, and the smallest size with the largest."""
    (least, first), (most, last) = list(sizes.items())[0 :: len(sizes) - 1]
    taken = last["all"] / int(most) / (first["all"] / int(least))
    shares = " to ".join(f"{own['embedding'] / own['all']:.0%}" for own in (first, last))
    same = [size for size, own in sizes.items() if own[_PUBLISHED[name]] == max(own[each] for each in OPERATORS)]
    here = f"here with {', '.join(same) or 'none'} of {', '.join(sizes)} candidates"
    shift = f"the embedding's share goes from {shares}, a candidate's time to {taken:.0%}"
    return f"{name} by {_PUBLISHED[name]}, {here}; from the fewest to the most {shift}"


def _tell(figures: dict[str, Any]) -> Told:
    models = figures["models"]
    compared = ". ".join(_compared(name, models[name]["sizes"]) for name in _PUBLISHED)
    cut = ", ".join(f"{name} {own['table_bytes'] / 2**20:,.0f} MiB" for name, own in models.items())
    return Told(
        tables=[_table(name, own) for name, own in models.items()],
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

"""What does ``torch.compile`` do to a DLRM with tables: seconds, graph breaks, bits?

The same steps without it and with each of its backends, each time from the same weights and rows. The tables are one
module, around which the graph breaks once.
"""

import statistics
import sys
import time
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tierstore
from tierstore.models.dlrm import DLRM

from .common import Goal, Report, Run, Table, program
from .workload import Batches, distance, make_store

__all__ = ["run"]

_BACKENDS: Final = ("none", "eager", "aot_eager", "inductor")


class _Trained(NamedTuple):
    """Seconds of each step, graphs that were compiled, and the rows in the end."""

    seconds: list[float]
    graphs: int
    rows: list[Tensor]


def _train(config: dict[str, Any], batches: Batches, backend: str) -> _Trained:
    torch._dynamo.reset()
    torch.manual_seed(config["seed"])
    counter = CompileCounterWithBackend("eager" if backend == "none" else backend)
    rule = tierstore.optim.RowWiseAdagrad(lr=config["lr"])
    names = [f"f{table}" for table in range(config["tables"])]
    shape = {key: config[key] for key in ("tables", "rows", "dim", "ddr")}
    with make_store(None, cold="memory", optimizer=rule, **shape) as store:
        collection = tierstore.TieredEmbeddingBagCollection(store)
        model = DLRM(collection, num_features=len(names), embedding_dim=config["dim"])

        def logits(counts: Tensor, ids: tierstore.KeyedJaggedTensor) -> Any:
            return model(torch.log1p(counts), ids)

        called: Any = logits if backend == "none" else torch.compile(logits, backend=counter)
        dense_optimizer = torch.optim.SGD(model.dense_parameters().values(), lr=config["lr"])
        counts, labels = torch.rand(config["batch"], 13), torch.rand(config["batch"]).round()
        seconds = []
        for step in range(config["steps"]):
            ids = tierstore.KeyedJaggedTensor(names, batches.values[step % batches.count], offsets=batches.offsets)
            start = time.perf_counter()
            loss = nn.functional.binary_cross_entropy_with_logits(called(counts, ids), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            dense_optimizer.step()
            dense_optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
        rows = [table.read(torch.arange(config["rows"])) for table in store.tables.values()]
    return _Trained(seconds, counter.frame_count, rows)


def run(request: Run) -> Report:
    config = request.config
    keys = ("tables", "rows", "batch", "pooling_factor", "exponent", "seed")
    batches = Batches(**{key: config[key] for key in keys}, count=4)
    _train(config | {"steps": 2}, batches, "none")  # our own kernels are compiled, and threads started
    found = {backend: _train(config, batches, backend) for backend in _BACKENDS}
    plain = found["none"].rows
    lines, figures = [], {}
    for backend, trained in found.items():
        far = distance(trained.rows, plain)
        first, step = trained.seconds[0], statistics.median(trained.seconds[1:])
        breaks = max(trained.graphs - 1, 0)
        figures[backend] = {"first": first, "step": step, "breaks": breaks, "distance": far}
        total = sum(trained.seconds)
        lines.append([backend, f"{total:.2f}", f"{first:.2f}", f"{step * 1e3:.1f}", str(breaks), f"{far:.2g}"])
    titles = ["backend", f"{config['steps']} steps, s", "first, s", "a later one, ms", "graph breaks", "rows differ by"]
    return Report(
        question="What does torch.compile do to a DLRM with tables: seconds, graph breaks, bits?",
        tables=[Table(title="training, of which torch.compile has the forward", columns=titles, rows=lines)],
        figures=figures,
        goals=[
            Goal(name=f"{backend}: graph breaks for a module with tables", value=figures[backend]["breaks"], exactly=1)
            for backend in _BACKENDS[1:]
        ],
        notes=[
            f"{config['tables']} tables of {config['rows']:,} x {config['dim']} float32 in memory, row-wise Adagrad; "
            f"batches of {config['batch']:,}, {config['pooling_factor']} ids a bag, Zipf {config['exponent']}. Rows "
            "differ, if they do, because the compiler orders the sums of the dense layers otherwise: tests train rows "
            "whose gradients no compiler changes, and compare bits."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("compile", run))

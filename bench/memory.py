"""How much does a process grow beyond the memory budget while it trains and looks rows up?

Each piece of work runs in a process of its own, which first does the same on a small store, so that modules are
imported, kernels loaded and threads started. From there on its anonymous memory is watched: pages of the store's file
that are mapped are the system's page cache, which it takes back when it needs them.
"""

import ctypes
import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import torch

import tierstore
from tierstore.system.sizes import parse_size

from .child import in_child
from .common import Goal, Report, Run, Table, fresh_folder, start
from .workload import Batches, make_store

_MIB: Final = 2**20
_PERIOD_SECONDS: Final = 0.002
_SLACK_SHARE: Final = 0.05
_SLACK_BYTES: Final = 64 * _MIB


class Growth(NamedTuple):
    """Bytes by which a process grew at most: its own memory, and page cache that it mapped."""

    anonymous: int
    file: int


def _resident() -> Growth:
    found = psutil.Process().memory_info()
    return Growth(found.rss - found.shared, found.shared)


@contextmanager
def _watched() -> Iterator[list[Growth]]:
    """Watch this process's memory during the block, by looking every 2 ms; found in the list at its end. Memory that
    was freed before but is kept by the allocator is given back first: else it would serve for nothing."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = most = _resident()
    ended, found = threading.Event(), list[Growth]()

    def look() -> None:
        nonlocal most
        while not ended.wait(_PERIOD_SECONDS):
            most = Growth(*map(max, most, _resident()))

    watcher = threading.Thread(target=look, name="memory-watcher")
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
    most = Growth(*map(max, most, _resident()))
    found.append(Growth(most.anonymous - before.anonymous, most.file - before.file))


class Found(NamedTuple):
    """What one piece of work came to; ``map_bytes``: of the map from rows to places, outside the budget."""

    growth: Growth
    held_bytes: int
    map_bytes: int


Work = Callable[[tierstore.Store, Batches, int], None]


def _make(folder: Path, config: dict[str, Any], rows: int, ddr: str, value: float | None = None) -> tierstore.Store:
    shape = {"tables": config["tables"], "rows": rows, "dim": config["dim"], "ddr": ddr, "value": value}
    return make_store(folder, optimizer=tierstore.optim.RowWiseAdagrad(lr=0.05), **shape)


def _train(store: tierstore.Store, batches: Batches, steps: int) -> None:
    """Steps over prefetched batches, a commit in the background halfway and one waited for."""
    module = tierstore.TieredEmbeddingBagCollection(store)
    features = (batches.jagged(step % batches.count) for step in range(steps))
    for step, feature in enumerate(tierstore.prefetch(features, module, depth=2, features=lambda batch: batch)):
        out = module(feature).values()
        out.backward(torch.ones_like(out))
        if step == steps // 2:
            store.commit_async()
    store.commit()


def _look_up(store: tierstore.Store, batches: Batches, steps: int) -> None:
    for step in range(steps):
        for number, table in enumerate(store.tables.values()):
            ids, starts = batches.of_table(step % batches.count, number)
            table.pooled(ids, torch.cat([starts, torch.tensor([len(ids)])]))


def _read(store: tierstore.Store, batches: Batches, steps: int) -> None:
    for step in range(steps):
        for number, table in enumerate(store.tables.values()):
            table.read(batches.of_table(step % batches.count, number)[0])


def fill(folder: Path, config: dict[str, Any], rows: int) -> None:
    """A committed store all of whose rows were written."""
    _make(folder, config, rows, "64MiB", 1.0).close()


def work_in(folder: Path, config: dict[str, Any], ddr: str, work: Work) -> Found:
    """Growth while a store is made and trained, or a filled one opened for reading and its rows looked up."""
    is_training, few = work is _train, config["warm_up_rows"]

    def opened(path: Path, rows: int, budget: str) -> tierstore.Store:
        return _make(path, config, rows, budget) if is_training else tierstore.open(path, mode="r", ddr=budget)

    def batches(rows: int, exponent: float) -> Batches:
        given = {name: config[name] for name in ("tables", "batch", "pooling_factor", "seed")}
        return Batches(rows=rows, count=config["batches"], exponent=exponent, **given)

    with fresh_folder(folder.with_name(f"{folder.name}-small")) as small:
        if not is_training:
            fill(small, config, few)
        with opened(small, few, config["warm_up_ddr"]) as store:
            work(store, batches(few, config["exponent"]), 4)
    own = batches(config["rows"], 0.0 if work is _read else config["exponent"])
    with _watched() as growth, opened(folder, config["rows"], ddr) as store:
        work(store, own, config["steps"])
        stats = store.stats()
    return Found(growth[0], stats.ddr.bytes, stats.ssd.bytes)


def _measure(request: Run) -> dict[str, tuple[str, list[Found]]]:
    """Of each piece of work its budget, and what it came to in each of several processes."""
    config = request.config
    large = config | {"tables": 1, "rows": config["large_rows"]}
    works: dict[str, tuple[str, Work, dict[str, Any]]] = {
        "training, everything in DDR": (config["ddr_whole"], _train, config),
        "training, 5 % in DDR": (config["ddr_part"], _train, config),
        "pooled lookups, read-only": (config["ddr_part"], _look_up, config),
        "cold reads, read-only": (config["ddr_cold"], _read, config),
        f"cold reads of {large['rows']:,} rows, read-only": (config["ddr_cold"], _read, large),
    }
    found = {name: (ddr, list[Found]()) for name, (ddr, _, _) in works.items()}
    filled = None
    with fresh_folder(request.folder / "memory") as folder:
        for name, (ddr, work, own) in works.items():
            for _ in range(config["repetitions"]):
                if filled is not own:
                    shutil.rmtree(folder, ignore_errors=True)
                if work is not _train and filled is not own:
                    in_child(fill, folder, own, own["rows"])
                    filled = own
                found[name][1].append(in_child(work_in, folder, own, ddr, work))
    return found


def run(request: Run) -> Report:
    config, rows, goals, figures = request.config, list[list[str]](), list[Goal](), dict[str, Any]()
    for name, (ddr, runs) in _measure(request).items():
        each = sorted(runs, key=lambda found: found.growth.anonymous)[len(runs) // 2]
        budget = parse_size(ddr, name="ddr")
        over = each.growth.anonymous - budget
        sizes = (budget, each.held_bytes, each.growth.anonymous, over, each.map_bytes, each.growth.file)
        rows.append([name, *(f"{size / _MIB:,.1f}" for size in sizes)])
        map_bytes = each.map_bytes if each.map_bytes > _SLACK_BYTES else 0
        allowed = round((_SLACK_SHARE * budget + _SLACK_BYTES + map_bytes) / _MIB, 1)
        goals.append(Goal(f"{name}: MiB over the budget", round(over / _MIB, 1), at_most=allowed))
        figures[name] = {"runs": [run._asdict() for run in runs], "budget_bytes": budget}
    columns = ["work", "budget", "held, by stats()", "grew at most", "over", "map", "page cache mapped"]
    note = (
        f"{config['tables']} tables of {config['rows']:,} rows of {config['dim']} float32 with row-wise Adagrad, "
        f"batches of {config['batch']:,} samples with {config['pooling_factor']} ids a table, {config['steps']} "
        "steps prefetched two deep, a commit in the background and one waited for. Growth is of anonymous memory, "
        "so it has what a batch takes, results and gradients too, which are outside the budget; so is the map from "
        "rows to places, which is allowed beside the budget where it is larger than what is allowed for the rest. "
        f"Looked at every 2 ms; of {config['repetitions']} processes the median, as the allocator keeps more in some."
    )
    title = "MiB, of a process that had everything imported, compiled and warmed up"
    return Report([Table(title, columns, rows)], goals, [note], figures)


if __name__ == "__main__":
    start("memory")

"""What do dynamic ids cost, compared with rows that are numbered?"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.ids.id_map import IdMap, map_bytes

from .common import Goal, Part, Report, Run, Spread, Table, Told, measure, per_second, program, run_parts

__all__ = ["run"]

Int64s = NDArray[np.int64]
OURS: Final = "tierstore"
SORTED: Final = "torch.searchsorted"
DICT: Final = "dict"
DYNAMIC: Final = "dynamic ids"
FIXED: Final = "hashed into as many rows"
_PLACES: Final = {"all rows in memory": "100%", "over tiers, DDR for a fifth": "20%"}


def _random_ids(count: int, seed: int) -> Int64s:
    """Distinct, all over int64, in no order."""
    generator = np.random.default_rng(seed)
    ids = np.unique(generator.integers(-(2**63), 2**63 - 1, count + count // 100 + 100))
    return generator.permutation(ids)[:count]


# The map alone


def _measure_map(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    return {"sizes": [_map(request.config, count) for count in request.config["map_ids"]]}


def _map(config: dict[str, Any], count: int) -> dict[str, Any]:
    ids = _random_ids(count, config["seed"])
    made = IdMap(count)
    started = time.perf_counter()
    for part in np.array_split(ids, max(1, count // config["map_batch"])):
        made.put(made.free_rows(len(part)), part, np.ones(len(part), np.uint32))
    inserted = count / (time.perf_counter() - started)
    order = np.argsort(ids)
    in_order = torch.from_numpy(ids[order])
    batch = config["map_batch"]
    generator = np.random.default_rng(config["seed"] + 1)
    wanted = [ids[generator.integers(0, count, batch)] for _ in range(config["map_batches"])]
    turn = {"index": 0}

    def each(look_up: Callable[[Int64s], object]) -> Callable[[], object]:
        def call() -> None:
            look_up(wanted[turn["index"] % len(wanted)])
            turn["index"] += 1

        return call

    actions: dict[str, Callable[[], object]] = {
        OURS: each(made.find),
        SORTED: each(lambda some: torch.searchsorted(in_order, torch.from_numpy(some))),
    }
    if count <= 10**7:  # a dict of more ids takes more memory than the machine has
        known = dict(zip(ids.tolist(), range(count), strict=True))
        actions[DICT] = each(lambda some: [known[one] for one in some.tolist()])
    measure(actions, repetitions=2)
    seconds = measure(actions, repetitions=len(wanted))
    return {
        "ids": count,
        "bytes_an_id": map_bytes(count) / count,
        "inserted_per_s": inserted,
        "lookups_per_s": {name: asdict(per_second(batch, values)) for name, values in seconds.items()},
    }


def _tell_map(found: dict[str, Any]) -> Told:
    names = [OURS, SORTED, DICT]
    rows, goals = [], []
    for size in found["sizes"]:
        rates = {name: Spread(**rate).median for name, rate in size["lookups_per_s"].items()}
        cells = [f"{rates[name] / 1e6:.2f} M" if name in rates else "" for name in names]
        rows.append([f"{size['ids']:,}", *cells, f"{size['inserted_per_s'] / 1e6:.1f} M", f"{size['bytes_an_id']:.1f}"])
        goals.append(Goal(name=f"bytes an id, of {size['ids']:,}", value=round(size["bytes_an_id"], 1), at_most=20))
    columns = ["ids", *(f"{name}, lookups/s" for name in names), "insertions/s", "bytes an id"]
    table = Table(title="the map from id to row, in batches", columns=columns, rows=rows)
    return Told(tables=[table], goals=goals, notes=["The map is asked by one thread."])


# A stream of ids that drifts


def _stream(config: dict[str, Any]) -> Iterator[Int64s]:
    """Batches of ids whose ranks follow Zipf's law; in each step some ranks get other ids, for good."""
    generator = np.random.default_rng(config["seed"])
    power = 1 - config["zipf_exponent"]
    tail = config["zipf_ids"] ** power
    batch, period = config["stream_batch"], config["drift_steps"]
    for step in range(config["stream_ids"] // batch):
        ranks = ((1 - generator.random(batch) * (1 - tail)) ** (1 / power)).astype(np.int64)
        mixed = (ranks * np.int64(0x9E3779B97F4A7C15 - 2**64)) & np.int64(2**62 - 1)
        yield mixed ^ ((step + mixed % period) // period << 40)


def _measure_stream(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    places = {}
    for place, share in _PLACES.items():
        places[place] = {kind: _trained(request, share, is_dynamic=kind == DYNAMIC) for kind in (FIXED, DYNAMIC)}
    return {"places": places}


def _trained(request: Run, share: str, *, is_dynamic: bool) -> dict[str, Any]:
    config, path = request.config, request.folder / "ids_store"
    shutil.rmtree(path, ignore_errors=True)
    rows, batch = config["stream_rows"], config["stream_batch"]
    row_bytes = 4 * config["stream_dim"] + 8
    ddr = rows * (row_bytes + 40) + 2**27 if share == "100%" else rows * row_bytes // 5 + 2**25
    rule = tierstore.optim.RowWiseAdagrad(lr=0.1)
    ids_rule = tierstore.DynamicIds() if is_dynamic else None
    rates, memory, files, evicted = [], [], [], 0
    with tierstore.open(path, ddr=ddr) as store:
        table = store.create_table(
            tierstore.TableConfig(
                name="item", num_embeddings=rows, embedding_dim=config["stream_dim"], optimizer=rule, ids=ids_rule
            )
        )
        module = tierstore.TieredEmbeddingBag(table)
        offsets = torch.arange(0, batch, 8)
        gradient = torch.full((len(offsets), config["stream_dim"]), 1e-3)
        every = max(1, config["stream_ids"] // batch // 20)
        started = time.perf_counter()
        for step, ids in enumerate(_stream(config)):
            given = torch.from_numpy(ids if is_dynamic else ids % rows)
            module(given, offsets).backward(gradient)
            if step % every == every - 1:
                rates.append(every * batch / (time.perf_counter() - started))
                store.commit()
                memory.append(psutil.Process().memory_info().rss)
                files.append(sum(each.stat().st_blocks * 512 for each in path.iterdir()))
                started = time.perf_counter()
        if is_dynamic:
            evicted = table.id_stats().evicted
    shutil.rmtree(path)
    return {
        "ids_per_s": asdict(Spread.of(rates[len(rates) // 2 :])), "rss_bytes": memory, "file_bytes": files,
        "evicted": evicted,
    }  # fmt: skip


def _tell_stream(found: dict[str, Any]) -> Told:
    rows, goals = [], []
    for (place, kinds), wanted in zip(found["places"].items(), (0.75, 0.9), strict=True):
        fixed, dynamic = (kinds[kind]["ids_per_s"]["median"] for kind in (FIXED, DYNAMIC))
        goals.append(Goal(name=f"dynamic over fixed, {place}", value=round(dynamic / fixed, 3), at_least=wanted))
        own = kinds[DYNAMIC]
        memory = own["rss_bytes"]
        goals.append(
            Goal(
                name=f"memory at the end over that at half, {place}",
                value=round(memory[-1] / memory[len(memory) // 2], 3), at_most=1.05,
            )
        )  # fmt: skip
        rows.append(
            [
                place, f"{fixed / 1e6:.2f} M", f"{dynamic / 1e6:.2f} M", f"{dynamic / fixed:.2f}",
                f"{own['evicted']:,}", f"{own['file_bytes'][-1] / kinds[FIXED]['file_bytes'][-1]:.2f}",
            ]
        )  # fmt: skip
    columns = ["", "fixed, ids/s", "dynamic, ids/s", "ratio", "evicted", "file over fixed's"]
    return Told(tables=[Table(title="training on a drifting stream", columns=columns, rows=rows)], goals=goals)


# A commit


def _measure_commit(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, list[float]] = {DYNAMIC: [], FIXED: []}
    config, path = request.config, request.folder / "ids_commit"
    rows, new = config["commit_rows"], config["commit_new"]
    fill = rows - new * (config["repetitions"] + 1)
    for kind in found:
        shutil.rmtree(path, ignore_errors=True)
        rule = tierstore.DynamicIds() if kind == DYNAMIC else None
        with tierstore.open(path, ddr="3GiB") as store:
            table = store.create_table(
                tierstore.TableConfig(name="item", num_embeddings=rows, embedding_dim=16, ids=rule)
            )
            module = tierstore.TieredEmbeddingBag(table)
            for first in [*range(0, fill, new), *range(fill, fill + new * config["repetitions"], new)]:
                ids = torch.arange(first, first + new)
                module(ids, torch.arange(0, new, 8)).sum().backward()
                if first + new >= fill:
                    started = time.perf_counter()
                    store.commit()
                    found[kind].append(time.perf_counter() - started)
        shutil.rmtree(path)
    return {kind: values[1:] for kind, values in found.items()}


def _tell_commit(found: dict[str, Any]) -> Told:
    fixed, dynamic = (float(np.median(found[kind])) for kind in (FIXED, DYNAMIC))
    rows = [[FIXED, f"{1e3 * fixed:.0f}"], [DYNAMIC, f"{1e3 * dynamic:.0f}"]]
    goal = Goal(name="commit with new ids over a plain table's", value=round(dynamic / fixed, 3), at_most=1.3)
    return Told(tables=[Table(title="a commit with new rows", columns=["", "ms"], rows=rows)], goals=[goal])


PARTS: Final = {
    "map": Part(_measure_map, _tell_map),
    "stream": Part(_measure_stream, _tell_stream),
    "commit": Part(_measure_commit, _tell_commit),
}


def run(request: Run) -> Report:
    return run_parts(request, "What do dynamic ids cost, compared with rows that are numbered?", PARTS)


if __name__ == "__main__":
    sys.exit(program("ids", run, parts=tuple(PARTS)))

"""What do dynamic ids cost, compared with rows that are numbered?"""

import contextlib
import gzip
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.ids.id_map import IdMap, map_bytes

from .child import Child
from .common import Goal, Part, Report, Run, Table, fresh_folder, measure, per_second, spread, start
from .data import require_criteo
from .peers import torchrec
from .runs import run_config, trained

Int64s = NDArray[np.int64]
Figures = dict[str, Any]
OURS: Final = "tierstore"
SORTED: Final = "torch.searchsorted"
DICT: Final = "dict"
MCH: Final = "TorchRec's MCH"
ENUMERATED: Final = "numbered by first appearance"
DYNAMIC: Final = "dynamic ids"
FIXED: Final = "hashed into as many rows"
_PLACES: Final = {"all rows in memory": "100%", "over tiers, DDR for a fifth": "20%"}


def _table(store: tierstore.Store, rows: int, dim: int, ids: Any, **more: Any) -> tierstore.Table:
    config = tierstore.TableConfig(name="item", num_embeddings=rows, embedding_dim=dim, ids=ids, **more)
    return store.create_table(config)


def _file_bytes(folder: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in folder.iterdir())


# The map alone


def _random_ids(count: int, seed: int) -> Int64s:
    """Distinct, all over int64, in no order."""
    generator = np.random.default_rng(seed)
    ids = np.unique(generator.integers(-(2**63), 2**63 - 1, count + count // 100 + 100))
    return generator.permutation(ids)[:count]


def _measure_map(request: Run, _: Figures) -> Figures:
    return {"sizes": [_map(request, count) for count in request.config["map_ids"]]}


def _map(request: Run, count: int) -> Figures:
    config, batch = request.config, request.config["map_batch"]
    ids, made = _random_ids(count, config["seed"]), IdMap(count)
    begun = time.perf_counter()
    for part in np.array_split(ids, max(1, count // batch)):
        made.put(made.free_rows(len(part)), part, np.ones(len(part), np.uint32))
    inserted = count / (time.perf_counter() - begun)
    in_order = torch.from_numpy(np.sort(ids))
    generator = np.random.default_rng(config["seed"] + 1)
    wanted = [ids[generator.integers(0, count, batch)] for _ in range(config["map_batches"])]
    turns = cycle(range(len(wanted)))

    def each(look_up: Callable[[Int64s], object]) -> Callable[[], object]:
        return lambda: look_up(wanted[next(turns)])

    actions: dict[str, Callable[[], object]] = {
        OURS: each(made.find),
        SORTED: each(lambda some: torch.searchsorted(in_order, torch.from_numpy(some))),
    }
    with contextlib.ExitStack() as stack:
        if count <= 10**7:  # of more ids these take more memory than the machine has
            known = dict(zip(ids.tolist(), range(count), strict=True))
            actions[DICT] = each(lambda some: [known[one] for one in some.tolist()])
            if torchrec.is_there():
                np.save(request.folder / "ids.npy", ids)
                np.save(request.folder / "wanted.npy", wanted)
                child = stack.enter_context(Child([sys.executable, "-m", "bench.peers.mch", request.folder]))
                assert int(child.ask("0")) == batch, "ids without slots"
                actions[MCH] = lambda: child.ask(str(next(turns)))
        seconds = measure(actions, repetitions=len(wanted), warm_up=2)
    return {
        "ids": count,
        "bytes_an_id": map_bytes(count) / count,
        "inserted_per_s": inserted,
        "lookups_per_s": {name: per_second(batch, values) for name, values in seconds.items()},
    }


def _tell_map(found: Figures) -> Report:
    names, rows, goals = [OURS, SORTED, DICT, MCH], [], []
    for size in found["sizes"]:
        rates = {name: rate["median"] for name, rate in size["lookups_per_s"].items()}
        cells = [f"{rates[name] / 1e6:.2f} M" if name in rates else "" for name in names]
        rows.append([f"{size['ids']:,}", *cells, f"{size['inserted_per_s'] / 1e6:.1f} M", f"{size['bytes_an_id']:.1f}"])
        goals.append(Goal(f"bytes an id, of {size['ids']:,}", round(size["bytes_an_id"], 1), at_most=20))
    columns = ["ids", *(f"{name}, lookups/s" for name in names), "insertions/s", "bytes an id"]
    note = "The map is asked by one thread."
    return Report([Table("the map from id to row, in batches", columns, rows)], goals, [note])


# A stream of ids that drifts


def _stream(config: Figures) -> Iterator[Int64s]:
    """Batches of ids whose ranks follow Zipf's law; in each step some ranks get other ids, for good."""
    generator = np.random.default_rng(config["seed"])
    power = 1 - config["zipf_exponent"]
    tail = config["zipf_ids"] ** power
    batch, period = config["stream_batch"], config["drift_steps"]
    for step in range(config["stream_ids"] // batch):
        ranks = ((1 - generator.random(batch) * (1 - tail)) ** (1 / power)).astype(np.int64)
        mixed = (ranks * np.int64(0x9E3779B97F4A7C15 - 2**64)) & np.int64(2**62 - 1)
        yield mixed ^ ((step + mixed % period) // period << 40)


def _measure_stream(request: Run, _: Figures) -> Figures:
    kinds = {FIXED: None, DYNAMIC: tierstore.DynamicIds()}
    places = {
        place: {kind: _stream_trained(request, share, ids) for kind, ids in kinds.items()}
        for place, share in _PLACES.items()
    }
    return {"places": places}


def _stream_trained(request: Run, share: str, ids_rule: tierstore.DynamicIds | None) -> Figures:
    config = request.config
    rows, batch, dim = config["stream_rows"], config["stream_batch"], config["stream_dim"]
    row_bytes = 4 * dim + 8
    ddr = rows * (row_bytes + 40) + 2**27 if share == "100%" else rows * row_bytes // 5 + 2**25
    ddr += map_bytes(rows) if ids_rule else 0  # as many rows in DDR as without ids
    rates, memory, files = list[float](), list[int](), list[int]()
    with fresh_folder(request.folder / "ids_store") as path, tierstore.open(path, ddr=ddr) as store:
        table = _table(store, rows, dim, ids_rule, optimizer=tierstore.optim.RowWiseAdagrad(lr=0.1))
        module, offsets = tierstore.TieredEmbeddingBag(table), torch.arange(0, batch, 8)
        gradient = torch.full((len(offsets), dim), 1e-3)
        every = max(1, config["stream_ids"] // batch // 20)
        begun = time.perf_counter()
        for step, ids in enumerate(_stream(config), 1):
            module(torch.from_numpy(ids if ids_rule else ids % rows), offsets).backward(gradient)
            if step % every == 0:
                rates.append(every * batch / (time.perf_counter() - begun))
                store.commit()
                memory.append(psutil.Process().memory_info().rss)
                files.append(_file_bytes(path))
                begun = time.perf_counter()
        evicted = table.id_stats().evicted if ids_rule else 0
    halves = {"ids_per_s": spread(rates[len(rates) // 2 :]), "rss_bytes": memory, "file_bytes": files}
    return halves | {"evicted": evicted, "ddr_bytes": ddr}


def _tell_stream(found: Figures) -> Report:
    rows, goals = [], []
    for (place, kinds), wanted in zip(found["places"].items(), (0.75, 0.9), strict=True):
        own, plain = kinds[DYNAMIC], kinds[FIXED]
        fixed, dynamic = (each["ids_per_s"]["median"] for each in (plain, own))
        grown = own["rss_bytes"][-1] / own["rss_bytes"][len(own["rss_bytes"]) // 2]
        goals.append(Goal(f"dynamic over fixed, {place}", round(dynamic / fixed, 3), at_least=wanted))
        goals.append(Goal(f"memory at the end over that at half, {place}", round(grown, 3), at_most=1.05))
        speeds = [f"{fixed / 1e6:.2f} M", f"{dynamic / 1e6:.2f} M", f"{dynamic / fixed:.2f}"]
        sizes = [f"{each['ddr_bytes'] >> 20}" for each in (plain, own)]
        file = f"{own['file_bytes'][-1] / plain['file_bytes'][-1]:.2f}"
        rows.append([place, *speeds, *sizes, f"{own['evicted']:,}", file])
    columns = ["", "fixed, ids/s", "dynamic, ids/s", "ratio", "DDR, MiB", "with ids", "evicted", "file over fixed's"]
    return Report([Table("training on a drifting stream", columns, rows)], goals)


# A commit


def _measure_commit(request: Run, _: Figures) -> Figures:
    """Commits of both kinds take turns."""
    found: dict[str, list[float]] = {DYNAMIC: [], FIXED: []}
    config = request.config
    rows, new, repetitions = config["commit_rows"], config["commit_new"], config["repetitions"]
    with contextlib.ExitStack() as stack:
        stores, modules = dict[str, tierstore.Store](), dict[str, tierstore.TieredEmbeddingBag]()
        for kind, rule in ((DYNAMIC, tierstore.DynamicIds()), (FIXED, None)):
            folder = stack.enter_context(fresh_folder(request.folder / f"ids_commit_{rule is None}"))
            stores[kind] = stack.enter_context(tierstore.open(folder, ddr="3GiB"))
            modules[kind] = tierstore.TieredEmbeddingBag(_table(stores[kind], rows, 16, rule))
        for first in range(0, rows - new + 1, new):
            for kind, module in modules.items():
                module(torch.arange(first, first + new), torch.arange(0, new, 8)).sum().backward()
                if first >= rows - new * (repetitions + 1):
                    begun = time.perf_counter()
                    stores[kind].commit()
                    found[kind].append(time.perf_counter() - begun)
    return {kind: values[1:] for kind, values in found.items()}


def _tell_commit(found: Figures) -> Report:
    fixed, dynamic = (float(np.median(found[kind])) for kind in (FIXED, DYNAMIC))
    rows = [[FIXED, f"{1e3 * fixed:.0f}"], [DYNAMIC, f"{1e3 * dynamic:.0f}"]]
    goal = Goal("commit with new ids over a plain table's", round(dynamic / fixed, 3), at_most=1.3)
    return Report([Table("a commit with new rows", ["", "ms"], rows)], [goal])


# Real data


def _enumerated(source: Path, target: Path) -> list[int]:
    """Write Criteo's rows with the categories of each column numbered by first appearance; how many each has."""
    known: list[dict[str, int]] = [{} for _ in range(26)]
    with gzip.open(source, "rt") as lines, target.open("w") as out:
        for line in lines:
            fields = line.rstrip("\n").split("\t")
            for column, seen in zip(range(14, 40), known, strict=True):
                if fields[column]:
                    fields[column] = f"{seen.setdefault(fields[column], len(seen)):x}"
            out.write("\t".join(fields) + "\n")
    return [max(1, len(seen)) for seen in known]


def _measure_criteo(request: Run, _: Figures) -> Figures:
    config, numbered = request.config, request.folder / "numbered.tsv"
    sizes = _enumerated(require_criteo(), numbered)
    fixed = ['embedding.ids="fixed"', 'data.hashing="mod"', f"embedding.num_embeddings={sizes}"]
    runs = {each["name"]: (None, each["set"]) for each in config["criteo_runs"]} | {ENUMERATED: (numbered, fixed)}
    found = {}
    for name, (data, own) in runs.items():
        with fresh_folder(request.folder / "ids_criteo") as store:
            run = run_config("examples/criteo-dynamic.toml", store, *config["criteo_set"], *own, data=data)
            found[name] = {"auc": trained(run).auc} | _sizes(store)
    return found


def _sizes(store: Path) -> Figures:
    with tierstore.open(store, mode="r", ddr="64MiB") as opened:
        tables = list(opened.tables.values())
        rows = [sum(map(len, table.written())) for table in tables]
        row_bytes = sum(count * table.layout.row_bytes for count, table in zip(rows, tables, strict=True))
        id_bytes = sum(table.id_stats().bytes for table in tables if table.config.ids is not None)
    return {"rows": sum(rows), "row_bytes": row_bytes, "id_bytes": id_bytes, "file_bytes": _file_bytes(store)}


def _tell_criteo(found: Figures) -> Report:
    kinds = {name: own for name, own in found.items() if isinstance(own, dict)}
    sizes = ("row_bytes", "id_bytes", "file_bytes")
    rows = [
        [name, f"{own['auc']:.4f}", f"{own['rows']:,}", *(f"{own[key] / 2**20:.1f}" for key in sizes)]
        for name, own in kinds.items()
    ]
    columns = ["", "test AUC", "rows in use", "rows, MiB", "ids, MiB", "file, MiB"]
    goals = [
        Goal(f"AUC with dynamic ids, {name}'s wanted", kinds[DYNAMIC]["auc"], at_least=own["auc"])
        for name, own in kinds.items()
        if name.startswith("hashed")
    ]
    return Report([Table("Criteo, by kinds of ids", columns, rows)], goals)


PARTS: Final = {
    "map": Part(_measure_map, _tell_map),
    "stream": Part(_measure_stream, _tell_stream),
    "commit": Part(_measure_commit, _tell_commit),
    "criteo": Part(_measure_criteo, _tell_criteo),
}

if __name__ == "__main__":
    start("ids")

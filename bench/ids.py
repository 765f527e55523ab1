"""What do dynamic ids cost, compared with rows that are numbered?"""

import contextlib
import gzip
import importlib.util
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.ids.id_map import IdMap, map_bytes
from tierstore.train import train
from tierstore.train.config import load, parse_override

from . import candidates
from .child import Child
from .common import Goal, Part, Report, Run, Spread, Table, Told, measure, per_second, program, run_parts
from .data import ROOT, require_criteo
from .peers import torchrec

__all__ = ["run"]

Int64s = NDArray[np.int64]
OURS: Final = "tierstore"
SORTED: Final = "torch.searchsorted"
DICT: Final = "dict"
PANDAS: Final = "pandas.Index"
MCH: Final = "TorchRec's MCH"
ENUMERATED: Final = "numbered by first appearance"
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
    missing = [] if torchrec.is_there() else [MCH]
    missing += [] if importlib.util.find_spec("pandas") else [PANDAS]
    return {"sizes": [_map(request, count, missing) for count in request.config["map_ids"]], "missing": missing}


def _map(request: Run, count: int, missing: list[str]) -> dict[str, Any]:
    config = request.config
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
    with contextlib.ExitStack() as stack:
        if count <= 10**7:  # of more ids these take more memory than the machine has
            known = dict(zip(ids.tolist(), range(count), strict=True))
            actions[DICT] = each(lambda some: [known[one] for one in some.tolist()])
            if PANDAS not in missing:
                actions[PANDAS] = each(importlib.import_module("pandas").Index(ids).get_indexer)
            if MCH not in missing:
                np.save(request.folder / "ids.npy", ids)
                np.save(request.folder / "wanted.npy", wanted)
                child = stack.enter_context(Child([sys.executable, "-m", "bench.peers.mch", request.folder]))
                assert int(child.ask("0")) == batch, "ids without slots"
                actions[MCH] = each(lambda _: child.ask(str(turn["index"] % len(wanted))))
        measure(actions, repetitions=2)
        seconds = measure(actions, repetitions=len(wanted))
    return {
        "ids": count,
        "bytes_an_id": map_bytes(count) / count,
        "inserted_per_s": inserted,
        "lookups_per_s": {name: asdict(per_second(batch, values)) for name, values in seconds.items()},
    }


def _tell_map(found: dict[str, Any]) -> Told:
    names = [OURS, SORTED, DICT, PANDAS, MCH]
    rows, goals = [], []
    for size in found["sizes"]:
        rates = {name: Spread(**rate).median for name, rate in size["lookups_per_s"].items()}
        cells = [f"{rates[name] / 1e6:.2f} M" if name in rates else "" for name in names]
        rows.append([f"{size['ids']:,}", *cells, f"{size['inserted_per_s'] / 1e6:.1f} M", f"{size['bytes_an_id']:.1f}"])
        goals.append(Goal(name=f"bytes an id, of {size['ids']:,}", value=round(size["bytes_an_id"], 1), at_most=20))
    columns = ["ids", *(f"{name}, lookups/s" for name in names), "insertions/s", "bytes an id"]
    table = Table(title="the map from id to row, in batches", columns=columns, rows=rows)
    absent = f" Not there, and so not measured: {', '.join(found['missing'])}." if found["missing"] else ""
    return Told(tables=[table], goals=goals, notes=[f"The map is asked by one thread.{absent}"])


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
    ddr += map_bytes(rows) if is_dynamic else 0  # as many rows in DDR as without ids
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
        "evicted": evicted, "ddr_bytes": ddr,
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
                *(f"{kinds[kind]['ddr_bytes'] >> 20}" for kind in (FIXED, DYNAMIC)),
                f"{own['evicted']:,}", f"{own['file_bytes'][-1] / kinds[FIXED]['file_bytes'][-1]:.2f}",
            ]
        )  # fmt: skip
    columns = ["", "fixed, ids/s", "dynamic, ids/s", "ratio", "DDR, MiB", "with ids", "evicted", "file over fixed's"]
    return Told(tables=[Table(title="training on a drifting stream", columns=columns, rows=rows)], goals=goals)


def _measure_candidates(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    count, batch = config["counted_ids"], config["counted_batch"]
    stream = _stream(config | {"stream_ids": count, "stream_batch": batch})
    return candidates.compare(stream, config["candidates"], most_ids=count, times=config["candidate_times"])


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


def _measure_criteo(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config, numbered, store = request.config, request.folder / "numbered.tsv", request.folder / "ids_criteo"
    sizes = _enumerated(require_criteo(), numbered)
    fixed = ['embedding.ids="fixed"', 'data.hashing="mod"', f"embedding.num_embeddings={sizes}"]
    runs = {each["name"]: (require_criteo(), each["set"]) for each in config["criteo_runs"]}
    return {
        name: _learned([*config["criteo_set"], f'data.path="{path}"', f'store.path="{store}"', *own], store)
        for name, (path, own) in {**runs, ENUMERATED: (numbered, fixed)}.items()
    }


def _learned(overrides: list[str], store: Path) -> dict[str, Any]:
    shutil.rmtree(store, ignore_errors=True)
    run = load(ROOT / "examples" / "criteo-dynamic.toml", map(parse_override, overrides))
    test = train(run).test
    assert test is not None
    with tierstore.open(store, mode="r", ddr="64MiB") as opened:
        tables = list(opened.tables.values())
        rows = [sum(map(len, table.written())) for table in tables]
        row_bytes = sum(count * table.layout.row_bytes for count, table in zip(rows, tables, strict=True))
        id_bytes = sum(table.id_stats().bytes for table in tables if table.config.ids is not None)
    files = sum(each.stat().st_blocks * 512 for each in store.iterdir())
    shutil.rmtree(store)
    return {"auc": test.auc, "rows": sum(rows), "row_bytes": row_bytes, "id_bytes": id_bytes, "file_bytes": files}


def _tell_criteo(found: dict[str, Any]) -> Told:
    kinds = {name: own for name, own in found.items() if isinstance(own, dict)}
    rows = [
        [
            name, f"{own['auc']:.4f}", f"{own['rows']:,}",
            *(f"{own[key] / 2**20:.1f}" for key in ("row_bytes", "id_bytes", "file_bytes")),
        ]
        for name, own in kinds.items()
    ]  # fmt: skip
    columns = ["", "test AUC", "rows in use", "rows, MiB", "ids, MiB", "file, MiB"]
    goals = [
        Goal(name=f"AUC with dynamic ids, {name}'s wanted", value=kinds[DYNAMIC]["auc"], at_least=own["auc"])
        for name, own in kinds.items()
        if name.startswith("hashed")
    ]
    return Told(tables=[Table(title="Criteo, by kinds of ids", columns=columns, rows=rows)], goals=goals)


# A reader that follows


def _measure_follower(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config, folder = request.config, request.folder / "ids_followed"
    shutil.rmtree(folder, ignore_errors=True)
    new, rounds = config["follow_new"], config["follow_rounds"]
    old = config["follow_rows"] // 2
    command = [sys.executable, "-m", "bench.ids_writer", folder, config["follow_rows"], new, config["stream_dim"]]
    with Child(command) as writer:
        writer.line()
        with tierstore.open(folder, mode="r", ddr="2GiB") as store, ThreadPoolExecutor(1) as threads:
            table, is_over = store["item"], threading.Event()
            table.read(torch.arange(old)[:new])
            store.rehearse_newer()
            lookups = threads.submit(_look_up, table, old, config["follow_batch"], is_over)
            try:
                spans: list[tuple[float, ...]] = []
                for number in range(rounds + 1):
                    start = time.monotonic()
                    time.sleep(config["follow_seconds"])
                    version = store.version
                    began, done = map(float, writer.ask("more").split())
                    while store.refresh() == version:
                        time.sleep(0.001)
                    seen = time.monotonic()
                    table.read(torch.arange(new) + old + number * new)  # an id without a row is an error
                    spans.append((start, start + config["follow_seconds"], began, done, seen))
            finally:
                is_over.set()
            times = lookups.result()
    shutil.rmtree(folder)
    quiet = [took for at, took in times for start, end, *_ in spans[1:] if start <= at < end]
    busy = [took for at, took in times for *_, began, _, seen in spans[1:] if began <= at + took and at < seen]
    return {
        "commits_s": [done - began for *_, began, done, _ in spans[1:]],
        "delays_s": [seen - done for *_, done, seen in spans[1:]],
        **{f"{name}_us_p99": 1e6 * float(np.percentile(own, 99)) for name, own in (("quiet", quiet), ("busy", busy))},
    }


def _look_up(table: tierstore.Table, rows: int, batch: int, is_over: threading.Event) -> list[tuple[float, float]]:
    """Look up random ids until it is over: when each lookup began, and how many seconds it took."""
    generator, times = torch.Generator().manual_seed(0), []
    while not is_over.is_set():
        ids = torch.randint(rows, (batch,), generator=generator)
        start = time.monotonic()
        table.read(ids)
        times.append((start, time.monotonic() - start))
    return times


def _tell_follower(found: dict[str, Any]) -> Told:
    slowest, ratio = max(found["delays_s"]), found["busy_us_p99"] / found["quiet_us_p99"]
    goals = [
        Goal(name="seconds from a commit to the reader that shows its ids", value=round(slowest, 3), at_most=0.5),
        Goal(name="p99 of lookups meanwhile over that without", value=round(ratio, 2), at_most=1.5),
    ]
    cells = [f"{found[key]:.0f}" for key in ("quiet_us_p99", "busy_us_p99")]
    rows = [[f"{1e3 * np.median(found['commits_s']):.0f}", f"{1e3 * np.median(found['delays_s']):.0f}", *cells]]
    columns = ["commit, ms", "until shown, ms", "p99 without, us", "p99 meanwhile, us"]
    return Told(tables=[Table(title="a reader that follows new ids", columns=columns, rows=rows)], goals=goals)


PARTS: Final = {
    "map": Part(_measure_map, _tell_map),
    "stream": Part(_measure_stream, _tell_stream),
    "candidates": Part(_measure_candidates, candidates.tell),
    "commit": Part(_measure_commit, _tell_commit),
    "criteo": Part(_measure_criteo, _tell_criteo),
    "follower": Part(_measure_follower, _tell_follower),
}


def run(request: Run) -> Report:
    return run_parts(request, "What do dynamic ids cost, compared with rows that are numbered?", PARTS)


if __name__ == "__main__":
    sys.exit(program("ids", run, parts=tuple(PARTS)))

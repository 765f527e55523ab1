"""How fast do changes of a store reach those who take them, and what do they cost the trainer?

Parts, each for itself with ``--only``: "dict" (rows a second into arrays in memory), "lag" (of a consumer in a process
of its own, behind several commits a second), "steps" (training steps while one follows), "redis" (rows a second into
Redis, beside its own benchmark), "index" (recall of an index that is kept fresh, and when it finds a new item).
"""

import contextlib
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

import tierstore
from tierstore.feed import Feed, open_sink
from tierstore.store.changes import ChangeFeed

from . import redis_server
from .child import Child
from .commit import Training
from .common import Goal, Part, Report, Run, Table, fresh_folder, per_second, start
from .data import ROOT
from .served import PART as SERVED

Figures = dict[str, Any]
_LOOK_SECONDS: Final = 0.05
_NICE: Final = 10


def told(title: str, columns: list[str], cells: list[list[str]], note: str, goals: list[Figures]) -> Figures:
    """What a part found, as its figures; ``tell`` makes its report of them."""
    return {"table": {"title": title, "columns": columns, "rows": cells}, "note": note, "goals": goals}


def tell(found: Figures) -> Report:
    return Report([Table(**found["table"])], [Goal(**each) for each in found["goals"]], [found["note"]])


def take(feed: ChangeFeed, values: Any) -> list[tuple[int, float, int]]:
    """All there is, into an array of rows by id; versions, when they were there, and how many rows they brought."""
    taken = []
    for change in feed:
        count = 0
        for _, ids, rows in change.rows():
            values[ids] = 0 if rows is None else rows.numpy()
            count += len(ids)
        change.ack()
        taken.append((change.version, time.time(), count))
    return taken


def _into_arrays(request: Run, _figures: Figures) -> Figures:
    config, own, seconds = request.config, np.random.default_rng(request.config["seed"]), defaultdict[str, Any](list)
    rows, dim, changed, times = config["rows"], config["dim"], config["changed"], config["repetitions"] + 1
    fresh, values = torch.randn(rows, dim), np.zeros((rows + changed * times, dim), np.float32)
    shape: Figures = {"num_embeddings": rows, "embedding_dim": dim}
    with fresh_folder(request.folder / "online") as path, tierstore.open(path, ddr=config["ddr"]) as store:

        def timed(name: str, since: int | None = None) -> None:
            with store.changes("arrays", since) as feed:
                begun = time.perf_counter()
                take(feed, values)
                seconds[name].append(time.perf_counter() - begun)

        item = store.create_table(tierstore.TableConfig(name="item", **shape))
        item.write(torch.arange(rows), fresh)
        for _ in range(times):
            item.write(torch.from_numpy(ids := own.permutation(rows)[:changed]), fresh[:changed])
            store.commit()
            timed("changed rows")
            begun, order = time.perf_counter(), np.sort(ids)
            values[order] = fresh[:changed].numpy()
            seconds["limit: as many rows copied in memory"].append(time.perf_counter() - begun)
            timed("a full copy", 0)
        store.drop_table("item")
        user = store.create_table(tierstore.TableConfig(name="user", ids=tierstore.DynamicIds(), **shape))
        for number in range(times):
            user.admit(torch.arange(changed * number, rows + changed * number))
            store.commit()
            timed("changed rows of dynamic ids, a tombstone for each")
    rates = {name: per_second(rows if "full" in name else changed, each[1:]) for name, each in seconds.items()}
    columns = ["median", "lowest", "highest"]
    cells = [[name, *(f"{each[key]:,.0f}" for key in columns)] for name, each in rates.items()]
    goals = [
        {"name": f"{name}: rows a second", "value": each["median"], "at_least": 1e6} for name, each in rates.items()
    ]
    note = f"Arrays: {rows:,} rows of {dim} float32, {changed:,} changed by each commit."
    found = told("rows a second into arrays", ["", *columns], cells, note, [goals[0], goals[2]])
    return found | {"rows_per_s": rates}


def follow(directory: str, rows: str, dim: str) -> None:
    """In a process of its own: for as many seconds as it is told, take what changes, once it has said that the store is
    open. In between it holds no version."""
    psutil.Process().nice(_NICE)
    values = np.zeros((int(rows), int(dim)), np.float32)
    for line in chain(["0"], sys.stdin):
        with tierstore.open(directory, mode="r", ddr="16MiB") as store, store.changes("follower") as feed:
            print(flush=True)
            end, taken = time.time() + float(line), take(feed, values)
            while time.time() < end:
                taken += take(feed, values)
                time.sleep(_LOOK_SECONDS)
        print(json.dumps(taken), flush=True)


def _follower(path: Path, config: Figures) -> Child:
    child = Child([sys.executable, "-m", "bench.online", "follow", path, config["rows"], config["dim"]])
    child.line(), child.line()
    return child


def _lag(request: Run, _figures: Figures) -> Figures:
    config, own, begun = request.config, np.random.default_rng(request.config["seed"]), dict[int, float]()
    rows, dim, every, seconds = config["rows"], config["dim"], config["commit_seconds"], config["seconds"]
    with fresh_folder(request.folder / "online") as path, tierstore.open(path, ddr=config["ddr"]) as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=rows, embedding_dim=dim))
        table.write(torch.arange(rows), fresh := torch.randn(rows, dim))
        store.commit()
        with _follower(path, config) as child, ThreadPoolExecutor(1) as thread:
            child.ask(str(seconds + 10 * every))
            taken, started = thread.submit(child.line), time.time()
            while time.time() < started + seconds:
                time.sleep(max(0.0, started + len(begun) * every - time.time()))
                begun[store.version + 1] = time.time()
                ids = torch.from_numpy(own.permutation(rows)[: int(config["rows_per_second"] * every)])
                table.write(ids, fresh[: len(ids)])
                store.commit()
            seen = json.loads(taken.result())
    lags = [next(at for known, at, _ in seen if known >= version) - at for version, at in begun.items()]
    shown = [round(1000 * float(each)) for each in np.percentile(lags, [50, 99, 100])]
    note = (
        f"Lag: {len(begun) * len(ids) / seconds:,.0f} changed rows a second, a commit every {every} s; from a commit's "
        "first row to when a process that looks every 50 ms has acknowledged it."
    )
    goals = [{"name": "lag of a consumer: p99, ms", "value": shown[1], "at_most": 1000}]
    return told("lag of a consumer, ms", ["p50", "p99", "highest"], [[f"{each:,}" for each in shown]], note, goals)


def _steps(request: Run, _figures: Figures) -> Figures:
    config, count = request.config, int(request.config["steps"])
    pairs, rates = list[tuple[float, float]](), list[float]()
    with fresh_folder(request.folder / "online") as path, tierstore.open(path, ddr=config["ddr"]) as store:
        training = Training(store, config)

        def block() -> float:
            begun = time.perf_counter()
            for step in range(count):
                training.step()
                if step % config["commit_steps"] == 0:
                    training.commit()
            return time.perf_counter() - begun

        block()
        training.commit().result()
        with _follower(path, config) as child, ThreadPoolExecutor(1) as thread:
            for _ in range(config["repetitions"] + 1):
                child.ask(str(1.25 * (alone := block())))
                taken = thread.submit(child.line)
                pairs.append((alone, beside := block()))
                rates.append(sum(rows for _, _, rows in json.loads(taken.result())) / beside)
        training.close()
        training.commit().result()
    cells = [f"{1000 * statistics.median(times) / count:.2f}" for times in zip(*pairs[1:], strict=True)]
    note = (
        f"Steps: {config['batch']:,} bags of {config['pooling_factor']} ids, a commit each {config['commit_steps']}, "
        f"{statistics.median(rates[1:]):,.0f} changed rows a second."
    )
    slower = statistics.median(beside / alone for alone, beside in pairs[1:])
    goals = [{"name": "time of steps with a follower over that without", "value": round(slower, 3), "at_most": 1.05}]
    return told("a training step, ms", ["alone", "with a follower"], [cells], note, goals) | {"pairs_s": pairs[1:]}


def _into_redis(request: Run, _figures: Figures) -> Figures:
    config, seconds, rates = request.config, defaultdict[str, Any](list), defaultdict[str, Any](list)
    rows, dim, changed = config["rows"], config["dim"], config["changed"]
    fresh = torch.randn(rows, dim)
    with contextlib.ExitStack() as held:
        store = held.enter_context(tierstore.open(held.enter_context(fresh_folder(request.folder / "online"))))
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=rows, embedding_dim=dim))
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="redis-"))
        feed = Feed(store, open_sink(held.enter_context(redis_server.running(Path(folder)))), consumer="redis")
        benchmark = ["redis-benchmark", "-s", f"{folder}/socket", "-t", "set", "--csv", "-r", rows, "-d", 4 * dim]
        for turn in range(config["repetitions"] + 2):  # the first is a full copy, the second warms up
            ids = torch.randperm(rows)[: changed if turn else rows]
            table.write(ids, fresh[: len(ids)])
            store.commit()
            begun = time.perf_counter()
            feed.step()
            seconds["changed rows" if turn else "a full copy"].append(time.perf_counter() - begun)
            for depth in (1, 64) if turn > 1 else ():
                words = map(str, [*benchmark, "-n", changed, "-P", depth])
                line = subprocess.run([*words], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
                rates[f"redis-benchmark: SETs, {depth} at a time"].append(float(line.split('","')[1].strip('"')))
    median = changed / statistics.median(seconds["changed rows"][1:])
    found = {"feed: changed rows": median, "feed: a full copy": rows / seconds["a full copy"][0]}
    found |= {name: statistics.median(each) for name, each in rates.items()}
    goals = [{"name": "changed rows a second into Redis", "value": median, "at_least": 200_000}]
    note = f"Redis: {rows:,} rows of {dim} float32, {changed:,} changed by each commit; values of as many bytes."
    cells = [[name, f"{rate:,.0f}"] for name, rate in found.items()]
    return told("rows a second into Redis", ["", "median"], cells, note, goals) | {"rows_per_s": found}


def _index(request: Run, _figures: Figures) -> Figures:
    config, seconds, normalized = request.config, list[float](), torch.nn.functional.normalize
    items, changed, dim = config["items"], config["changed_items"], config["dim"]
    with fresh_folder(request.folder / "online") as path, tierstore.open(path) as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=items, embedding_dim=dim))
        sink = runpy.run_path(str(ROOT / "examples" / "online" / "index.py"))["ItemIndex"](dim)
        centres = torch.randn(items // 100, dim)
        feed = Feed(store, sink, consumer="index")
        for turn in range(config["repetitions"] + 1):  # first all but some; then a part changes, and one is new
            old, new = torch.randperm(items - 100), torch.tensor([items - 1 - turn])
            ids = torch.cat([old[:changed] if turn else old, new])
            rows = normalized(centres[ids % len(centres)] + torch.randn(len(ids), dim))
            begun = time.perf_counter()
            table.write(ids, rows)
            store.commit()
            feed.step()
            assert sink.nearest(new.item(), 1) == new.tolist()
            seconds.append(time.perf_counter() - begun)
        here = torch.cat([*table.written()])
        queries, every = normalized(centres[:200] + torch.randn(len(centres[:200]), dim)), table.read(here)
        exact = here[(queries @ every.T).topk(100).indices].tolist()
        found = sink.index.search(queries.numpy(), 100).keys.tolist()
        hits = [len({*best} & {*each}) for best, each in zip(exact, found, strict=True)]
    recall, slowest = round(statistics.mean(hits) / 100, 4), max(seconds[1:])
    goals: list[Figures] = [
        {"name": "recall@100 of the index", "value": recall, "at_least": 0.95},
        {"name": "seconds to a new item", "value": slowest, "at_most": 5},
    ]
    note = f"Index: {items:,} items, {changed:,} changed by a commit; from its first row to the answer."
    columns = ["recall@100", "s to a new item"]
    return told("an index kept fresh", columns, [[f"{recall:.3f}", f"{slowest:.2f}"]], note, goals)


PARTS: Final = {
    "dict": Part(_into_arrays, tell), "lag": Part(_lag, tell), "steps": Part(_steps, tell),
    "redis": Part(_into_redis, tell), "index": Part(_index, tell), "served": SERVED,
}  # fmt: skip

if __name__ == "__main__":
    follow(*sys.argv[2:]) if sys.argv[1:2] == ["follow"] else start("online")

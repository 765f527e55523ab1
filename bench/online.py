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
from .common import Goal, Part, Report, Run, Table, fresh_folder, per_second, spread, start
from .data import ROOT

Figures = dict[str, Any]
_LOOK_SECONDS: Final = 0.05
_NICE: Final = 10


def _take(feed: ChangeFeed, values: Any) -> list[tuple[int, float]]:
    """All there is, into an array of rows by id; versions, and when they were there."""
    taken = []
    for change in feed:
        for _, ids, rows in change.rows():
            values[ids] = 0 if rows is None else rows.numpy()
        change.ack()
        taken.append((change.version, time.time()))
    return taken


def _measure_dict(request: Run, _: Figures) -> Figures:
    config, own, seconds = request.config, np.random.default_rng(request.config["seed"]), defaultdict[str, Any](list)
    rows, changed, times = config["rows"], config["changed"], config["repetitions"] + 1
    shape: Figures = {"num_embeddings": rows, "embedding_dim": config["dim"]}
    fresh, values = torch.randn(rows, config["dim"]), np.zeros((rows + changed * times, config["dim"]), np.float32)
    with fresh_folder(request.folder / "online") as path, tierstore.open(path, ddr=config["ddr"]) as store:

        def timed(name: str, since: int | None = None) -> None:
            with store.changes("arrays", since) as feed:
                begun = time.perf_counter()
                _take(feed, values)
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
    counts = {name: rows if "full" in name else changed for name in seconds}
    return {
        "rows_per_s": {name: per_second(counts[name], each[1:]) for name, each in seconds.items()},
        "config": config,
    }


def _tell_dict(found: Figures) -> Report:
    config, rates, columns = found["config"], found["rows_per_s"], ("median", "lowest", "highest")
    rows = [[name, *(f"{each[key]:,.0f}" for key in columns)] for name, each in rates.items()]
    note = f"Arrays: {config['rows']:,} rows of {config['dim']} float32, {config['changed']:,} changed by each commit."
    goals = [
        Goal(f"{name}: rows a second", rates[name]["median"], at_least=1e6) for name in ("changed rows", "a full copy")
    ]
    return Report([Table("rows a second into arrays", ["", *columns], rows)], goals, [note])


def follow(directory: str, rows: str, dim: str) -> None:
    """In a process of its own: for as many seconds as it is told, take what changes."""
    psutil.Process().nice(_NICE)
    values = np.zeros((int(rows), int(dim)), np.float32)
    with tierstore.open(directory, mode="r", ddr="16MiB") as store, store.changes("follower") as feed:
        _take(feed, values)
        for line in chain(["0"], sys.stdin):
            end, taken = time.time() + float(line), list[tuple[int, float]]()
            while time.time() < end:
                taken += _take(feed, values)
                time.sleep(_LOOK_SECONDS)
            print(json.dumps(taken), flush=True)


def _follower(path: Path, config: Figures) -> Child:
    child = Child([sys.executable, "-m", "bench.online", "follow", path, config["rows"], config["dim"]])
    child.line()
    return child


def _measure_lag(request: Run, _: Figures) -> Figures:
    config, own, begun = request.config, np.random.default_rng(request.config["seed"]), dict[int, float]()
    rows, dim, every, seconds = config["rows"], config["dim"], config["commit_seconds"], config["seconds"]
    with fresh_folder(request.folder / "online") as path, tierstore.open(path, ddr=config["ddr"]) as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=rows, embedding_dim=dim))
        table.write(torch.arange(rows), fresh := torch.randn(rows, dim))
        store.commit()
        with _follower(path, config) as child, ThreadPoolExecutor(1) as thread:
            taken, started = thread.submit(child.ask, str(seconds + 10 * every)), time.time()
            while time.time() < started + seconds:
                time.sleep(max(0.0, started + len(begun) * every - time.time()))
                begun[store.version + 1] = time.time()
                ids = torch.from_numpy(own.permutation(rows)[: int(config["rows_per_second"] * every)])
                table.write(ids, fresh[: len(ids)])
                store.commit()
            seen = json.loads(taken.result())
    lags = [next(at for known, at in seen if known >= version) - at for version, at in begun.items()]
    rate = len(begun) * int(config["rows_per_second"] * every) / seconds
    lags_ms = [1000 * float(each) for each in np.percentile(lags, [50, 99, 100])]
    return {"lags_ms": lags_ms, "rows_per_s": rate, "config": config}


def _tell_lag(found: Figures) -> Report:
    config, lags = found["config"], found["lags_ms"]
    note = (
        f"Lag: {found['rows_per_s']:,.0f} changed rows a second, a commit every {config['commit_seconds']} s; from a "
        "commit's first row to when a process that looks every 50 ms has acknowledged it."
    )
    table = Table("lag of a consumer, ms", ["p50", "p99", "highest"], [[f"{each:,.0f}" for each in lags]])
    return Report([table], [Goal("lag of a consumer: p99, ms", round(lags[1]), at_most=1000)], [note])


def _measure_steps(request: Run, _: Figures) -> Figures:
    config, pairs = request.config, list[tuple[float, float]]()
    with fresh_folder(request.folder / "online") as path, tierstore.open(path, ddr=config["ddr"]) as store:
        training = Training(store, config)

        def block() -> float:
            begun = time.perf_counter()
            for step in range(config["steps"]):
                training.step()
                if step % config["commit_steps"] == 0:
                    training.commit()
            return 1000 * (time.perf_counter() - begun) / config["steps"]

        block()
        training.commit().result()
        with _follower(path, config) as child, ThreadPoolExecutor(1) as thread:
            for _ in range(config["repetitions"] + 1):
                alone = block()
                taken = thread.submit(child.ask, str(alone * config["steps"] / 1000))
                pairs.append((alone, block()))
                taken.result()
        training.close()
        training.commit().result()
    return {"pairs_ms": pairs[1:], "config": config}


def _tell_steps(found: Figures) -> Report:
    config, pairs = found["config"], found["pairs_ms"]
    cells = [f"{statistics.median(times):.2f}" for times in zip(*pairs, strict=True)]
    note = (
        f"Steps: {config['batch']:,} bags of {config['pooling_factor']} ids (Zipf {config['zipf']}), a commit every "
        f" {config['commit_steps']} steps; medians of {len(pairs)} pairs of {config['steps']}, in turns."
    )
    slower = round(statistics.median(beside / alone for alone, beside in pairs), 3)
    goal = Goal("time of steps with a follower over that without", slower, at_most=1.05)
    return Report([Table("a training step, ms", ["alone", "with a follower"], [cells])], [goal], [note])


def _measure_redis(request: Run, _: Figures) -> Figures:
    config, seconds, sets = request.config, defaultdict[str, Any](list), defaultdict[str, Any](list)
    rows, changed, fresh = config["rows"], config["changed"], torch.randn(config["rows"], config["dim"])
    with contextlib.ExitStack() as held:
        store = held.enter_context(tierstore.open(held.enter_context(fresh_folder(request.folder / "online"))))
        shape: Figures = {"num_embeddings": rows, "embedding_dim": config["dim"]}
        table = store.create_table(tierstore.TableConfig(name="item", **shape))
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="redis-"))
        url = held.enter_context(redis_server.running(Path(folder)))
        feed = Feed(store, open_sink(url), consumer="redis")
        held.callback(feed.close)
        benchmark = ["redis-benchmark", "-s", f"{folder}/socket", "-t", "set", "--csv", "-n", f"{changed}", "-r"]
        benchmark += [f"{rows}", "-d", f"{4 * config['dim']}", "-P"]
        for turn in range(config["repetitions"] + 2):  # the first is a full copy; the second compiles
            ids = torch.randperm(rows)[: changed if turn else rows]
            table.write(ids, fresh[: len(ids)])
            store.commit()
            begun = time.perf_counter()
            feed.step()
            seconds["changes" if turn else "all"].append(time.perf_counter() - begun)
            for depth in ("1", "64") if turn > 1 else ():
                told = subprocess.run([*benchmark, depth], capture_output=True, text=True, check=True).stdout
                sets[depth].append(float(told.splitlines()[-1].split('","')[1].strip('"')))
    rates = {
        "feed: changed rows": per_second(changed, seconds["changes"][1:]),
        "feed: a full copy": per_second(rows, seconds["all"]),
    }
    return {"rows_per_s": rates | {f"redis-benchmark: SET, {depth} at a time": spread(sets[depth]) for depth in sets}}


def _tell_redis(found: Figures) -> Report:
    rates, columns = found["rows_per_s"], ("median", "lowest", "highest")
    rows = [[name, *(f"{each[key]:,.0f}" for key in columns)] for name, each in rates.items()]
    goal = Goal("changed rows a second to Redis", rates["feed: changed rows"]["median"], at_least=200_000)
    return Report([Table("rows a second into Redis on this machine", ["", *columns], rows)], [goal])


def _measure_index(request: Run, _: Figures) -> Figures:
    config, seconds, dim = request.config, list[float](), request.config["dim"]
    items, normalized = config["items"], torch.nn.functional.normalize
    with fresh_folder(request.folder / "online") as path, tierstore.open(path) as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=items, embedding_dim=dim))
        sink = runpy.run_path(str(ROOT / "examples" / "online" / "index.py"))["ItemIndex"](dim)
        centres = torch.randn(items // 100, dim)
        with contextlib.closing(Feed(store, sink, consumer="index")) as feed:
            for turn in range(config["repetitions"] + 1):  # first all but some; then a part changes, and one is new
                old, new = torch.randperm(items - 100), torch.tensor([items - 1 - turn])
                ids = torch.cat([old[: config["changed_items"]] if turn else old, new])
                rows = normalized(centres[ids % len(centres)] + torch.randn(len(ids), dim))
                begun = time.perf_counter()
                table.write(ids, rows)
                store.commit()
                feed.step()
                assert sink.nearest(rows[-1].numpy(), 1) == new.tolist()
                seconds.append(time.perf_counter() - begun)
        here = torch.cat([*table.written()])
        queries, every = normalized(centres[:200] + torch.randn(len(centres[:200]), dim)), table.read(here)
        exact = here[(queries @ every.T).topk(100).indices].tolist()
        hits = [len({*best} & {*sink.nearest(each.numpy(), 100)}) for each, best in zip(queries, exact, strict=True)]
    return {"recall": statistics.mean(hits) / 100, "seconds": spread(seconds[1:]), "config": config}


def _tell_index(found: Figures) -> Report:
    recall, seconds = round(found["recall"], 4), found["seconds"]["highest"]
    goals = [Goal("recall@100 of the index", recall, at_least=0.95), Goal("seconds to a new item", seconds, at_most=5)]
    table = Table("an index kept fresh", ["recall@100", "s to a new item"], [[f"{recall:.3f}", f"{seconds:.2f}"]])
    note = "Index: {items:,} items, {changed_items:,} changed by a commit; from its first row to the answer."
    return Report([table], goals, [note.format(**found["config"])])


PARTS: Final = {
    "dict": Part(_measure_dict, _tell_dict),
    "lag": Part(_measure_lag, _tell_lag),
    "steps": Part(_measure_steps, _tell_steps),
    "redis": Part(_measure_redis, _tell_redis),
    "index": Part(_measure_index, _tell_index),
}

if __name__ == "__main__":
    follow(*sys.argv[2:]) if sys.argv[1:2] == ["follow"] else start("online")

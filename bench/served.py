"""How soon is an event served? Files of them come to a folder, which a run follows, and a server follows that."""

import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from .child import Child
from .common import Goal, Part, Report, Run, Table, fresh_folder
from .serving.rig import ServerProcess

_COLUMNS: Final = tuple(f"c{number}" for number in range(4))
_IDS, _SETTLE_SECONDS = 1_000_000, 60.0  # of a column; in which a run that has begun, and its server, catch up
_GOALS: Final = {50: 3.0, 99: 10.0}


def _write(folder: Path, config: dict[str, Any], ended: threading.Event) -> None:
    """A file of the events since the one before, now and then until ``ended``."""
    generator, begin = np.random.default_rng(1), time.time()
    while not ended.wait(config["served_file_seconds"]):
        count = int(((now := time.time()) - begin) * config["served_rate"])
        made: dict[str, Any] = {name: generator.zipf(1.2, count) % _IDS for name in _COLUMNS}
        made |= {"label": generator.integers(0, 2, count), "at": np.linspace(begin, now, count, endpoint=False)}
        pyarrow.parquet.write_table(pa.table(made), folder / ".made")
        (folder / ".made").rename(folder / f"{now:.6f}.parquet")
        begin = now


def _seen(server: ServerProcess, end: float) -> list[tuple[float, float]]:
    """The newest event times that the server shows, each with when it began to."""
    found = [(0.0, 0.0)]
    while time.time() < end:
        if (newest := server.metric("tierstore_event_time_seconds")) > found[-1][0]:
            found.append((newest, time.time()))
        time.sleep(0.02)
    return found[1:]


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, ended, of = request.config, threading.Event(), list(_COLUMNS)
    with fresh_folder(request.folder / "served") as folder:
        events, store, log = folder / "in", folder / "store", folder / "log"
        events.mkdir(parents=True)
        (folder / "run.toml").write_text(f"""
            store = {{ path = "{store}", ddr = "1GiB" }}
            embedding = {{ num_embeddings = {_IDS} }}
            train = {{ batch_size = 2048, commit_every = 0, commit_seconds = {config["served_commit_seconds"]} }}
            data = {{ path = "{events}", follow = true, time_column = "at", sparse_columns = {of}, dense_columns = [] }}
        """)
        writer = threading.Thread(target=_write, args=[events, config, ended])
        writer.start()
        try:
            with Child([sys.executable, "-m", "tierstore", "train", folder / "run.toml"], log=log) as run:
                while b"committed version 1" not in log.read_bytes():
                    time.sleep(0.1)
                with ServerProcess(store, "256MiB", log=log, flags=("--follow-seconds", "0.1")) as server:
                    time.sleep(_SETTLE_SECONDS)
                    newest, shown = np.array(_seen(server, time.time() + config["served_seconds"])).T
                run.kill()
        finally:
            ended.set()
            writer.join()
    since, rate = zip(newest, newest[1:], shown[1:], strict=False), config["served_rate"]
    ages = [seen - np.linspace(a, b, int((b - a) * rate)) for a, b, seen in since]
    return {"rows": sum(map(len, ages)), **{f"p{of}": float(np.percentile(np.concatenate(ages), of)) for of in _GOALS}}


def _tell(found: dict[str, Any]) -> Report:
    table = [[f"{found['rows']:,}", *(f"{found[f'p{of}']:.2f} s" for of in _GOALS)]]
    goals = [Goal(f"event to served, p{of}, seconds", found[f"p{of}"], at_most=most) for of, most in _GOALS.items()]
    return Report([Table("From an event to its row being served", ["events", "p50", "p99"], table)], goals)


PART: Final = Part(_measure, _tell)

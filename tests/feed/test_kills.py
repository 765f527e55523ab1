"""Who trains, who takes the changes, and a Redis that they go to are killed at any time. In the end a dict, an index,
Parquet files and Redis hold what the store does, bit for bit."""

import functools
import importlib.util
import os
import pickle
import random
import runpy
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

import tierstore
from bench import redis_server
from bench.data import ROOT
from tests.children import run
from tests.feed.test_feed import DIM, SMALL, Shop, State, in_index, in_parquet, in_redis
from tests.store.test_changes import Receiver, contents
from tierstore.errors import TierstoreError
from tierstore.feed import Feed, open_sink

NEEDS = {"dict": "tierstore", "parquet": "pyarrow", "index": "usearch", "redis": "redis"}
ROUND = 8
item_index = functools.cache(lambda: runpy.run_path(str(ROOT / "examples/online/index.py"))["ItemIndex"])


def taking(kind: str, store: tierstore.Store, folder: Path) -> tuple[Callable[[], object], Callable[[], State]]:
    """What takes the changes there are, and what gives all that was taken."""
    if kind == "dict":
        receiver, changes = Receiver(), store.changes(kind, since=0)
        return lambda: [change.ack() for change in changes if receiver.take(change)], lambda: receiver.contents
    place = f"unix://{folder}/socket" if kind == "redis" else f"{folder}/fed"
    sink = item_index()(DIM) if kind == "index" else open_sink(place)
    feed = Feed(store, sink, consumer=kind, tables=["user"] if kind == "index" else [], say=lambda _: None)
    read: dict[str, Callable[[], State]] = {
        "index": lambda: in_index(sink), "parquet": lambda: in_parquet(place), "redis": lambda: in_redis(place)
    }  # fmt: skip
    return feed.step, read[kind]


def consume(kind: str, folder: Path, _seed: int = 0) -> None:
    """Take changes until there is a file ``end``, and keep what is held then. Redis may be away for a time."""
    is_last, parent, taken = False, os.getppid(), None
    with tierstore.open(folder / "shop", mode="r", **SMALL) as store:
        while not is_last and os.getppid() == parent:
            is_last = (folder / "end").exists()
            try:
                taken = taken or taking(kind, store, folder)
                taken[0]()
            except TierstoreError:
                if kind != "redis":
                    raise
                is_last = False
            time.sleep(0.01)
        (folder / kind).write_bytes(pickle.dumps(taken[1]()))


def train(folder: Path, seed: int) -> None:
    shop, parent = Shop(folder / "shop", seed, "float32", calm=60), os.getppid()
    while os.getppid() == parent:
        shop.change()


def serve(folder: Path, _seed: int) -> None:
    os.chdir(folder)
    os.execv(str(redis_server.COMMAND), [str(redis_server.COMMAND), *redis_server.OPTIONS])


def live(folder: Path, kills: int, *kinds: str) -> None:
    """Rounds of some kills, each of whoever; after the last in a round all is compared."""
    instants, end, shop = random.Random(kills), folder / "end", Shop(folder / "shop", 0, "float32")
    for _ in range(30):
        shop.change()
    before = shop.store.commit_id(shop.store.version)
    shop.store.close()
    end.touch()
    consume("dict", folder)  # here, so that forks find all loaded
    item_index() if "index" in kinds else None
    takers = [partial(consume, kind, folder) for kind in kinds]
    bodies = [partial(train, folder), *takers, *([partial(serve, folder)] if "redis" in kinds else [])]
    running = dict[int, ForkProcess]()

    def begin(place: int, seed: int) -> None:
        running[place] = ForkProcess(target=bodies[place], args=[seed], daemon=True)
        running[place].start()

    def finish(place: int, status: int) -> None:
        running[place].kill() if status else None
        running[place].join()
        assert running.pop(place).exitcode == status

    for first in range(0, kills, ROUND):
        end.unlink()
        for place in {*range(len(bodies))} - {*running}:
            begin(place, first)
        for seed in range(first + 1, first + ROUND):
            time.sleep(instants.uniform(0, 0.3))
            finish(place := instants.randrange(len(bodies)), -signal.SIGKILL)
            begin(place, seed)
        time.sleep(0.5)
        with tierstore.open(folder / "shop", mode="r", **SMALL) as store:
            while store.commit_id(store.refresh()) == before:
                time.sleep(0.1)
        finish(0, -signal.SIGKILL)
        with tierstore.open(folder / "shop", **SMALL) as store:  # who stays open sees other tables with a commit
            before = store.commit_id(store.commit())
        end.touch()
        for place in range(len(kinds)):
            finish(1 + place, 0)
        rows = contents(folder / "shop")
        for kind in kinds:
            held = pickle.loads((folder / kind).read_bytes())
            assert held == ({"user": rows["user"]} if kind == "index" else rows), kind


@pytest.mark.parametrize("kills", [ROUND, pytest.param(50 * ROUND, marks=pytest.mark.soak)])
def test_what_takes_changes_is_equal_to_the_store_whoever_is_killed(kills: int) -> None:
    kinds = [kind for kind, package in NEEDS.items() if importlib.util.find_spec(package)]
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:  # short, for a socket
        code = "from tests.feed.test_kills import *; live(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])"
        run(code, folder, kills, *(kinds if redis_server.COMMAND else {*kinds} - {"redis"}), timeout=3000)

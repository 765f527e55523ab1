"""Who trains, who takes the changes, and a Redis that they go to are killed at any time. In the end a dict, an index,
Parquet files and Redis hold what the store does, bit for bit."""

import functools
import os
import pickle
import random
import runpy
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
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

NEEDS = {"parquet": "pyarrow", "redis": "redis", "index": "usearch"}
ROUND = 4
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


def consume(kind: str, folder: Path) -> None:
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
        (folder / "held").write_bytes(pickle.dumps(taken[1]()))


def train(folder: Path, seed: int) -> None:
    shop, parent = Shop(folder / "shop", seed, "float32", calm=60), os.getppid()
    while os.getppid() == parent:
        shop.change()


def serve(folder: Path) -> None:
    os.chdir(folder)
    os.execv(str(redis_server.COMMAND), [str(redis_server.COMMAND), *redis_server.OPTIONS])


class Forks:
    """Processes that each do a thing until they are killed."""

    def __init__(self, *bodies: Callable[[int], object]) -> None:
        self.bodies, self.running = bodies, dict[int, int]()

    def begin(self, place: int, seed: int) -> None:
        if not (child := os.fork()):
            try:
                self.bodies[place](seed)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        self.running[place] = child

    def end(self, place: int, *, is_killed: bool = True) -> None:
        if is_killed:
            os.kill(self.running[place], signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.running.pop(place), 0)[1])
        assert status == (-signal.SIGKILL if is_killed else 0)


def live(kind: str, folder: Path, kills: int) -> None:
    """Rounds of some kills, each of whoever; after the last in a round all is compared."""
    instants, end, shop = random.Random(kills), folder / "end", Shop(folder / "shop", 0, "float32")
    for _ in range(30):
        shop.change()
    before = shop.store.commit_id(shop.store.version)
    shop.store.close()
    end.touch()
    consume("dict", folder)  # here, so that forks find all loaded
    item_index() if kind == "index" else None
    bodies = [lambda seed: train(folder, seed), lambda _: consume(kind, folder), lambda _: serve(folder)]
    forks = Forks(*(bodies if kind == "redis" else bodies[:2]))
    try:
        for first in range(0, kills, ROUND):
            end.unlink()
            for place in {*range(len(forks.bodies))} - {*forks.running}:
                forks.begin(place, first)
            for seed in range(first + 1, first + ROUND):
                time.sleep(instants.uniform(0, 0.3))
                forks.end(place := instants.randrange(len(forks.bodies)))
                forks.begin(place, seed)
            time.sleep(0.5)
            forks.end(0)
            end.touch()
            forks.end(1, is_killed=False)
            with tierstore.open(folder / "shop", mode="r", **SMALL) as store:
                before, known = store.commit_id(store.version), before
            assert before != known
            rows = contents(folder / "shop")
            assert pickle.loads((folder / "held").read_bytes()) == ({"user": rows["user"]} if kind == "index" else rows)
    finally:
        for place in [*forks.running]:
            forks.end(place)


@pytest.mark.parametrize("kills", [ROUND, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["dict", "index", "parquet", "redis"])
def test_what_takes_changes_is_equal_to_the_store_whoever_is_killed(kind: str, kills: int) -> None:
    if kind != "dict":
        pytest.importorskip(NEEDS[kind], reason=f"needs {NEEDS[kind]}: pip install {NEEDS[kind]}")
    if kind == "redis" and redis_server.COMMAND is None:
        pytest.skip("needs a redis-server, as of apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:  # short, for a socket
        code = "from tests.feed.test_kills import *; live(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))"
        run(code, kind, folder, kills, timeout=3000)

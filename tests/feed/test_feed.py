"""A feed makes its sink equal to the store, over kills at any point, and refuses what would make it something else.

Who trains, who takes the changes, and a Redis that they go to are killed at any time.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import pickle
import random
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tierstore
from bench import redis_server
from bench.data import ROOT, examples
from tests.children import fork, run
from tests.store.test_changes import Receiver, contents
from tierstore.cli import main
from tierstore.errors import TierstoreError
from tierstore.feed import Feed, consumer_of, open_sink
from tierstore.feed.redis import RedisSink
from tierstore.store.changes import Change, folder_of

parquet = pytest.importorskip("pyarrow.parquet")
State = dict[str, dict[int, bytes]]
"""Of each table that has rows their float32 bytes, by id."""
DIM = 4
_AT_ITS_END = 6
SMALL: dict[str, Any] = {"ddr": "4MiB", "threads": 1}


@pytest.fixture
def new_redis() -> Iterator[Callable[[], str]]:
    pytest.importorskip("redis", reason="needs redis-py: pip install redis")
    if redis_server.COMMAND is None:
        pytest.skip("needs a redis-server, as of apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder, contextlib.ExitStack() as running:

        def start() -> str:
            running.close()
            return running.enter_context(redis_server.running(Path(folder)))

        yield start


class Shop:
    """A store that changes at random; ``states``: what it held at each version. ``calm``: how many changes of rows come
    with four of tables, or back."""

    def __init__(self, folder: Path, seed: int = 1, dtype: str = "bfloat16", calm: int = 4) -> None:
        self.random, self.states, self.dtype, self.calm = random.Random(seed), dict[int, State](), dtype, calm
        torch.manual_seed(seed)  # an index is approximate
        self.store = tierstore.open(folder, keep=3, **SMALL)
        if not self.store.tables:
            self.create("item", {})
            self.create("user", {"ids": tierstore.DynamicIds(), "num_embeddings": 64})
        self.commit()

    def create(self, name: str, fields: dict[str, Any]) -> None:
        fields = {"num_embeddings": 500, "embedding_dim": DIM} | fields
        self.store.create_table(tierstore.TableConfig(name=name, **fields))

    def change(self) -> None:
        """Rows and ids of any table, now and then tables, or back to an earlier version and on from there."""
        for _ in range(self.random.randint(1, 3)):
            table = self.store[self.random.choice(sorted(self.store))]
            ids = torch.tensor(self.random.sample(range(500), self.random.randint(1, 40)))
            if table.ids is not None:
                ids = ids * 2**54 - 2**62
                table.evict(ids[:10])
                table.admit(ids[10:])
                ids = ids[torch.isin(ids, torch.cat([*table.written()]))]
            table.write(ids, torch.randn(len(ids), DIM))
        self.commit()
        (extra, *_), rows = [*set(self.store) - {"item", "user"}, ""], self.store["item"].config.num_embeddings
        changes: list[Callable[[], object]] = [
            lambda: self.store.change_table("item", num_embeddings=rows + 100),
            lambda: self.store.rollback(self.store.versions[0]),
            lambda: self.store.drop_table(extra) if extra else self.create("a/b:c", {"dtype": self.dtype}),
            lambda: self.store.change_table(extra, name=f"{extra}'") if extra else None,
        ]
        self.random.choice([lambda: None] * self.calm + changes)()
        self.store["item"].write(torch.tensor([self.random.randrange(500)]), torch.randn(1, DIM))
        self.commit()

    def commit(self) -> None:
        self.states[self.store.commit(extra={"event_time": time.time()})] = self.state

    @property
    def state(self) -> State:
        ids = {name: torch.cat([torch.empty(0, dtype=torch.long), *self.store[name].written()]) for name in self.store}
        rows = {name: self.store[name].read(each).float().numpy() for name, each in ids.items() if len(each)}
        return {name: dict(zip(ids[name].tolist(), map(bytes, each), strict=True)) for name, each in rows.items()}


def in_parquet(folder: str) -> State:
    found: State = {}
    for each in sorted(path for path in Path(folder).iterdir() if not path.name.startswith(".")):
        manifest = json.loads((each / "manifest.json").read_text())
        files = [path.name for path in each.iterdir() if path.suffix == ".parquet"]
        assert sorted(files) == sorted(file["file"] for file in manifest["files"])
        for name in [*found] if manifest["is_full"] else manifest["dropped"]:
            found.pop(name, None)
        for file in manifest["files"]:
            rows, table = found.setdefault(file["table"], {}), parquet.read_table(each / file["file"])
            assert file["table"] == manifest["tables"][int(file["file"].removesuffix(".parquet"))]["name"]
            assert (table["vector"].null_count, len(table)) == (file["deletes"], file["deletes"] + file["rows"])
            for each_id, vector in zip(*(table[name].to_pylist() for name in ("id", "vector")), strict=True):
                rows.pop(each_id, None)
                rows |= {} if vector is None else {each_id: np.array(vector, np.float32).tobytes()}
    return {name: rows for name, rows in found.items() if rows}


def in_redis(url: str) -> State:
    import redis

    found: State = {}
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(match="tierstore:*"):
            table, _, number = key.decode().removeprefix("tierstore:").rpartition(":")
            found.setdefault(table, {})[int(number)] = client.get(key)
    return found


def in_index(sink: Any) -> State:
    """Its rows; a search finds the best one for nearly each, as an approximate index does."""
    found = {int(key) - (int(key) >> 63 << 64): sink.index[key] for key in sink.index.keys}
    best = {key: max(found, key=lambda other, query=query: float(query @ found[other])) for key, query in found.items()}
    assert sum(sink.nearest(key, 1) == [best[key]] for key in found) >= 0.9 * len(found)
    return {"user": {key: row.tobytes() for key, row in found.items()}} if found else {}


def live(folder: Path, place: str, read: Callable[[str], State], kills: int) -> None:
    """Change a store, and feed it from forks, most of which are killed at some call that the feed makes; the first, of
    the same full copy, near its end."""
    shop, killed, last = Shop(folder / "shop"), 0, 0
    shop.change()
    # Elsewhere, so that forks find all compiled and loaded; the first time loads more.
    calls = [take(shop.store.directory, f"{place}?db={number}", 0) for number in (1, 2)][-1]
    for attempt in itertools.count():
        if attempt < _AT_ITS_END:
            last = calls - 4 * (_AT_ITS_END - attempt)
        elif killed < kills or last:
            shop.change()
            last = 0 if shop.random.random() < 0.4 else shop.random.randint(1, 2 * calls)
        else:
            break
        state = shop.state
        shop.store.close()
        _, status = fork(lambda _, last=last: print(take(shop.store.directory, place, last)))
        assert status in ((0, -signal.SIGKILL) if last else (0,))
        killed += status != 0
        last *= status != 0
        if not last:
            assert read(place) == state
        elif seen := sorted(Path(place).glob("0*")):  # what readers of Parquet see is whole at each moment
            position = json.loads((seen[-1] / "manifest.json").read_text())["position"]
            assert read(place) == shop.states[position[0]]
        shop.store = tierstore.open(shop.store.directory, keep=3, **SMALL)
    shop.store.close()


def take(directory: Path, place: str, last: int) -> int:
    calls = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        if event in ("call", "c_call") and "/tierstore/feed/" in frame.f_code.co_filename:
            calls += 1
            if calls == last:
                os.kill(os.getpid(), signal.SIGKILL)

    with tierstore.open(directory, mode="r", **SMALL) as store, contextlib.closing(open_sink(place)) as sink:
        feed = Feed(store, sink, consumer="feed", say=lambda _: None)
        sys.setprofile(count)
        feed.step()
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize("read", [in_parquet, in_redis])
def test_a_sink_is_equal_to_the_store_over_kills(
    read: Callable[[str], State], kills: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = str(tmp_path / "fed") if read is in_parquet else request.getfixturevalue("new_redis")()
    code = f"from tests.feed.test_feed import *; live(Path(sys.argv[1]), sys.argv[2], {read.__name__}, {kills})"
    run(code, tmp_path, place, timeout=3000)


def test_a_redis_that_was_away_or_lost_its_rows_gets_them_again(
    new_redis: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again between changes, and amid one."""
    url, shop, said, waits = new_redis(), Shop(tmp_path / "shop"), list[str](), list[float]()

    def then(owner: Any, name: str, *actions: Callable[[], object]) -> None:
        """Change the shop; after the next call of the method, do these."""
        method = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            monkeypatch.setattr(owner, name, method)
            found = method(*arguments)
            for action in actions:
                action()
            return found

        shop.change()
        monkeypatch.setattr(owner, name, call)

    def check() -> None:
        assert in_redis(url) == shop.state

    amid: list[Callable[[], object]] = [
        partial(then, RedisSink, "_put", new_redis),
        partial(then, Change, "ack", new_redis, shop.change),
        partial(then, RedisSink, "position", new_redis),
    ]
    steps = [step for action in amid for step in (action, lambda: None, check)]
    between = iter([check, new_redis, check, shop.change, check, *steps])

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if (action := next(between, None)) is None:
            raise KeyboardInterrupt
        action()

    monkeypatch.setattr("tierstore.feed.base.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with (
        shop.store, tierstore.open(shop.store.directory, mode="r", **SMALL) as store,
        contextlib.closing(open_sink(url)) as sink, pytest.raises(KeyboardInterrupt),
    ):  # fmt: skip
        Feed(store, sink, consumer="feed", say=said.append).follow()
    assert sum("all rows" in each for each in said) == 5
    assert sum(each.startswith("waiting, then again: ") for each in said) == waits.count(0.4) == 3
    assert {*waits} == {0.2, 0.4}


def test_the_pages_sink_takes_the_tables_asked_for_and_the_command_has_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    monkeypatch.chdir(tmp_path)
    (snippet,) = examples("docs/online.md")
    Path("kept.py").write_text(snippet)
    registries = dict[int, Any]()
    monkeypatch.setattr(prometheus, "start_http_server", lambda port, registry: registries.update({port: registry}))
    shop, words = Shop(tmp_path / "shop"), ["feed", "shop", "--to", "kept:Kept", "--once", "--metrics-port", "9100"]
    with shop.store:
        for turn, is_full in enumerate([True, False, True, False]):
            tables = ["item", "user"][: 1 + turn // 2]
            shop.change()
            assert main([*words, *(word for name in tables for word in ("--table", name))]) == 0
            assert ("all rows" in capsys.readouterr().out) == is_full
            _, kept = json.loads(Path("kept.json").read_text())
            rows = {
                name: {int(key): np.array(row, np.float32).tobytes() for key, row in each.items()}
                for name, each in kept.items()
            }
            assert {name: each for name, each in rows.items() if each} == {name: shop.state[name] for name in tables}
        assert main([*words, "--table", "user", "--table", "item"]) == 0
        assert capsys.readouterr().out == "nothing is new\n"
    metrics = prometheus.generate_latest(registries[9100]).decode()
    shown = [f"tierstore_feed_{each}\n" for each in (f"version {max(shop.states)}.0", "rows_total 0.0")]
    assert all(each in metrics for each in [*shown, "tierstore_feed_event_time_seconds NaN\n"])


def test_a_sink_takes_the_rows_of_one_store(
    new_redis: Callable[[], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import redis

    url, shop, other = new_redis(), Shop(tmp_path / "shop"), Shop(tmp_path / "other", 2)
    first = Feed(shop.store, open_sink(url), consumer="feed")

    class Late(RedisSink):
        def position(self) -> Any:
            found = super().position()
            first.step()
            return found

    with shop.store, other.store:
        with pytest.raises(TierstoreError, match="prefix tierstore was started again, or another feed writes there"):
            Feed(other.store, Late(url), consumer="feed").step()
        for place, name in ((url, f"{url}, prefix tierstore"), (str(tmp_path / "fed"), str(tmp_path / "fed"))):
            for directory, status in (("shop", 0), ("other", 2), ("shop", 0)):
                assert main(["feed", str(tmp_path / directory), "--to", place, "--once"]) == status
            assert f"{name} holds rows of another store" in capsys.readouterr().err
        assert in_redis(url) == shop.state
        redis.Redis.from_url(url).set("tierstore#position", "null")
        Feed(other.store, open_sink(url), consumer="feed").step()
        assert in_redis(url) == other.state


def test_redis_has_the_stored_type_a_prefix_and_a_time_to_live(
    new_redis: Callable[[], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import redis

    url, row = new_redis(), torch.ones(DIM, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with tierstore.open(tmp_path / "shop", **SMALL) as store, redis.Redis.from_url(url) as client:
        config = tierstore.TableConfig(name="half", num_embeddings=9, embedding_dim=DIM, dtype="bfloat16")
        store.create_table(config).write(torch.arange(3), torch.ones(3, DIM))
        store.commit()
        words = ["feed", str(store.directory), "--to", url, "--once", "--prefix", "shop", "--dtype", "stored"]
        client.mset(dict.fromkeys(range(5000), "another's"))
        assert main([*words, "--ttl", "1000"]) == 0
        assert client.info("commandstats")["cmdstat_scan"]["calls"] < 50
        assert main([*words, "--dtype", "float32"]) == 0
        assert client.ttl("shop:half:0") == -1
        assert {len(client.get(f"shop:half:{each}")) for each in range(3)} == {4 * DIM}, "rows of one type"
        position = json.loads(client.get("shop#position"))
        client.set("shop#position", json.dumps(position[:5]))  # as an older release wrote it
        assert main([*words, "--dtype", "float32"]) == 0
        assert "nothing is new" in capsys.readouterr().out
        assert main([*words, "--ttl", "1000"]) == 0
        assert (client.get("shop:half:2"), 0 < client.ttl("shop:half:0") <= 1000) == (row, True)
        others = [f"shop:half:{2**63}", f"shop:half:{'9' * 5000}", b"shop:\xff:1", "cart:item:17"]
        client.mset(dict.fromkeys(others, "another's"))
        assert main([*words, "--table", "half"]) == 0  # a full copy
        assert client.exists(*others) == len(others)
        client.config_set("maxmemory", 1)
        store["half"].write(torch.arange(2), torch.ones(2, DIM))
        store.commit()
        assert main([*words, "--table", "half"]) == 1
        assert "prefix shop: command not allowed" in capsys.readouterr().err, "and no rows' bytes"
        client.config_set("maxmemory", 0)
        with pytest.raises(ValueError, match="choose another prefix"):
            open_sink(url, prefix="cart")
        with pytest.raises(ValueError, match="unexpected keyword argument 'unknown'"):
            open_sink(f"{url}{'&' if '?' in url else '?'}unknown=1")


def test_a_change_that_comes_again_makes_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop, place = Shop(tmp_path / "shop"), str(tmp_path / "fed")
    syncs = Mock(side_effect=[None, OSError("no sync"), None])
    monkeypatch.setattr("tierstore.feed.parquet.sync_directory", syncs)
    with shop.store, contextlib.closing(open_sink(place)) as sink:
        for expected in (contextlib.nullcontext(), pytest.raises(OSError, match="no sync"), contextlib.nullcontext()):
            shop.change()
            with expected:
                Feed(shop.store, sink, consumer="feed").step()
        assert in_parquet(place) == shop.state
    assert len(os.listdir(place)) == 3


def test_the_example_keeps_an_index_equal_to_a_table(tmp_path: Path) -> None:
    pytest.importorskip("usearch", reason="needs usearch: pip install usearch")
    sink, shop = runpy.run_path(str(ROOT / "examples/online/index.py"))["ItemIndex"](DIM), Shop(tmp_path / "shop")
    feed = Feed(shop.store, sink, consumer="index", tables=["user"])
    with shop.store:
        for _ in range(12):
            shop.change()
            feed.step()
            assert in_index(sink) == {name: rows for name, rows in shop.state.items() if name == "user"}


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--to", "fed", "--ttl", "9"], 2, "--ttl goes with --to redis://"),
        (["--to", "own:Sink", "--prefix", "a"], 2, "--prefix goes with --to redis://"),
        (["--to", "nowhere:Sink"], 2, "cannot be imported"),
        (["--to", "s3://bucket/fed"], 2, "is a URL"),
        (["--to", "fed", "--table", "itme"], 1, "no table 'itme'"),
        (["--to", "fed", "--consumer", "a/b"], 2, "consumer='a/b'"),
        (["--to", "wrong"], 1, "no commit of a feed"),
        (["--to", "held"], 1, "is written by another feed"),
        (["--to", "redis://user:secret@localhost:1/0"], 1, "tierstore: redis://localhost:1/0, prefix tierstore: "),
        (["--to", "unix:///nowhere?password=secret"], 1, "tierstore: unix:///nowhere, prefix tierstore: "),
        (["--to", "redis://localhost:1/0", "--prefix", "a:b"], 2, "prefix='a:b'"),
        (["--to", "redis://u:secret@localhost:1/shop"], 2, "redis://localhost:1/shop, prefix tierstore: a database is"),
        (["--to", "redis://localhost:port/0"], 2, "redis://localhost:port/0, prefix tierstore: Port could not"),
        (["--to", "fed", "--metrics-port", "99999"], 2, "--metrics-port=99999 must be in"),
        (["--to", "redis://localhost:1/0", "--ttl", "0"], 2, "ttl=0"),
        (["--to", "redis://localhost"], 1, "redis://localhost needs more packages"),
    ],
)
def test_what_is_wrong_is_refused(
    words: list[str], status: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "packages" in text:
        monkeypatch.setitem(sys.modules, "redis", None)
    elif "redis:" in words[1]:
        pytest.importorskip("redis")
    monkeypatch.chdir(tmp_path)
    Path("wrong", f"{3:012}").mkdir(parents=True)
    Shop(tmp_path / "shop").store.close()
    with contextlib.closing(open_sink("held")):
        assert main(["feed", "shop", "--once", *words]) == status
    assert text in (said := capsys.readouterr().err)
    assert "secret" not in said


def test_sinks_have_names_of_their_own_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["/", "a/b", "a-b", "redis://h/0", "redis://h/1", "unix:///h/0", "unix:///h?db=1", "unix:///h", "own:Sink"]
    monkeypatch.chdir(tmp_path)
    names = {consumer_of(place, prefix) for place in places for prefix in ("", "shop")}
    assert len(names) == 2 * len(places)
    assert all(folder_of(tmp_path, name) for name in names)
    for place, secret in (("redis://h/0", "redis://u:secret@h/0"), ("unix:///h?db=1", "unix:///h?password=x@y&db=1")):
        assert consumer_of(secret, "") == consumer_of(place, "")


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


def live_through_kills(folder: Path, kills: int, *kinds: str) -> None:
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
        code = (
            "from tests.feed.test_feed import *; live_through_kills(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])"
        )
        run(code, folder, kills, *(kinds if redis_server.COMMAND else {*kinds} - {"redis"}), timeout=3000)

"""Kill servers, the processes that apply updates for them, and publishers with a canary:
``python -m tests.faults.served --seed 1 --kills 20`` prints one line of JSON, what came of it.

Two servers as ``tierstore serve --from`` runs them, one of them the canary, follow a publisher from version to version;
the canary's figures are made up, so that some versions are worse. Everything is forked from a process that has imported
it all. The forks that write replicas watch a connection to their server in place of their parent, and end with it.
"""

import argparse
import contextlib
import http.client
import json
import os
import queue
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

import tierstore
from tests.children import fork
from tierstore.serve import program, replica
from tierstore.serve.config import ServeConfig
from tierstore.serve.models import Models, rehearse
from tierstore.serve.offer import offer
from tierstore.serve.replica import Writer
from tierstore.system import killpoints
from tierstore.updates import apply_update, roll_back_replica, write_update
from tierstore.updates.apply import answer
from tierstore.updates.fetch import Source
from tierstore.updates.listing import Listing, Measures
from tierstore.updates.publish import Publisher

__all__ = ["Tally", "kill_servers"]

_ROWS: Final = 64
_TOKEN: Final = "token-of-the-crash-tests"
_CANARY, _OTHER = "canary", "other"
_WRITTEN: Final = (
    "write-back: transaction committed", "commit: record put", "commit: transaction committed", "commit: durable"
)  # fmt: skip
_BACK: Final = ("rollback: head put", "rollback: transaction committed", "rollback: segments deleted")
_READY_S: Final = 120.0
_SETTLE_S: Final = 120.0
_BAD_SHARE: Final = 0.35


@dataclass(kw_only=True)
class Tally:
    """``kills``: by who was killed, and where; ``shown``: versions read from a server and compared, row by row;
    ``rounds``: versions that all servers then had, or that the canary had gone back from."""

    kills: Counter[str] = field(default_factory=Counter)
    shown: int = 0
    rounds: int = 0
    failures: list[str] = field(default_factory=list)


def rows_of(version: int) -> torch.Tensor:
    """float32 [rows, 4]."""
    generator = torch.Generator().manual_seed(version)
    return torch.randn(_ROWS, 4, generator=generator)


def _commit(source: Path, version: int) -> str:
    with tierstore.open(source, ddr="4MiB", threads=1, keep=4) as store:
        table = store.create_table(tierstore.TableConfig(name="item", num_embeddings=_ROWS, embedding_dim=4))
        table.write(torch.arange(_ROWS), rows_of(version))
        assert store.commit() == version
        return store.commit_id(version)


def _dies(doom: Path) -> Callable[[str], None]:
    """A hook that ends the process at the point that a file names, once."""

    def hook(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if doom.read_text() == name:
                doom.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _write_replicas(listener: socket.socket, folder: Path) -> None:
    """Fork a process that writes replicas for each server that asks; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        lines = connection.makefile("rw")
        killpoints.hook = _dies(folder / f"doom of the writer of {lines.readline().strip()}")
        requests: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read(lines: Any, requests: Any) -> None:
            for line in lines:
                requests.put(line)
            os.kill(os.getpid(), signal.SIGKILL)  # its server ended

        threading.Thread(target=read, args=(lines, requests), daemon=True).start()
        while True:
            connection.sendall(answer(requests.get()).encode() + b"\n")


class _Forked(Writer):
    """Speaks to a process that was forked, as to start one takes seconds."""

    folder, name = Path(), ""
    _connection: socket.socket | None = None

    def start(self) -> None:
        if self._connection is None:
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(str(self.folder / "writers"))
            self._connection.sendall(f"{self.name}\n".encode())

    def _exchange(self, line: str) -> str:
        self._connection.sendall(line.encode() + b"\n")
        return self._connection.makefile().readline()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._connection = None


def _serve(folder: Path, name: str, ports: dict[str, int], ready: int) -> None:
    """A server, in a forked process; does not return."""
    _Forked.folder, _Forked.name = folder, name
    replica.Writer = _Forked  # type: ignore[misc]
    killpoints.hook = _dies(folder / f"doom of {name}")

    def measure(_: Any, _seconds: int, commit_id: str) -> Measures:
        return Measures(seconds_p99=9.0 if commit_id in (folder / "bad").read_text().split() else 1.0)

    program.Server._measure = measure  # type: ignore[assignment, method-assign]
    config = ServeConfig(
        store=str(folder / name), port=0, grpc_port=-1, admin_port=ports[name], ddr="4MiB", threads=1,
        sources=(f"http://127.0.0.1:{ports['publisher']}",), canary=name == _CANARY, canary_seconds=1,
        admin_token_file=str(folder / "token"), warm_up="none", log_level="error", grace_seconds=1.0,
    )  # fmt: skip
    os.dup2(os.open(folder / f"log of {name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        program.run(config, on_ready=lambda found: os.write(ready, json.dumps(found.rest).encode()))
    finally:
        os._exit(0)


def _publish(folder: Path, ports: dict[str, int], ready: int) -> None:
    """A publisher, in a forked process; does not return."""
    killpoints.hook = _dies(folder / "doom of publisher")
    os.dup2(os.open(folder / "log of publisher", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    canary = Source(f"http://127.0.0.1:{ports[_CANARY]}", _TOKEN)
    try:
        publisher = Publisher(folder / "source", folder / "offered", canary=canary, urgent=0.1, say=lambda _: None)
        os.dup2(ready, 1)
        offer(publisher, host="127.0.0.1", port=ports["publisher"], token=_TOKEN, tls=("", ""))
    finally:
        os._exit(0)


class Process:
    """A server or the publisher, which is started again after each kill."""

    def __init__(self, folder: Path, name: str, ports: dict[str, int]) -> None:
        self.folder, self.name, self.ports = folder, name, ports
        self.pid = self.rest = 0
        self.start()

    def start(self) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            if self.name == "publisher":
                _publish(self.folder, self.ports, writer)
            _serve(self.folder, self.name, self.ports, writer)
        os.close(writer)
        if not select.select([reader], [], [], _READY_S)[0] or not (said := os.read(reader, 100)):
            raise RuntimeError(f"{self.name} is not ready: {(self.folder / f'log of {self.name}').read_text()[-2000:]}")
        os.close(reader)
        self.rest = 0 if self.name == "publisher" else json.loads(said)

    def start_if_dead(self) -> bool:
        """Whether it was dead."""
        if os.waitpid(self.pid, os.WNOHANG)[0]:
            self.start()
            return True
        return False

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _ask(self, port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def listing(self) -> Listing:
        return Source(f"http://127.0.0.1:{self.ports[self.name]}", _TOKEN).poll()

    def roll_back(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._ask(self.ports[self.name], "POST", "/admin/rollback", {})

    def rows(self) -> tuple[int, torch.Tensor]:
        ids = {"name": "ids", "datatype": "INT64", "shape": [_ROWS], "data": list(range(_ROWS))}
        answer = self._ask(self.rest, "POST", "/v2/models/rows.item/infer", {"inputs": [ids]})[1]
        return int(answer["model_version"]), torch.tensor(answer["outputs"][0]["data"]).view(_ROWS, 4)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Chain:
    """A source, its publisher and two servers; ``step`` makes a version, and has somebody killed meanwhile."""

    def __init__(self, folder: Path, generator: random.Random, tally: Tally) -> None:
        self._folder, self._draw, self._tally = folder, generator, tally
        self._version, self._ids, self._bad = 0, dict[int, str](), set[int]()
        self._ports = {name: _free_port() for name in (_CANARY, _OTHER, "publisher")}
        (folder / "token").write_text(_TOKEN)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "writers"))
        listener.listen()
        self._writers = os.fork()
        if not self._writers:
            _write_replicas(listener, folder)
        self._new_version(is_bad=False)
        self.processes = [Process(folder, name, self._ports) for name in ("publisher", _CANARY, _OTHER)]
        self.publisher, self.canary, self.other = self.processes
        self._settle(1)

    def close(self) -> None:
        for process in self.processes:
            process.end()
        os.kill(self._writers, signal.SIGKILL)
        os.waitpid(self._writers, 0)

    def _new_version(self, *, is_bad: bool) -> None:
        self._version += 1
        (made,), _ = fork(lambda tell: tell("made", id=_commit(self._folder / "source", self._version)))
        self._ids[self._version] = made["id"]
        self._bad |= {self._version} if is_bad else set()
        (self._folder / "bad.partial").write_text(" ".join(self._ids[each] for each in self._bad))
        (self._folder / "bad.partial").rename(self._folder / "bad")

    def _doom(self, is_bad: bool) -> tuple[Path, str] | None:
        """Who is to die, and where; None: somebody at any time."""
        judged = ("canary: declined", "rollback: written") if is_bad else ("canary: approved",)
        server = self._draw.choice([_CANARY] if is_bad else [_CANARY, _OTHER])
        points = {
            f"the writer of {server}": _WRITTEN + (_BACK if is_bad else ()),
            server: (*killpoints.UPDATE_POINTS, *(judged if server == _CANARY else ())),
            "publisher": killpoints.PUBLISH_POINTS,
        }
        name = self._draw.choice([*points, "anybody"])
        if name == "anybody":
            return None
        return self._folder / f"doom of {name}", self._draw.choice(points[name])

    def step(self) -> None:
        """A version that all show, or that the canary declines, while somebody is killed."""
        good = max({*self._ids} - self._bad)
        doom = self._doom(is_bad := self._draw.random() < _BAD_SHARE)
        if doom is not None:
            doom[0].write_text(doom[1])
        self._new_version(is_bad=is_bad)
        if doom is None:
            time.sleep(self._draw.uniform(0, 3))
            (victim := self._draw.choice(self.processes)).end()
            victim.start()
            self._tally.kills[f"{victim.name}, at any time"] += 1
        self._settle(good if is_bad else self._version)
        if doom is not None:
            if not doom[0].exists():
                self._tally.kills[f"{doom[0].name.removeprefix('doom of ')}, at {doom[1]}"] += 1
            doom[0].unlink(missing_ok=True)
        if not is_bad and self._draw.random() < 0.3:
            self._go_back(good)
        self._tally.rounds += 1

    def _go_back(self, good: int) -> None:
        """An operator has the canary go back, killed meanwhile or not; so do all."""
        point = self._draw.choice(["rollback: declined", "rollback: written"])
        (doom := self._folder / f"doom of {_CANARY}").write_text(point)
        self.canary.roll_back()
        self._settle(good)
        self._bad.add(self._version)  # the other one showed it till now
        self._tally.kills[f"{_CANARY}, at {point}"] += not doom.exists()
        doom.unlink(missing_ok=True)

    def _settle(self, version: int) -> None:
        """Until both servers show a version for good; nobody shows one that was declined to the end."""
        end, last = time.monotonic() + _SETTLE_S, ""
        while time.monotonic() < end:
            for process in self.processes:
                process.start_if_dead()
            try:
                shown = [self._check(server) for server in (self.canary, self.other)]
                listing = self.publisher.listing()
                is_decided = listing.trial is None and self._version in {
                    version, *(each.version for each in listing.verdicts if not each.is_approved)
                }  # fmt: skip
                last = f"{shown}, {listing}"
                if shown == [version, version] and is_decided:
                    return
            except (OSError, http.client.HTTPException, KeyError) as error:  # it dies just now, or begins
                last = f"{type(error).__name__}: {error}"
            time.sleep(0.1)
        raise RuntimeError(f"version {version} is not shown by all: {last}")

    def _check(self, server: Process) -> int:
        """The version that it shows, whose rows are right; some may be those of one later version, the urgent ones."""
        listing, (version, rows) = server.listing(), server.rows()
        self._tally.shown += 1
        allowed = {*self._ids} - (self._bad if server is self.other else set())
        shown = (rows == rows_of(version)).all(1)
        later = {version} if server is self.canary else {each for each in allowed if each >= version}
        if version not in allowed or not any((shown | (rows == rows_of(each)).all(1)).all() for each in later):
            raise RuntimeError(f"{server.name} shows version {version} of {sorted(allowed)}: {rows}, {listing}")
        return version


def kill_servers(folder: Path, *, kills: int, seed: int) -> Tally:
    """Until so many were killed; a failure ends it."""
    tally = Tally()
    _warm(folder / "warm")
    chain = Chain(folder, random.Random(seed), tally)
    try:
        while tally.kills.total() < kills:
            chain.step()
            print(f"{tally.kills.total()} kills, {tally.rounds} rounds", file=sys.stderr, flush=True)
    except Exception as error:
        tally.failures.append(f"--seed {seed}, after {tally.kills.total()} kills: {type(error).__name__}: {error}")
    finally:
        chain.close()
    return tally


def _warm(folder: Path) -> None:
    """Load and compile what the forks use."""
    folder.mkdir()
    _commit(folder / "source", 1)
    _commit(folder / "source", 2)
    for since, name in enumerate(("first", "second")):
        update = write_update(folder / "source", folder / name, since=since, version=since + 1)
        apply_update(folder / "replica", update.path)
    roll_back_replica(folder / "replica")
    with tierstore.open(folder / "replica", mode="r", ddr="4MiB", threads=1) as store:
        store.rehearse_newer()
        rehearse(Models(store).by_name.values())


@contextlib.contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="served-", dir=parent))
    yield folder
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.served", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--dir", type=Path, help="where stores are made [a temporary folder]")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with _folder(given.dir) as folder:
        tally = kill_servers(folder, kills=given.kills, seed=given.seed)
    print(json.dumps(vars(tally)))


if __name__ == "__main__":
    main()

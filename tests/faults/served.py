"""Kill servers, the processes that apply updates for them, and publishers with a canary:
``python -m tests.faults.served --seed 1 --kills 20`` prints one line of JSON, what came of it.

Two servers as ``tierstore serve --updates`` runs them, one of them the canary, take version after version; the canary's
figures are made up, so that some versions are worse. Everything is forked from a process that has imported it all. The
forks that write replicas watch a connection to their server in place of their parent, and end with it as those do.
"""

import argparse
import contextlib
import http.client
import json
import os
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
from types import SimpleNamespace
from typing import Any, Final

import torch

import tierstore
from tierstore.serve.admin import updates as admin_updates
from tierstore.serve.config import ServeConfig
from tierstore.serve.models import Models, rehearse
from tierstore.serve.program import run as run_server
from tierstore.system import killpoints
from tierstore.updates import apply_update, child, client, roll_back_replica, write_update
from tierstore.updates import canary as canaries
from tierstore.updates.canary import Canary
from tierstore.updates.publish import publish as publish_store

from .forked import Kill, fork

__all__ = ["Tally", "kill_servers"]

_ROWS: Final = 64
_TOKEN: Final = "token-of-the-crash-tests"
_CANARY, _OTHER = "canary", "other"
_WRITTEN: Final = (
    "write-back: transaction committed", "commit: record put", "commit: transaction committed", "commit: durable"
)  # fmt: skip
_BACK: Final = ("rollback: head put", "rollback: transaction committed", "rollback: segments deleted")
_READY_S: Final = 120.0
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
    """Fork a process for each request of a server; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        request = json.loads(connection.makefile().readline())
        os.dup2(connection.fileno(), 1)
        killpoints.hook = _dies(folder / f"doom of the writer of {request['server']}")

        def end_with_server() -> None:
            select.select([connection], [], [])  # noqa: B023 - this process has one
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end_with_server, daemon=True).start()
        sys.stdout = os.fdopen(1, "w")
        child.main(request["arguments"])
        sys.stdout.flush()
        os._exit(0)


def _serve(folder: Path, name: str, ready: int) -> None:
    """A server, in a forked process; does not return."""

    class Writer:
        returncode = -signal.SIGKILL

        def __init__(self, command: list[str], **_: Any) -> None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(folder / "writers"))
            self._socket.sendall(json.dumps({"server": name, "arguments": command[4:]}).encode() + b"\n")

        def communicate(self, timeout: float) -> tuple[bytes, bytes]:
            self._socket.settimeout(timeout)
            return b"".join(iter(lambda: self._socket.recv(4096), b"")), b""

        def kill(self) -> None:
            self._socket.close()

        def wait(self) -> None: ...

    admin_updates.subprocess = SimpleNamespace(  # type: ignore[assignment, attr-defined]
        Popen=Writer, DEVNULL=-3, PIPE=-1, TimeoutExpired=TimeoutError
    )
    killpoints.hook = _dies(folder / f"doom of {name}")
    (token := folder / "token").write_text(_TOKEN)
    token.chmod(0o600)
    config = ServeConfig(
        store=str(folder / name), port=0, grpc_port=-1, admin_port=0, ddr="4MiB", threads=1, updates=True,
        admin_token_file=str(token), warm_up="none", log_level="error", grace_seconds=1.0,
    )  # fmt: skip
    os.dup2(os.open(folder / f"log of {name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        run_server(config, on_ready=lambda ports: os.write(ready, json.dumps([ports.rest, ports.admin]).encode()))
    finally:
        os._exit(0)


class Server:
    """A replica's server, started again after each kill."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.declined: set[str] = set()
        self.start()

    def start(self) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _serve(self.folder, self.name, writer)
        os.close(writer)
        if not select.select([reader], [], [], _READY_S)[0] or not (ports := os.read(reader, 100)):
            raise RuntimeError(f"{self.name} is not ready: {(self.folder / f'log of {self.name}').read_text()[-2000:]}")
        os.close(reader)
        self.rest, self.admin = json.loads(ports)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.admin}"

    def start_again(self) -> None:
        """Once it has died."""
        os.waitpid(self.pid, 0)
        self.start()

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

    def state(self) -> Any:
        return self._ask(self.admin, "GET", "/admin/updates")[1]

    def roll_back(self) -> bool:
        """Whether the server lived to say that it did."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._ask(self.admin, "POST", "/admin/rollback", {})[0] == 200
        return False

    def rows(self) -> tuple[int, torch.Tensor]:
        ids = {"name": "ids", "datatype": "INT64", "shape": [_ROWS], "data": list(range(_ROWS))}
        answer = self._ask(self.rest, "POST", "/v2/models/rows.item/infer", {"inputs": [ids]})[1]
        return int(answer["model_version"]), torch.tensor(answer["outputs"][0]["data"]).view(_ROWS, 4)


class Chain:
    """A source and two servers; ``step`` makes a version, publishes it under a kill, and again without one."""

    def __init__(self, folder: Path, generator: random.Random, tally: Tally) -> None:
        self._folder, self._draw, self._tally = folder, generator, tally
        self._source, self._version = folder / "source", 0
        self._ids: dict[int, str] = {}
        self._bad: set[int] = set()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "writers"))
        listener.listen()
        self._writers = os.fork()
        if not self._writers:
            _write_replicas(listener, folder)
        self._new_version(is_bad=False)
        self.servers = [Server(folder, name) for name in (_CANARY, _OTHER)]
        self._publish(is_tried=False)
        self._good = {server.name: 1 for server in self.servers}

    def close(self) -> None:
        for server in self.servers:
            server.end()
        os.kill(self._writers, signal.SIGKILL)
        os.waitpid(self._writers, 0)

    def _new_version(self, *, is_bad: bool) -> None:
        self._version += 1
        ending = fork(lambda tell: tell("made", id=_commit(self._source, self._version)), self._folder / "stacks")
        made = ending.last("made")
        assert made is not None, ending.words
        self._ids[self._version] = made["id"]
        self._bad |= {self._version} if is_bad else set()

    def _publish(
        self, *, is_tried: bool = True, kill: Kill | None = None, doom: str = "", victim: int = 0
    ) -> list[str]:
        """The errors; none of a publisher that was killed. ``victim``: a process that is killed meanwhile."""
        urls, bad = [server.url for server in self.servers], {self._ids[each] for each in self._bad}
        delay = self._draw.uniform(0, 0.8)

        def body(tell: Callable[..., None]) -> None:
            def status(asked: client.AdminClient, _seconds: int) -> Any:
                origin = asked.origin()
                slow = 9.0 if origin is not None and origin.commit_id in bad else 1.0
                recent = {"requests_per_second": 9.0, "failed_per_second": 0.0, "seconds_p99": slow}
                return {"requests": {"recent": recent, "history": {"requests": [200]}}}

            def strike() -> None:
                time.sleep(delay)
                os.kill(victim, signal.SIGKILL)

            client.AdminClient.status = status  # type: ignore[assignment, method-assign]
            client.FIRST_PAUSE_SECONDS = 0.02  # type: ignore[misc]
            now = [0.0]
            canaries.time = SimpleNamespace(  # type: ignore[assignment, attr-defined]
                monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)
            )
            killpoints.hook = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == doom else None
            if victim:
                (striking := threading.Thread(target=strike)).start()
            canary = Canary(url=urls[0], seconds=1) if is_tried else None
            done = publish_store(self._source, urls, token=_TOKEN, canary=canary)
            if victim:
                striking.join()
            tell("published", errors=[each.error for each in done])

        ending = fork(body, self._folder / "stacks", kill)
        if ending.how == "failed":
            raise RuntimeError(ending.words)
        if ending.how == "killed":
            self._tally.kills[f"publisher{', at ' + doom if doom else ''}"] += 1
        told = ending.last("published")
        return told["errors"] if told else []

    def step(self) -> None:
        """One version: published, with somebody killed meanwhile, looked at, and published to its end."""
        self._new_version(is_bad=(is_bad := self._draw.random() < _BAD_SHARE))
        server = self._draw.choice(self.servers[:1] if is_bad else self.servers)
        who = self._draw.choice(["writer", "writer", "publisher", "publisher", "server", "server at any time"])
        points = {
            "writer": _WRITTEN + (_BACK if is_bad else ()),
            "server": ("update: applied", "update: shown", "update: file kept")
            + (killpoints.ROLLBACK_POINTS if is_bad else ()),
        }
        if who in points:
            self._publish_doomed(server, self._draw.choice(points[who]), who)
        elif who == "publisher":
            point = self._draw.choice(["", "publish: canary shows it", "" if is_bad else "publish: canary passed"])
            kill = None if point else Kill("start", 1, self._draw.uniform(0, 0.8))
            self._publish(kill=kill, doom=point)
        else:
            self._publish(victim=server.pid)
            self._tally.kills[who] += 1
            server.start_again()
        self._look(is_over=False)
        errors = self._publish()
        self._look(is_over=True)
        if not is_bad and any(errors):
            raise RuntimeError(f"version {self._version} was not published: {errors}")
        if not is_bad and self._draw.random() < 0.3:
            self._go_back(self._draw.choice(self.servers))
        self._tally.rounds += 1

    def _publish_doomed(self, server: Server, point: str, who: str) -> None:
        doom = self._folder / f"doom of {'the writer of ' if who == 'writer' else ''}{server.name}"
        doom.write_text(point)
        self._publish()
        if is_left := doom.exists():  # it came to nothing
            doom.unlink()
        else:
            self._tally.kills[f"{who}, at {point}"] += 1
        if who == "server" and not is_left:
            server.start_again()

    def _go_back(self, server: Server) -> None:
        """An operator has it go back, killed meanwhile or not."""
        who, point = self._draw.choice([("server", each) for each in killpoints.ROLLBACK_POINTS]
                                       + [("writer", each) for each in _BACK])  # fmt: skip
        name = "doom of the writer of " + server.name if who == "writer" else "doom of " + server.name
        (doom := self._folder / name).write_text(point)
        before = server.state()["commit_id"]
        is_done = server.roll_back()
        if not doom.exists():
            self._tally.kills[f"{who}, at {point}"] += 1
            if who == "server":
                server.start_again()
        doom.unlink(missing_ok=True)
        _settled(server)
        after = server.state()
        if (after["commit_id"] != before) != (before in after["declined"]):
            raise RuntimeError(f"{server.name}: went back from {before}: {after}")
        if is_done and after["commit_id"] == before:
            raise RuntimeError(f"{server.name} said that it went back from {before}, and did not: {after}")
        self._check(server, {*self._ids} - self._bad)

    def _look(self, *, is_over: bool) -> None:
        good = {*self._ids} - self._bad
        for server in self.servers:
            _settled(server)
            on_trial = {self._version} if server.name == _CANARY and not is_over else set()
            self._check(server, ({self._version} if is_over and self._version in good else good) | on_trial)

    def _check(self, server: Server, allowed: set[int]) -> None:
        state = server.state()
        version, commit_id, kept = state["version"], state["commit_id"], state["kept"]
        shown, rows = server.rows()
        problems = {
            f"shows version {version}, not one of {sorted(allowed)[-3:]}": version in allowed,
            "names another commit than that of its version": self._ids[version] == commit_id,
            f"answers as version {shown}": shown == version,
            "has other rows": torch.equal(rows, rows_of(version)),
            "declines what it shows": commit_id not in state["declined"],
            f"keeps files that do not lead there: {kept}": not kept or any(each.endswith(commit_id) for each in kept),
        }
        self._tally.shown += 1
        if found := [problem for problem, is_right in problems.items() if not is_right]:
            raise RuntimeError(f"{server.name} {', '.join(found)}: {state}")


def _settled(server: Server) -> None:
    """Wait for what a server still applies, and for its files and list to be those of what it shows."""
    for _ in range(200):
        state = server.state()
        leads = [each for each in state["kept"] if each.endswith(state["commit_id"])]
        if not state["is_applying"] and state["commit_id"] not in state["declined"] and (leads or not state["kept"]):
            return
        time.sleep(0.05)


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

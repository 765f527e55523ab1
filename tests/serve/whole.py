"""Whole servers for tests: in a thread of this process, or as the command that users start."""

import atexit
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.serve.loops import WAIT_SECONDS, LoopThread
from tierstore.serve.config import ServeConfig
from tierstore.serve.program import Ports, Server

ADMIN_TOKEN = "an-operators-token"
ADMIN = {"X-Tierstore-Admin": "1", "Authorization": f"Bearer {ADMIN_TOKEN}"}


def admin_token_file() -> str:
    path = Path(tempfile.gettempdir()) / f"tierstore-admin-token-{os.getpid()}"
    if not path.exists():
        path.write_text(ADMIN_TOKEN)
        atexit.register(path.unlink, missing_ok=True)
    return str(path)


def make_certificate(name: str, certificate: Path, key: Path, *options: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += [*(options or ["-nodes"]), "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def summed(admin: str, name: str, **labels: str) -> float:
    """The sum of the series of this name that have these labels, of a server's admin port."""
    total = 0.0
    for line in httpx.get(f"{admin}/metrics", headers=ADMIN, timeout=WAIT_SECONDS).raise_for_status().text.splitlines():
        is_it = line.startswith((f"{name}{{", f"{name} "))
        if is_it and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


class InThread(LoopThread):
    def __init__(self, config: ServeConfig) -> None:
        super().__init__()
        self.config = config
        self.server: Server = self.call(self._made())
        self.stopped = False
        try:
            self.ports: Ports = self.call(self.server.start())
        except BaseException:
            self.end_loop()
            raise
        self.engine: Any = self.server.repository.only

    async def _made(self) -> Server:
        return Server(self.config)

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            try:
                self.call(self.server.stop())
            finally:
                self.end_loop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.rest}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.ports.admin}"

    def metric(self, name: str, **labels: str) -> float:
        return summed(self.admin, name, **labels)

    @contextlib.contextmanager
    def held(self, executor: Any = None) -> Iterator[None]:
        """No batch runs meanwhile, or nothing else of an executor."""
        begun, release = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            assert release.wait(WAIT_SECONDS)

        job = (executor or self.engine._executor).submit(hold)
        assert begun.wait(WAIT_SECONDS)
        try:
            yield
        finally:
            release.set()
            job.result(WAIT_SECONDS)


SMALL: dict[str, Any] = {
    "port": 0,
    "grpc_port": 0,
    "admin_port": 0,
    "ddr": "4MiB",
    "threads": 1,
    "follow_seconds": 0.01,
    "warm_up": "none",
    "grace_seconds": 10.0,
}


@contextlib.contextmanager
def serving(store: Path | str = "", **settings: Any) -> Iterator[InThread]:
    given = SMALL | {"store": str(store), "admin_token_file": admin_token_file()} | settings
    server = InThread(ServeConfig(**given))
    try:
        yield server
    finally:
        server.stop()


class Command:
    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierstore", "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.line = ""

    def wait_ready(self) -> None:
        has_line, _, _ = select.select([self.process.stdout], [], [], WAIT_SECONDS)
        assert has_line, f"not ready: {self.log.read_text()}"
        self.line = self.process.stdout.readline().decode()
        found = re.fullmatch(r"ready: REST (\S+), gRPC (\S+), admin (\S+)\n", self.line)
        assert found is not None, self.line + self.log.read_text()
        self.url, self.grpc, self.admin = found.groups()

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(WAIT_SECONDS)


@contextlib.contextmanager
def command(log: Path, *arguments: str) -> Iterator[Command]:
    made = Command(log, *arguments)
    try:
        made.wait_ready()
        yield made
    finally:
        with made.process:  # closes its pipe, however it ended
            made.process.kill()


FREE_PORTS = ("--port", "0", "--grpc-port", "0", "--admin-port", "0", "--threads", "1", "--ddr", "4MiB")

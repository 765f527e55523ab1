"""A server in a process of its own: started, looked at, stopped or killed."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import psutil

from ..data import ROOT

__all__ = ["HOST", "Memory", "ServerProcess"]

HOST: Final = "127.0.0.1"
_READY_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 120.0
_READY: Final = re.compile(r"ready: REST http://[^:]+:(\d+), gRPC [^:]+:(\d+), status http://[^:]+:(\d+)/")


class Memory(NamedTuple):
    """Of a process, in bytes: all that is resident, what of it is no file's, and the most that ever was resident."""

    resident: int
    anonymous: int
    highest: int


class ServerProcess:
    """``tierstore serve`` on ports that are free; ready when this returns.

    Attributes:
        ready_seconds: from the start of the process until it said that it was ready.
    """

    def __init__(self, store: Path, ddr: str, *, log: Path, flags: Sequence[str] = ()) -> None:
        command = [
            sys.executable, "-m", "tierstore", "serve", "--store", str(store), "--ddr", ddr,
            "--port", "0", "--grpc-port", "0", "--admin-port", "0", "--log-level", "warning", *flags,
        ]  # fmt: skip
        self._log = log
        with log.open("a") as errors:
            start = time.perf_counter()
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors)
        try:
            self.rest_port, self.grpc_port, self._admin_port = self._ports()
        except BaseException:
            self.kill()
            raise
        self.ready_seconds = time.perf_counter() - start
        self._watched = psutil.Process(self._process.pid)

    def _ports(self) -> tuple[int, int, int]:
        assert self._process.stdout is not None
        descriptor, text, end = self._process.stdout.fileno(), b"", time.monotonic() + _READY_SECONDS
        while not text.endswith(b"\n"):
            can_read, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            part = os.read(descriptor, 4096) if can_read else b""
            if not part:
                raise RuntimeError(f"the server did not become ready; its log is {self._log}")
            text += part
        found = _READY.search(text.decode())
        if found is None:
            raise RuntimeError(f"the server said {text.decode()!r}")
        return int(found[1]), int(found[2]), int(found[3])

    def status(self) -> dict[str, Any]:
        """Its status.json."""
        with urllib.request.urlopen(f"http://{HOST}:{self._admin_port}/status.json", timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def model(self, name: str) -> dict[str, Any]:
        """One model's part of the status."""
        return next(each for each in self.status()["models"] if each["name"] == name)

    def memory(self) -> Memory:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        sizes = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines)
                 if name in ("VmRSS", "RssAnon", "VmHWM")}  # fmt: skip
        return Memory(sizes["VmRSS"], sizes["RssAnon"], sizes["VmHWM"])

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def device_bytes_read(self) -> int:
        """So far, from the disk itself."""
        return int(self._watched.io_counters().read_bytes)

    def stop(self) -> None:
        """Ask it to stop, and wait; RuntimeError if it fails."""
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(_STOP_SECONDS)
        self._close()
        if status:
            raise RuntimeError(f"the server ended with {status}; its log is {self._log}")

    def kill(self) -> None:
        """End it at once, as a machine's fault would."""
        self._process.kill()
        self._process.wait(_STOP_SECONDS)
        self._close()

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is not None:
            return
        if error is None:
            self.stop()
        else:
            self.kill()

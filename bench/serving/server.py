"""A server in a process of its own."""

import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..child import HOST, Child

__all__ = ["ServerProcess"]

_READY: Final = re.compile(r"ready: REST http://[^:]+:(\d+), gRPC [^:]+:(\d+), status http://[^:]+:(\d+)/")


class ServerProcess(Child):
    """``tierstore serve`` on ports that are free; ready when this returns."""

    needs_signal = True

    def __init__(self, store: Path | str, ddr: object, *, log: Path, flags: Sequence[str] = ()) -> None:
        ports = [word for name in ("port", "grpc-port", "admin-port") for word in (f"--{name}", "0")]
        command = [sys.executable, "-m", "tierstore", "serve", "--store", store, "--ddr", ddr, *ports]
        super().__init__([*command, "--log-level", "warning", *flags], log=log)
        try:
            line = self.line()
            found = _READY.search(line)
            if found is None:
                raise RuntimeError(f"the server said {line!r}")
        except BaseException:
            self.kill()
            raise
        self.rest_port, self.grpc_port, self._admin_port = map(int, found.groups())

    def status(self) -> dict[str, Any]:
        """Its status.json."""
        with urllib.request.urlopen(f"http://{HOST}:{self._admin_port}/status.json", timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

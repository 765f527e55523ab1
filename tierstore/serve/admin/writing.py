"""The replica's writer: a process for each update that is applied and each rollback, one at a time."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from ...errors import TierstoreError
from ...system.excerpt import excerpt

__all__ = ["BusyError", "ReplicaWriter", "WriteError"]

_MAX_OUTPUT_CHARACTERS: Final = 2000


class BusyError(TierstoreError):
    """Another update is being applied."""


class WriteError(TierstoreError):
    """The process failed; the replica is as it was.

    Attributes:
        kind: name of the error's class there; "" if it was ended.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class ReplicaWriter:
    """Runs ``tierstore.updates.child``.

    Args:
        limit_seconds: after which a process is ended; the replica is then as it was.
    """

    def __init__(self, directory: Path, *, limit_seconds: float) -> None:
        self._directory = directory
        self._limit_seconds = limit_seconds
        self._is_busy = False

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    async def apply(self, file: Path, update_id: str) -> dict[str, Any]:
        """See ``updates.Applied``. Raises BusyError, WriteError."""
        return await self._run("apply", str(self._directory), str(file), update_id)

    async def roll_back(self) -> dict[str, Any]:
        """See ``updates.Origin``. Raises BusyError, WriteError."""
        return await self._run("rollback", str(self._directory))

    async def _run(self, *arguments: str) -> dict[str, Any]:
        if self._is_busy:
            raise BusyError("another update is being applied; wait for it to end")
        self._is_busy = True
        try:
            # -P: what lies in the server's working directory is no module of ours.
            command = [sys.executable, "-P", "-m", "tierstore.updates.child", *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment()
            )
            return await self._outcome(process)
        finally:
            self._is_busy = False

    async def _outcome(self, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
        try:
            out, err = await asyncio.to_thread(process.communicate, timeout=self._limit_seconds)
        except subprocess.TimeoutExpired:
            raise WriteError(f"the process that writes took over {self._limit_seconds:.0f} s and was ended") from None
        finally:
            if process.poll() is None:  # it took too long, or nobody waits any more: the server stops
                process.kill()
                process.wait()
        try:
            outcome = json.loads(out.decode().splitlines()[-1])
        except (ValueError, IndexError):
            said = excerpt(err.decode(errors="replace")[-_MAX_OUTPUT_CHARACTERS:], _MAX_OUTPUT_CHARACTERS)
            raise WriteError(f"the process that writes ended with {process.returncode}: {said}") from None
        if not isinstance(outcome, dict) or "error" in outcome:
            raise WriteError(str(outcome["error"]), str(outcome["kind"]))
        return outcome


def _environment() -> dict[str, str]:
    """The package that runs is the one that was imported, however it was found."""
    root = str(Path(__file__).parents[3])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root if not inherited else os.pathsep.join([root, inherited])}

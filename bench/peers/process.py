"""A peer's server, in a process of its own."""

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

__all__ = ["HOST", "PeerServer"]

HOST: Final = "127.0.0.1"
_STOP_SECONDS: Final = 60.0
_TICKS_A_SECOND: Final = 100


class PeerServer:
    """Ends the process when it is closed.

    Attributes:
        process: which this owns from now on.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) << 10

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=_STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

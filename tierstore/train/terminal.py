"""A run at a terminal: its progress bar, Ctrl-C as a request to stop, and the command that starts it again."""

import contextlib
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Final

from tqdm import tqdm

from ..system.processes import launched_rank
from ..system.signals import handlers_restored
from ..system.sizes import format_size
from .history import History

_REFRESH_SECONDS: Final = 0.5
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Progress:
    """Samples/s, mean loss, hit rates and bytes from SSD, on a terminal's stderr; elsewhere only ``say`` writes."""

    def __init__(self, history: History, *, total_rows: int | None, done_rows: int, shown: bool = True) -> None:
        self._history, self._shown, self._next_refresh = history, shown, 0.0
        look = {"unit": " samples", "unit_scale": True, "leave": False, "disable": None if shown else True}
        self._bar: Any = tqdm(total=total_rows, initial=done_rows, **look)

    def step(self, rows: int) -> None:
        now = time.monotonic()
        if not self._bar.disable and now >= self._next_refresh:
            self._next_refresh, stats = now + _REFRESH_SECONDS, self._history.tiers()
            hbm = f"HBM hits {100 * stats.hbm.hit_rate:.1f} %, " if stats.hbm.capacity_rows else ""
            self._bar.set_postfix_str(
                f"loss {self._history.loss:.4f}, {hbm}DDR hits {100 * stats.ddr.hit_rate:.1f} %, "
                f"from SSD {format_size(stats.ssd.bytes_read)}",
                refresh=False,
            )
        self._bar.update(rows)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._shown:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


class StopRequest:
    """While entered, the first SIGINT or SIGTERM sets ``requested``; a second one ends the process as usual. Outside
    the main thread, where Python allows no signal handlers, it never is requested."""

    def __init__(self) -> None:
        self.requested = False
        self._own = contextlib.ExitStack()

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._own.enter_context(handlers_restored(*_SIGNALS))
            for number in _SIGNALS:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._own.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            self._own.close()
            signal.raise_signal(number)
        self.requested = True
        # A plain write: a handler may run in the middle of any other output.
        sys.stderr.write("\nstopping after this step ... (again: stop now, losing what is not committed)\n")


def command_name(ranks: int = 1) -> str:
    """What runs this program again, quoted for a shell: ``tierstore`` if that is on PATH, else this process's Python;
    torchrun where that started it, or for several ranks."""
    if ranks > 1 or launched_rank() is not None:
        size = os.environ.get("WORLD_SIZE", f"{ranks}")
        local = os.environ.get("LOCAL_WORLD_SIZE", size)
        launcher = "torchrun" if shutil.which("torchrun") else f"{python_name()} -m torch.distributed.run"
        return f"{launcher} {f'--nproc-per-node {size}' if local == size else '...'} -m tierstore"
    return "tierstore" if shutil.which("tierstore") else f"{python_name()} -m tierstore"


def python_name() -> str:
    """What runs the Python of this process, quoted for a shell."""
    relative = os.path.relpath(sys.executable)
    is_shorter = os.sep in relative and len(relative) < len(sys.executable)
    return shlex.quote(relative if is_shorter else sys.executable)

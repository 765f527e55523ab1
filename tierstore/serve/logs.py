"""The server's log: one line for each event on stderr, as a JSON object or as text.

What clients send (model names, request ids) is bounded and escaped, so that no client can forge a line or fill the disk
with one request.
"""

import contextlib
import io
import json
import logging
import os
import select
import socket
import stat
import sys
import time
from datetime import UTC, datetime
from typing import Any, Final

from ..system.checks import excerpt
from .messages import InferRequest, ServeError

MAX_VALUE_CHARACTERS: Final = 256
MAX_MESSAGE_CHARACTERS: Final = 4096
MAX_TRACEBACK_CHARACTERS: Final = 16384
MAX_FAILURES_PER_SECOND: Final = 20
"""Lines about failed requests, of each status; what is left out is counted by the next line."""

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"asctime", "color_message", "message", "taskName"}
"""Attributes of a record that are no field of ours; uvicorn adds a message with colours."""

_requests = logging.getLogger("tierstore.serve.requests")


class Formatter(logging.Formatter):
    """An object with time (UTC), level, logger, message, extra fields and exception, as JSON in ASCII or for people."""

    def __init__(self, *, as_json: bool = True) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"time": time, "level": record.levelname, "logger": record.name}
        line["message"] = _cut(record.getMessage(), MAX_MESSAGE_CHARACTERS)
        fields = {
            name: _field(value) for name, value in vars(record).items() if name not in _STANDARD and name not in line
        }
        trace = self.formatException(record.exc_info)[-MAX_TRACEBACK_CHARACTERS:] if record.exc_info else ""
        if self._as_json:
            # Escapes all beyond ASCII, so no character can end the line. NaN would be no JSON.
            return json.dumps(line | fields | ({"exception": trace} if trace else {}), allow_nan=False)
        extra = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        text = f"{time} {record.levelname:<7} {record.name}: {_printable(line['message'])}{extra}"
        return "\n    ".join([text, *map(_printable, trace.splitlines())])


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


def _field(value: object) -> bool | int | float | str | None:
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return _cut(value, MAX_VALUE_CHARACTERS) if isinstance(value, str) else excerpt(value, MAX_VALUE_CHARACTERS)


def _printable(text: str) -> str:
    """The text, with everything escaped that a terminal would obey or show as a new line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _shown(value: object) -> str:
    """A field's value, quoted unless it is one word, so that it cannot be taken for several fields."""
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(" '\"=") else repr(text)


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to today's ``sys.stderr``, if that is the process's own without waiting: lines left out are counted by
    the next."""

    def __init__(self) -> None:
        super().__init__()
        self._unwritten = b""
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        if sys.stderr is None or sys.stderr is not sys.__stderr__:
            super().emit(record)
            return
        try:
            self._push()
            if self._unwritten:
                self._num_lost += 1
                return
            if self._num_lost:
                record.lines_lost = self._num_lost
            self._unwritten = (self.format(record) + self.terminator).encode(errors="backslashreplace")
            self._num_lost = 0
            self._push()
        except Exception:
            self.handleError(record)

    def _push(self) -> None:
        while self._unwritten:
            written = _write_now(sys.stderr.fileno(), self._unwritten)
            self._unwritten = self._unwritten[written:]
            if not written:
                return


def _write_now(descriptor: int, data: bytes) -> int:
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        if kind == stat.S_IFSOCK:
            with socket.socket(fileno=os.dup(descriptor)) as own:
                return own.send(data, socket.MSG_DONTWAIT)
        if kind == stat.S_IFIFO and (again := _opened_again(descriptor)) is not None:
            with again:
                return again.write(data) or 0
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        # A pipe that is ready takes so much, unless another process has written meanwhile.
        return os.write(descriptor, data[: select.PIPE_BUF]) if ready.poll(0) else 0
    return 0


def _opened_again(descriptor: int) -> io.FileIO | None:
    """A pipe opened again, without waits for us alone; None if another user has made it."""
    try:
        return io.FileIO(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb")
    except OSError:
        return None


def configure(level: str | int = "INFO", as_json: bool = True) -> None:
    """Send every log of the process through one handler to stderr. Call it before gRPC is imported, whose core
    writes lines of its own unless GRPC_VERBOSITY keeps it from it. ValueError: no such level."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    root = logging.getLogger()
    root.setLevel(level)
    handler = _StderrHandler()
    handler.setFormatter(Formatter(as_json=as_json))
    root.handlers = [*(each for each in root.handlers if not isinstance(each, _StderrHandler)), handler]
    for name in ("grpc", "uvicorn", "uvicorn.access", "uvicorn.asgi", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


_failures: dict[str, tuple[int, int, int]] = {}
"""By status: the second of the last failure, failures in it, and lines left out since the last one written."""


def _log_failure(status: str, message: str, fields: dict[str, Any]) -> None:
    now = int(time.monotonic())
    second, count, suppressed = _failures.get(status, (now, 0, 0))
    count = count + 1 if second == now else 1
    is_written = count <= MAX_FAILURES_PER_SECOND
    _failures[status] = now, count, 0 if is_written else suppressed + 1
    if is_written:
        _requests.warning("%s", message, extra=fields | ({"suppressed": suppressed} if suppressed else {}))


def log_request(
    request: InferRequest, status: str, seconds: float, *, version: str = "", error: Exception | None = None
) -> None:
    """Log a request that was answered: at DEBUG if "OK", else at WARNING, so many a second, by the name of gRPC's
    status."""
    if status == "OK" and not _requests.isEnabledFor(logging.DEBUG):
        return
    fields = {
        "request_id": request.id,
        "model": request.model,
        "protocol": request.protocol,
        "status": status,
        "milliseconds": round(seconds * 1e3, 3),
        "version": version or request.version,
    }
    if status == "OK":
        _requests.debug("request answered", extra=fields)
    else:
        _log_failure(status, f"request failed: {error}" if error else "request failed", fields)


def log_refused(protocol: str, error: ServeError, request_id: str) -> None:
    """Log a request that could not be read or was not let in; its id is "" if that is not known."""
    fields = {"request_id": request_id} if request_id else {}
    fields |= {"protocol": protocol, "status": error.status.grpc}
    _log_failure(error.status.grpc, f"request refused: {error}", fields)

"""The server's log: one line for each event on stderr, a JSON object.

What clients send (model names, request ids) is bounded and escaped, so that no client can forge a line or fill the disk
with one request.
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import queue
import select
import sys
import time
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Final

from ..system.checks import excerpt
from .messages import InferRequest, ServeError

MAX_VALUE_CHARACTERS: Final = 256
MAX_MESSAGE_CHARACTERS: Final = 4096
MAX_TRACEBACK_CHARACTERS: Final = 16384
MAX_WAITING_BYTES: Final = 1 << 20
"""Of lines that wait to be written; one more may begin below it."""
MAX_FAILURES_PER_SECOND: Final = 20
"""Lines about failed requests, of each status; what is left out is counted by the next line."""

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"asctime", "color_message", "message", "taskName"}
"""Attributes of a record that are no field of ours; uvicorn adds a message with colours."""

_requests = logging.getLogger("tierstore.serve.requests")


class Formatter(logging.Formatter):
    """An object with time (UTC), level, logger, message, extra fields and exception, as JSON in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"time": time, "level": record.levelname, "logger": record.name}
        line["message"] = _cut(record.getMessage(), MAX_MESSAGE_CHARACTERS)
        known = _STANDARD | line.keys()
        line |= {name: _field(value) for name, value in vars(record).items() if name not in known}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-MAX_TRACEBACK_CHARACTERS:]
        # Escapes all beyond ASCII, so no character can end the line. NaN would be no JSON.
        return json.dumps(line, allow_nan=False)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


def _field(value: object) -> bool | int | float | str | None:
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return _cut(value, MAX_VALUE_CHARACTERS) if isinstance(value, str) else excerpt(value, MAX_VALUE_CHARACTERS)


class _Stderr(logging.Handler):
    """Writes to what ``sys.stderr`` is then; to the process's own past its buffer, for whose lock Python waits when it
    ends. ``num_bytes``: of lines that it is done with."""

    num_bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        own: Any = sys.stderr
        with contextlib.suppress(Exception):  # it is closed, or None
            if own is not sys.__stderr__:
                own.write(f"{record.msg}\n")
            left = f"{record.msg}\n".encode() if own is sys.__stderr__ else b""
            while left:
                select.select([], [own], [])
                left = left[os.write(own.fileno(), left) :]
        self.num_bytes += len(record.msg)


class _Handler(QueueHandler):
    """Has a thread write lines to stderr: nobody else waits for whoever reads that. Leaves lines out while too many
    wait; the next one that is written has their number."""

    def __init__(self) -> None:
        # Any allocation may run a finalizer that logs: ``queue.Queue`` would wait for a lock that its caller holds.
        super().__init__(queue.SimpleQueue[logging.LogRecord]())
        self._stderr, self._num_bytes, self._num_lost = _Stderr(), 0, 0
        QueueListener(self.queue, self._stderr).start()
        atexit.register(self.wait)

    def wait(self, seconds: float = 1.0) -> None:
        """Until all that was logged is written, at most so long."""
        end = time.monotonic() + seconds
        while self._stderr.num_bytes < self._num_bytes and time.monotonic() < end:
            time.sleep(0.002)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if self._num_lost:
            record.lines_lost = self._num_lost
        return logging.makeLogRecord({"msg": self.format(record)})  # nothing else of it waits

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._num_bytes - self._stderr.num_bytes >= MAX_WAITING_BYTES:
            self._num_lost += 1
            return
        self._num_bytes, self._num_lost = self._num_bytes + len(record.msg), 0
        super().enqueue(record)


@functools.cache
def _handler() -> _Handler:
    return _Handler()


def flush(seconds: float = 1.0) -> None:
    """Wait until all that was logged is written, at most so long."""
    _handler().wait(seconds)


def configure(level: str | int = "INFO") -> None:
    """Send every log of the process through one handler to stderr. Call it before gRPC is imported, whose core
    writes lines of its own unless GRPC_VERBOSITY keeps it from it. ValueError: no such level."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    root = logging.getLogger()
    root.setLevel(level)
    handler = _handler()
    handler.setFormatter(Formatter())
    root.handlers = [*(each for each in root.handlers if not isinstance(each, _Handler)), handler]
    for name in ("grpc", "uvicorn", "uvicorn.access", "uvicorn.asgi", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


_failures: dict[str, tuple[int, int, int]] = {}
"""By kind: the second of the last failure, failures in it, and lines left out since the last one written."""


def _log_failure(
    kind: str, message: str, fields: dict[str, Any], *, most: int = MAX_FAILURES_PER_SECOND,
    level: int = logging.WARNING, error: BaseException | None = None,
) -> None:  # fmt: skip
    now = int(time.monotonic())
    second, count, suppressed = _failures.get(kind, (now, 0, 0))
    count = count + 1 if second == now else 1
    _failures[kind] = now, count, 0 if count <= most else suppressed + 1
    if count <= most:
        fields |= {"suppressed": suppressed} if suppressed else {}
        _requests.log(level, "%s", message, extra=fields, exc_info=error)


def log_batch_failed(model: str, what: str, error: BaseException) -> None:
    """Log that queries failed, at ERROR, with a traceback, once a second of a model."""
    _log_failure(f"batch of {model}", f"model {model!r}: {what}", {}, most=1, level=logging.ERROR, error=error)


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

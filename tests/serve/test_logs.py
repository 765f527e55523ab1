"""The server's log: what a line has, and what clients cannot do to it."""

import gc
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.serve import logs
from tierstore.serve.logs import Formatter, configure, log_refused, log_request
from tierstore.serve.messages import InferRequest, ServeError, Status

NASTY = 'a\n{"level": "INFO"}\r\x1b[31m\x00\x85\u2028\u202e"\\'
ODD = [float("nan"), float("inf"), np.float32(2.5), 1 << 4000, object(), None, True, 3, 1.5]


@pytest.fixture(autouse=True)
def _restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.setattr(logs, "_failures", {})
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str = "hello", **extra: Any) -> logging.LogRecord:
    return logging.getLogger("tierstore.test").makeRecord(
        "tierstore.test", logging.WARNING, __file__, 1, message, (), None, extra=extra
    )


def request(**options: Any) -> InferRequest:
    return InferRequest(model="m", id="r1", protocol="grpc", inputs={}, **options)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    logs.flush()
    out, err = capsys.readouterr()
    assert not out
    return [json.loads(line) for line in err.splitlines()]


@given(st.text() | st.just(NASTY + "\ud800") | st.just("x" * 100_000), st.sampled_from(ODD))
def test_no_text_and_no_value_breaks_a_line_or_replaces_its_own_fields(text, value):
    made = record(text, model=text, odd=value, others=[text], level="DEBUG", time="never", logger="another")
    made.created = 1.25
    line = Formatter().format(made)
    assert line.isascii()
    assert line.isprintable()
    found = json.loads(line)
    assert {"time": "1970-01-01T00:00:01.250Z", "level": "WARNING", "logger": "tierstore.test"}.items() <= found.items()
    assert "odd" in found
    if value is None or (type(value) in (bool, int, float) and abs(value) < 9):
        assert found["odd"] == value
    if len(text) < 200:
        assert (found["message"], found["model"]) == (text, text)
    assert len(line) < 6 * 6000
    assert len(found["message"]) < 5000
    assert len(found["model"]) < 300


def test_every_logger_writes_to_stderr_at_the_level_asked_for_last(capsys, monkeypatch):
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(sys.stdout))
    monkeypatch.delenv("GRPC_VERBOSITY")
    configure("INFO")
    assert os.environ["GRPC_VERBOSITY"] == "NONE", "its core would write lines that are no JSON"
    for name in ("tierstore.serve", "uvicorn.error", "grpc._cython"):
        logging.getLogger(name).info("hello %s", "you", extra={"color_message": "\x1b[1mhello"})
        logging.getLogger(name).debug("not shown")
        (line,) = lines(capsys)
        assert (line["logger"], line["message"], "color_message" in line) == (name, "hello you", False)
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    configure("DEBUG")
    logging.getLogger("tierstore").debug("hello", extra={"model": "m"})
    (line,) = lines(capsys)
    assert (line["level"], line["message"], line["model"]) == ("DEBUG", "hello", "m")
    with pytest.raises(ValueError, match="LOUD"):
        configure("LOUD")


def test_requests(capsys):
    configure("INFO")
    log_request(request(), "OK", 0.0125, version="7")
    log_request(request(version="6"), "NOT_FOUND", 0.001, error=ServeError(Status.NOT_FOUND, f"no {NASTY}"))
    log_refused("grpc", ServeError(Status.INVALID, "bad"), NASTY)
    failed, refused = lines(capsys)
    assert (failed["level"], failed["status"], failed["version"]) == ("WARNING", "NOT_FOUND", "6")
    assert failed["message"].startswith("request failed: no a\n")
    assert (refused["status"], refused["protocol"], refused["request_id"]) == ("INVALID_ARGUMENT", "grpc", NASTY)
    configure("DEBUG")
    log_request(request(), "OK", 0.0125, version="7")
    (line,) = lines(capsys)
    told = {"level": "DEBUG", "logger": "tierstore.serve.requests", "message": "request answered", "request_id": "r1"}
    told |= {"model": "m", "protocol": "grpc", "status": "OK", "milliseconds": 12.5, "version": "7"}
    assert line == told | {"time": line["time"]}


def test_flood_of_failures_is_thinned(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    configure("INFO")
    for _ in range(50):
        log_request(request(), "RESOURCE_EXHAUSTED", 0.001)
    log_request(request(), "INTERNAL", 0.001)
    assert [line["status"] for line in lines(capsys)] == ["RESOURCE_EXHAUSTED"] * 20 + ["INTERNAL"]
    now = 101.0
    for _ in range(2):
        log_request(request(), "RESOURCE_EXHAUSTED", 0.001)
    assert [line.get("suppressed") for line in lines(capsys)] == [30, None]


def test_of_a_line_that_waits_nothing_but_its_text_is_kept():
    configure()
    assert sum(len(str(value)) for value in vars(logs._handler().prepare(record(model="m" * 10**6))).values()) < 2000


def test_a_finalizer_that_logs_while_a_line_is_put_waits_for_nothing(capsys):
    class Dropped:
        def __del__(self) -> None:
            logging.getLogger("tierstore.test").warning("dropped")

    configure()
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(200):
            dropped = [Dropped()]
            dropped.append(dropped)  # type: ignore[arg-type]
            logging.getLogger("tierstore.test").warning("%d", number)
    finally:
        gc.set_threshold(*before)
    del dropped
    gc.collect()
    assert sorted(line["message"] for line in lines(capsys)) == sorted([*map(str, range(200)), *["dropped"] * 200])


def test_a_log_that_nobody_reads_is_not_waited_for(monkeypatch):
    """Lines are left out, none is torn, and the next one that is written says how many."""
    reader, writer = os.pipe()
    data, is_read = b"", False

    def read() -> None:
        nonlocal data
        while not is_read or select.select([reader], [], [], 0)[0]:
            data += os.read(reader, 1 << 20) if select.select([reader], [], [], 0.01)[0] else b""

    with open(reader, "rb"), open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "__stderr__", stream)
        configure()
        log = logging.getLogger("tierstore.test")
        for number in range(3000):
            log.warning("%d %s", number, "x" * (number % 4000), extra={"model": "m" * 10**5})
        (thread := threading.Thread(target=read)).start()
        logs.flush(60)
        log.warning("3000 last")
        logs.flush(60)
        is_read = True
        thread.join()
    found = [json.loads(line) for line in data.splitlines()]
    numbers = [int(line["message"].split()[0]) for line in found]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 3000
    assert sum(line.get("lines_lost", 0) for line in found) == 3001 - len(numbers) > 0

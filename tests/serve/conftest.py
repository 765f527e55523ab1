"""What a session makes once: a process that writes replicas, as to start one takes seconds, and a certificate."""

import json
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.following import Child
from tests.serve.whole import make_certificate
from tierstore.serve.admin import updates as admin_updates
from tierstore.serve.tls import Tls

WRITER = """
import json, sys
from tierstore.updates.child import main
for line in sys.stdin:
    main(json.loads(line))
"""


@pytest.fixture(scope="session")
def writing_child() -> Iterator[Child]:
    child = Child(WRITER)
    yield child
    child.end()


@pytest.fixture
def warm_writer(writing_child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have replicas written by it, and not by a process for each update. ``monkeypatch.undo`` brings those back."""

    turn = threading.Lock()  # of several servers

    class Popen:
        returncode = 0

        def __init__(self, command: list[str], **_: Any) -> None:
            assert command[2:4] == ["-m", "tierstore.updates.child"]
            self._arguments = command[4:]

        def communicate(self, timeout: float) -> tuple[bytes, bytes]:
            with turn:
                return writing_child.ask(json.dumps(self._arguments)).encode(), b""

        def kill(self) -> None: ...

        def wait(self) -> None: ...

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    monkeypatch.setattr(admin_updates, "subprocess", SimpleNamespace(Popen=Popen, **names))


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """For localhost and 127.0.0.1, signed by its own key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    try:
        make_certificate("localhost", certificate, key, "-nodes", "-addext", names)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    return Tls(certificate, key)

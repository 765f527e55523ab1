"""What a session makes once: a process that writes replicas, as to start one takes seconds; a run; a certificate."""

import threading
from collections.abc import Iterator

import pytest

from tests.following import WRITER, Child
from tests.serve.whole import make_certificate
from tests.train.runs import config_of
from tierstore.serve.credentials import Tls
from tierstore.serve.replica import Writer
from tierstore.train import train
from tierstore.train.config import RunConfig


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def writing_child() -> Iterator[Child]:
    child = Child(WRITER)
    yield child
    child.end()


@pytest.fixture
def warm_writer(writing_child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have replicas written by it, and not by a process for each. ``monkeypatch.undo`` brings those back."""
    turn = threading.Lock()  # of several servers

    def exchange(_: Writer, line: str) -> str:
        with turn:
            return writing_child.ask(line)

    monkeypatch.setattr(Writer, "start", lambda _: None)
    monkeypatch.setattr(Writer, "_exchange", exchange)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Of a small run that is done; tests commit more versions to its store."""
    config = config_of(tmp_path_factory.mktemp("run"), "store", train__epochs=1, store__keep=4, store__threads=1)
    train(config)
    return config


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    try:
        make_certificate("localhost", certificate, key, "-nodes", "-addext", names)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    return Tls(certificate, key)

"""Fixtures and settings of the whole suite."""

import enum
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from bench.data import find_criteo
from tests.children import make_store
from tests.following import DIM, ROWS, Writer
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.system import killpoints

hypothesis.settings.register_profile(
    "quick",
    # The same examples each time, and no verdict by the clock: a first example compiles kernels.
    derandomize=True,
    deadline=None,
    max_examples=50 if JIT_ENABLED else 20,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def _refuse_members_of_enums() -> None:
    """As kernels' arguments: numba looks at the whole enum at each call, 150 us, and compiles the kernel once more."""
    from numba.core.typing import typeof

    plain: Any = typeof.typeof_impl.dispatch(enum.IntEnum)

    def checked(value: Any, context: Any) -> Any:
        assert context.purpose is not typeof.Purpose.argument, f"a kernel is given {value!r}: give int(...)"
        return plain(value, context)

    typeof.typeof_impl.register(enum.Enum, checked)
    typeof.typeof_impl.register(enum.IntEnum, checked)


def pytest_configure(config: pytest.Config) -> None:
    if JIT_ENABLED:
        _refuse_members_of_enums()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    if not JIT_ENABLED:
        # Hashes wrap around by intent: machine code does so in silence, numpy's scalars warn.
        config.addinivalue_line("filterwarnings", "ignore:overflow encountered in scalar:RuntimeWarning")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """No test leaves another handler of Ctrl-C behind: a later one may wait for a KeyboardInterrupt."""
    yield
    left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert getattr(left, "handler", left) is signal.default_int_handler, f"{left} is left as handler of SIGINT"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # whoever gets one last would keep all others waiting
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What stands by now stays: a collection, of which tests ask for hundreds, need not walk through it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def criteo_path() -> Path:
    """The 80,000 real rows of Criteo that the project's figures are about; they are not part of the project."""
    return find_criteo() or pytest.skip("no real Criteo file: set TIERSTORE_CRITEO to criteo_80k.tsv.gz")


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    """A directory that does not exist yet, for a store."""
    return tmp_path / "store"


@pytest.fixture
def store(store_dir: Path) -> Path:
    make_store(store_dir)
    return store_dir


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Gate:
    """Stops the commit thread at a point until it is let go."""

    def __init__(self) -> None:
        self.point = ""
        self.reached, self.go_on = threading.Event(), threading.Event()

    def close(self, point: str) -> None:
        self.point = point
        self.reached.clear()
        self.go_on.clear()

    def hook(self, name: str) -> None:
        if name == self.point and threading.current_thread().name.startswith("tierstore-commit"):
            self.reached.set()
            assert self.go_on.wait(60)

    def open(self) -> None:
        self.point = ""
        self.go_on.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Before the thread of the commits of a store."""
    gate = Gate()
    monkeypatch.setattr(killpoints, "hook", gate.hook)
    yield gate
    gate.open()


@pytest.fixture(scope="session")
def writer_process() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.end()


@pytest.fixture
def writer(writer_process: Writer, store_dir: Path) -> Iterator[Writer]:
    """It has ``store_dir`` open: table "t", every other row written, one version."""
    writer_process("open", str(store_dir))
    writer_process("create", "t", ROWS, DIM)
    writer_process("write", "t", list(range(0, ROWS, 2)), 1)
    writer_process("commit", 1)
    yield writer_process
    writer_process("close")

"""Shielded functions: which handlers wait, and that none is lost, whatever interrupts their first and last steps; and
flags, which handlers may set."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.children import run
from tests.faults.cuts import Cutter
from tierstore.system import signals
from tierstore.system.signals import Flag, shielded

NUMBERS = (signal.SIGUSR1, signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM, signal.SIGRTMIN + 3)


@pytest.fixture
def ran() -> Iterator[list[int]]:
    ran: list[int] = []

    def handle(number: int, _frame: object) -> None:
        ran.append(number)

    before = {number: signal.signal(number, handle) for number in NUMBERS}
    yield ran
    for number, handler in before.items():
        signal.signal(number, handler)


@shielded
def raise_signals(*numbers: int) -> None:
    for number in numbers:
        signal.raise_signal(number)


def test_every_handler_in_python_waits_for_the_outermost_call(ran: list[int]) -> None:
    """Those behind one that raises run too."""
    handlers = list(map(signal.getsignal, NUMBERS))

    @shielded
    def outer() -> None:
        raise_signals(*NUMBERS)
        assert ran == []

    outer()
    assert ran == list(NUMBERS)
    assert list(map(signal.getsignal, NUMBERS)) == handlers
    ran.clear()

    def fail(number: int, _frame: object) -> None:
        ran.append(number)
        raise RuntimeError(f"signal {number}")

    first, second, third = NUMBERS[:3]
    signal.signal(first, fail)
    signal.signal(second, fail)
    with pytest.raises(RuntimeError, match=f"signal {int(second)}") as caught:
        raise_signals(first, second, third)
    assert str(caught.value.__context__) == f"signal {int(first)}"
    assert ran == [first, second, third]


def test_a_handler_that_is_set_within_stays(ran: list[int]) -> None:
    waiting = shielded(signal.signal)(NUMBERS[0], signal.SIG_IGN)
    assert signal.getsignal(NUMBERS[0]) is signal.SIG_IGN
    signal.signal(NUMBERS[0], waiting)  # as a library does that sets a handler for a while
    signal.raise_signal(NUMBERS[0])
    raise_signals(NUMBERS[0])
    assert ran == [NUMBERS[0]] * 2
    assert type(signal.getsignal(NUMBERS[0])) is not type(waiting)


def test_another_thread_defers_nothing(ran: list[int]) -> None:
    entered, leave = threading.Event(), threading.Event()

    @shielded
    def wait() -> None:
        entered.set()
        leave.wait(30)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(30)
    signal.raise_signal(NUMBERS[0])
    assert ran == [NUMBERS[0]]
    leave.set()
    thread.join()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python ignores what is raised where it tells of the garbage collector, which may run at any instant."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", ["signal", "memory"])
def test_no_instant_loses_a_signal(ran: list[int], kind: str) -> None:
    cutter, calls = Cutter(), 0

    @shielded
    def call() -> Any:
        nonlocal calls
        calls += 1
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGCHLD)

    instants = 0
    with cutter.installed():
        handlers = list(map(signal.getsignal, NUMBERS))
        while True:
            calls = 0
            ran.clear()
            signals._MAIN.handlers = ()  # all of them are looked at again
            seen, error = cutter.run(call, kind=kind, instant=instants + 1, in_main=True)
            if not seen > instants:
                break
            instants += 1
            assert error is not None or kind == "signal", cutter.place
            assert not signals._MAIN.is_shielded, cutter.place
            signal.raise_signal(signal.SIGTERM)
            raise_signals()
            expected = [signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM] if calls else [signal.SIGTERM]
            # A handler that cannot wait for want of memory says so in its place.
            is_right = sorted(ran) == sorted(expected) if kind == "signal" else signal.SIGTERM in ran
            assert is_right, (ran, cutter.place)
            assert list(map(signal.getsignal, NUMBERS)) == handlers, cutter.place
    assert instants > 10


def test_a_process_ends_with_its_parent_however_that_ends() -> None:
    said = run(
        """
        from tierstore.system.signals import end_with

        reader, writer = os.pipe()
        parent = os.fork()
        if not parent:
            this = os.getpid()
            if not os.fork():
                end_with(this)
                os.write(writer, b"+")
                time.sleep(100)
            time.sleep(100)
        os.close(writer)
        assert os.read(reader, 1) == b"+"
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        print(os.read(reader, 1))  # of a pipe that nobody has open
        """
    )
    assert said == "b''\n"


def test_a_wait_ends_when_it_is_set_and_not_by_what_was_set_before() -> None:
    flag, woken = Flag(), list[bool]()
    for _ in range(3):
        flag.set()
    flag.clear()
    assert not flag.wait(0.02)
    threads = [threading.Thread(target=lambda: woken.append(flag.wait(60.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    assert not woken
    flag.set()
    for thread in threads:
        thread.join(30)
    assert woken == [True] * 4
    assert flag.wait(60.0)


def test_a_handler_may_set_it() -> None:
    """Whichever call of it the signal comes in."""
    flag, handled = Flag(), 0

    def handle(*_: object) -> None:
        nonlocal handled
        flag.set()
        handled += 1

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        while handled < 100:
            flag.set()
            flag.clear()
            flag.wait(0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        flag.clear()
        flag.wait(60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled >= 100

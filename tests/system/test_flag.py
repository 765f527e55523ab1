"""A flag wakes who waits, and is itself in signal handlers."""

import signal
import threading
import time

from tierstore.system.signals import Flag


def test_a_wait_ends_when_it_is_set_and_not_by_what_was_set_before() -> None:
    flag = Flag()
    for _ in range(3):
        flag.set()
    flag.clear()
    started = time.monotonic()
    assert not flag.wait(0.05)
    assert time.monotonic() - started >= 0.05
    thread = threading.Thread(target=flag.wait, args=(60.0,))
    thread.start()
    flag.set()
    thread.join(30)
    assert not thread.is_alive()
    assert flag.wait(60.0)


def test_all_who_wait_are_woken() -> None:
    flag, woken = Flag(), list[bool]()
    threads = [threading.Thread(target=lambda: woken.append(flag.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    flag.set()
    for thread in threads:
        thread.join(30)
    assert woken == [True] * 4


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
        while handled < 500:
            flag.set()
            flag.clear()
            flag.wait(0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        flag.clear()
        flag.wait(60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled >= 500

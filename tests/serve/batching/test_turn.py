"""Whose batch runs: one at a time, and others while it pauses."""

import threading
from contextlib import suppress

from tierstore.serve.batching import between


def test_batches_take_turns_and_others_run_while_one_pauses() -> None:
    turn, ran = threading.Lock(), list[str]()
    has_begun, may_pause = threading.Event(), threading.Event()

    def other() -> None:
        assert has_begun.wait(5)
        may_pause.set()
        with turn:
            ran.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with turn:
        has_begun.set()
        assert may_pause.wait(5)
        thread.join(0.05)
        ran.append("part")
        between(turn, thread.join)()
        ran.append("part")
    assert ran == ["part", "other", "part"]


def test_a_pause_that_fails_keeps_the_turn_until_its_batch_ends() -> None:
    turn = threading.Lock()

    def fail() -> None:
        raise ValueError

    with suppress(ValueError), turn:
        between(turn, fail)()
    with turn:
        assert not turn.acquire(blocking=False)

"""Whose batch runs: one at a time, and others while it pauses."""

import threading

from tierstore.serve.batching import Turn


def test_batches_take_turns_and_others_run_while_one_pauses() -> None:
    turn, ran = Turn(), list[str]()
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
        turn.between(thread.join)()
        ran.append("part")
    assert ran == ["part", "other", "part"]


def test_a_pause_that_fails_keeps_the_turn_until_its_batch_ends() -> None:
    turn = Turn()

    def fail() -> None:
        raise ValueError

    try:
        with turn:
            turn.between(fail)()
    except ValueError:
        pass
    with turn:
        assert not turn._lock.acquire(blocking=False)

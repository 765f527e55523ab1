"""Large answers are encoded beside the event loop, and no longer than somebody waits for them."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from tierstore.serve.encoding import LARGE_ELEMENTS, PIECE_ELEMENTS, Encoders, Pause, go_on, pieces_of

SECONDS = 20.0
LARGE = LARGE_ELEMENTS + 1


class Held:
    """Work that waits, in whatever thread, and then goes through its pauses until it is told to end."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        self.ended = threading.Event()
        self.went_on = False

    def __call__(self, pause: Pause) -> str:
        try:
            self.began.set()
            assert self.may_go_on.wait(SECONDS), "the loop went on only when this ended"
            pause()
            self.went_on = True
            return "done"
        finally:
            self.ended.set()


async def until(event: threading.Event) -> None:
    """Timers in the loop fire, over and over, until it is set."""
    async with asyncio.timeout(SECONDS):
        while not event.is_set():
            await asyncio.sleep(0.001)


def test_the_loop_goes_on_while_a_large_answer_is_encoded() -> None:
    async def check() -> None:
        work = Held()
        encoding = asyncio.create_task(Encoders().encode(work, LARGE))
        await until(work.began)
        await asyncio.sleep(0.001)
        assert not encoding.done()
        work.may_go_on.set()
        assert await encoding == "done"

    asyncio.run(check())


def test_a_small_answer_is_encoded_at_once() -> None:
    async def check() -> None:
        here = threading.get_ident()
        assert await Encoders().encode(lambda _: threading.get_ident(), LARGE_ELEMENTS) == here
        assert await Encoders().encode(lambda _: threading.get_ident(), LARGE) != here

    asyncio.run(check())


def test_cancelled_work_ends_at_its_next_pause_and_counts_until_then() -> None:
    async def check() -> None:
        encoders, given_up = Encoders(), [Held(), Held()]
        tasks = [asyncio.create_task(encoders.encode(work, LARGE)) for work in given_up]
        for work in given_up:
            await until(work.began)
        for task in tasks:
            task.cancel()
        assert await asyncio.gather(*tasks, return_exceptions=True) != ["done", "done"]
        later = Held()
        later.may_go_on.set()
        waiting = asyncio.create_task(encoders.encode(later, LARGE))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not later.began.is_set(), "the threads of the cancelled ones still work"
        for work in given_up:
            work.may_go_on.set()
            await until(work.ended)
            assert not work.went_on
        assert await asyncio.wait_for(waiting, SECONDS) == "done"

    asyncio.run(check())


def test_who_is_cancelled_while_waiting_for_a_place_takes_none() -> None:
    async def check() -> None:
        encoders, running = Encoders(), [Held(), Held()]
        tasks = [asyncio.create_task(encoders.encode(work, LARGE)) for work in running]
        for work in running:
            await until(work.began)
        never = Held()
        waiting = asyncio.create_task(encoders.encode(never, LARGE))
        await asyncio.sleep(0)
        waiting.cancel()
        for work in running:
            work.may_go_on.set()
        assert await asyncio.gather(*tasks) == ["done", "done"]
        assert await encoders.encode(lambda _: "next", LARGE) == "next"
        assert waiting.cancelled()
        assert not never.began.is_set()

    asyncio.run(check())


def test_errors_come_back() -> None:
    def fail(_: Pause) -> Any:
        raise ValueError("not to be encoded")

    async def check() -> None:
        encoders = Encoders()
        for _ in range(3):
            with pytest.raises(ValueError, match="not to be encoded"):
                await encoders.encode(fail, LARGE)

    asyncio.run(check())


@pytest.mark.parametrize("size", [0, 1, PIECE_ELEMENTS, PIECE_ELEMENTS + 1, 3 * PIECE_ELEMENTS])
def test_pieces_are_all_of_it_with_a_pause_before_each(size: int) -> None:
    pauses: list[None] = []
    flat = np.arange(size)
    found = list(pieces_of(flat, lambda: pauses.append(None)))
    assert len(pauses) == len(found) == -(-size // PIECE_ELEMENTS)
    assert np.concatenate([flat[:0], *found]).tolist() == flat.tolist()
    assert all(len(piece) <= PIECE_ELEMENTS for piece in pieces_of(flat, go_on))

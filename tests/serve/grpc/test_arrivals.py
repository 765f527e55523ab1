"""Places for what is arriving: who gets one, who loses one, who waits."""

import asyncio
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.serve.stepping import SteppedLoop
from tierstore.serve.grpc import arrivals
from tierstore.serve.grpc.arrivals import Arrivals
from tierstore.serve.messages import ServeError, Status

ACTIONS = st.lists(st.tuples(st.sampled_from(["begin", "arrive", "wait", "leave"]), st.integers(0, 5)), max_size=60)


@given(ACTIONS, st.sampled_from([3, 8]), st.integers(0, 12))
def test_no_more_arrive_than_there_are_places_and_no_connection_keeps_another_out(
    actions: list[tuple[str, int]], num_places: int, num_first: int
) -> None:
    """Connection 0 is the one that begins most calls; the others have few."""
    loop = SteppedLoop()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arrivals.time, "monotonic", loop.time)
        places = Arrivals(num_places)
        reading: list[asyncio.Future[str]] = []
        calls: list[tuple[str, asyncio.Task[Any]]] = []

        async def read() -> str:
            future = loop.create_future()
            reading.append(future)
            try:
                return await future
            finally:
                reading.remove(future)

        def begin(peer: str) -> asyncio.Task[Any]:
            task = loop.create_task(places.receive(read, peer, 30, "nothing came within"))
            calls.append((peer, task))
            loop.settle()
            return task

        for action, number in [("begin", 1)] * num_first + actions:
            if action == "begin":
                begin("many" if number else f"few {len(calls)}")
            elif action == "arrive" and reading:
                reading[number % len(reading)].set_result("whole")
            elif action == "leave" and calls:
                calls[number % len(calls)][1].cancel()
            else:
                loop.advance(0.015)
            loop.settle()
            assert len(reading) <= num_places
            assert len(places._held.get("many", ())) <= num_places - num_places // 8
            assert places._num_held == sum(map(len, places._held.values())) == len(reading)
            for peer in places._waiting.values():
                assert len(reading) >= num_places - (num_places // 8 if peer in places._held else 0)
        honest = begin("honest")
        loop.advance(0.1)
        loop.advance(0.1)
        if not honest.done():
            held = {peer: len(each) for peer, each in places._held.items()}
            assert "honest" in held or max(held.values()) == 1, held
        for _, task in calls:
            task.cancel()
        loop.settle()
        assert (reading, places._num_held, places._held, len(places._waiting)) == ([], 0, {}, 0)
        for _, task in calls:
            if not task.cancelled() and task.exception() is not None:
                error = task.exception()
                assert isinstance(error, ServeError)
                assert error.status is Status.OVERLOADED
    loop.close()


def test_what_does_not_come_in_time_is_given_up() -> None:
    async def main() -> None:
        with pytest.raises(ServeError, match=r"nothing came within 0\.01 seconds") as caught:
            await Arrivals(1).receive(asyncio.Event().wait, "peer", 0.01, "nothing came within")
        assert caught.value.status is Status.DEADLINE

    asyncio.run(main())

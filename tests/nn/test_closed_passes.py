"""Passes over batches that end early: who is told, what is taken, and what is released."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.nn.test_prefetch import batch, make_collection, prefetch_threads


class _OfRanks:
    """What the pipeline needs of a module that tells other ranks when a pass ends."""

    is_collective = True

    def __init__(self) -> None:
        self.ended_in: list[str] = []

    def ahead(self) -> "_OfRanks":
        return self

    def begin(self, batches: Any) -> Iterator[Any]:
        return iter(batches)

    def end(self) -> None:
        self.ended_in.append(threading.current_thread().name)

    def prepare(self, features: Any) -> object:
        return features

    def has_room(self, ticket: object) -> bool:
        return True

    def bring_in(self, ticket: object) -> bool:
        return True

    def forget(self, ticket: object) -> None:
        pass


@pytest.mark.parametrize("is_slow", [False, True])
def test_other_ranks_are_told_once_of_a_pass_that_is_over(is_slow: bool) -> None:
    """Also one that was closed while its thread was in the source."""
    module, waits, goes_on = _OfRanks(), threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield from range(2)
        if is_slow:
            waits.set()
            goes_on.wait(30)
        yield from range(8)

    pipeline = tierstore.prefetch(source(), module, depth=2, features=lambda number: number)
    next(pipeline)
    assert not is_slow or waits.wait(30)
    pipeline.close()
    goes_on.set()
    for thread in prefetch_threads():
        thread.join(30)
    assert module.ended_in == ["tierstore-prefetch"]


def test_a_pass_that_was_closed_while_it_waited_for_another_takes_no_batch(store_dir: Path) -> None:
    waits, goes_on = threading.Event(), threading.Event()

    class Source:
        number = 0

        def __iter__(self) -> "Source":
            return self

        def __next__(self) -> Any:
            self.number += 1
            if self.number == 2:
                waits.set()
                goes_on.wait(30)
            return batch(self.number)

    source = Source()
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        first = tierstore.prefetch(source, collection, depth=1)
        next(first)
        assert waits.wait(30)
        first.close()
        second = tierstore.prefetch(source, collection, depth=1)
        interrupt = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            next(second)
        second.close()
        goes_on.set()
        for thread in prefetch_threads():
            thread.join(30)
        assert source.number == 2

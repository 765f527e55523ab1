"""The prefetch pipeline: rows of later batches are read while this batch computes."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, NamedTuple, Protocol, TypeVar

__all__ = ["Preparable", "prefetch"]

Batch = TypeVar("Batch")
_POLL_SECONDS: Final = 0.1
_JOIN_SECONDS: Final = 30.0


class Preparable(Protocol):
    """A module whose rows can be brought in ahead: ``TieredEmbeddingBag``, ``TieredEmbeddingBagCollection``."""

    def prepare(self, features: Any) -> Any:
        """Bring rows in for the forward call that will be given ``features``; returns a ticket."""

    def forget(self, ticket: Any) -> None:
        """Release what that ticket stands for, if no forward took it."""

    def announce(self, features: Any) -> "Retirable | None":
        """Tell the caches that the rows of ``features`` will be used, after those announced before; None if there is
        no room for that yet."""


class Retirable(Protocol):
    """A batch that caches were told of."""

    def retire(self) -> None:
        """It is in use, or will never be."""


class _Ready(NamedTuple):
    batch: Any
    ticket: Any


class _Failed(NamedTuple):
    error: BaseException


class _End(NamedTuple):
    pass


def default_features(batch: Any) -> Any:
    """A batch's jagged ids: the batch itself if it has ``offsets()``, else its ``sparse`` or ``sparse_features``."""
    if callable(getattr(batch, "offsets", None)):
        return batch
    for name in ("sparse", "sparse_features"):
        if hasattr(batch, name):
            return getattr(batch, name)
    raise TypeError(
        f"cannot tell where a {type(batch).__name__} keeps its jagged ids; pass features=, a function from batch to ids"
    )


def prefetch(
    batches: Iterable[Batch],
    module: Preparable,
    *,
    depth: int = 2,
    lookahead: int = 0,
    features: Callable[[Batch], Any] | None = None,
) -> Generator[Batch, None, None]:
    """Iterate over ``batches`` while a thread reads ahead and brings the rows of up to ``depth`` later batches in.

    Closing the generator (``contextlib.closing``, or its end) ends the thread and releases what was not used.
    Results are the same bits for every depth: rows are brought in early, but read and updated in the order of
    the steps. Rows that do not fit beside those in use are brought in when their batch comes.

    With ``lookahead`` the reader is that many batches further ahead, and a store opened with policy="lookahead" learns
    which rows they use, so that it evicts those whose next use is farthest. The batches wait in memory, those that the
    store has no room to remember excepted: they are not read before it has. Other policies make nothing of it.

    Args:
        batches: consumed by the thread (by the caller's with depth=0); never more than ``depth + lookahead + 1`` ahead.
            Batches that are read ahead must not share memory: a reader that reuses a buffer has to copy it.
        module: its ``forward`` must be given the very object that ``features`` returned.
        depth: batches brought in ahead; 0 is a plain loop without a thread.
        lookahead: batches announced ahead of those.
        features: how to get a batch's jagged ids.

    Raises:
        ValueError: depth or lookahead is negative. Whatever ``batches``, ``features`` or the reading of rows raised,
        when the batch that it happened to is asked for; batches before it are yielded first, and the store stays
            usable.
    """
    for name, value in (("depth", depth), ("lookahead", lookahead)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}={value!r} must be an int, 0 or more")
    get_features = default_features if features is None else features
    if depth == 0:
        return _plain(batches, module, lookahead, get_features)
    return _pipeline(batches, module, depth, lookahead, get_features)


def _plain(
    batches: Iterable[Any], module: Preparable, lookahead: int, get_features: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    if not lookahead:
        yield from batches
        return
    with contextlib.closing(_look_ahead(batches, module, lookahead, get_features)) as ahead:
        for item in ahead:
            yield item.batch


class _Ahead(NamedTuple):
    batch: Any
    features: Any
    announced: "Retirable | None"


class _Reader:
    """Reads batches and announces each, in order.

    What a batch raised, when it was read or announced, is kept for its turn: ``error``, after the batches before it.
    """

    def __init__(self, batches: Iterable[Any], module: Preparable, get_features: Callable[[Any], Any]) -> None:
        self._batches = iter(batches)
        self._module = module
        self._get_features = get_features
        self._waiting: list[_Ahead] = []
        self.error: BaseException | None = None
        self.ended = False

    def next(self, *, must: bool) -> _Ahead | None:
        """The next batch, announced; None at the end, and unless ``must`` if the caches have no room for it yet."""
        try:
            if not self._waiting:
                batch = next(self._batches)
                self._waiting.append(_Ahead(batch, self._get_features(batch), None))
            item = self._waiting[0]
            announced = self._module.announce(item.features)
        except StopIteration:
            self.ended = True
            return None
        except BaseException as error:
            self.error, self.ended = error, True
            return None
        if announced is None and not must:
            return None
        self._waiting.clear()
        return item._replace(announced=announced)


def _look_ahead(
    batches: Iterable[Any], module: Preparable, lookahead: int, get_features: Callable[[Any], Any]
) -> Generator[_Ahead, None, None]:
    """Yield each batch while up to ``lookahead`` after it are announced; it is retired when the next is asked for."""
    reader = _Reader(batches, module, get_features)
    window: deque[_Ahead] = deque()
    try:
        while True:
            while not reader.ended and len(window) <= lookahead:
                item = reader.next(must=not window)
                if item is None:
                    break
                window.append(item)
            if not window:
                break
            yield window[0]
            _retire(window.popleft())
        if reader.error is not None:
            raise reader.error
    finally:
        for item in window:
            _retire(item)


def _retire(item: _Ahead) -> None:
    if item.announced is not None:
        item.announced.retire()


def _pipeline(
    batches: Iterable[Any], module: Preparable, depth: int, lookahead: int, get_features: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    ready: queue.Queue[_Ready | _Failed | _End] = queue.Queue(depth)
    stop = threading.Event()
    worker = threading.Thread(
        target=_fill,
        args=(batches, module, lookahead, get_features, ready, stop),
        name="tierstore-prefetch",
        daemon=True,
    )
    worker.start()
    ticket = None
    try:
        while True:
            item = _take(ready, worker)
            if isinstance(item, _End):
                return
            if isinstance(item, _Failed):
                raise item.error
            ticket = item.ticket
            yield item.batch
            module.forget(ticket)
            ticket = None
    finally:
        stop.set()
        # A bound, for a generator that the garbage collector ends in the middle of anything.
        worker.join(_JOIN_SECONDS)
        if ticket is not None:
            module.forget(ticket)
        while not ready.empty():
            item = ready.get_nowait()
            if isinstance(item, _Ready):
                module.forget(item.ticket)


def _take(ready: "queue.Queue[Any]", worker: threading.Thread) -> Any:
    while True:
        try:
            return ready.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if not worker.is_alive() and ready.empty():
                raise RuntimeError("the prefetch thread died without a word") from None


def _fill(
    batches: Iterable[Any],
    module: Preparable,
    lookahead: int,
    get_features: Callable[[Any], Any],
    ready: "queue.Queue[_Ready | _Failed | _End]",
    stop: threading.Event,
) -> None:
    """Body of the thread: read a batch, bring its rows in, hand it over; end with an error or the end."""
    try:
        with contextlib.closing(_with_features(batches, module, lookahead, get_features)) as ahead:
            for item in ahead:
                if stop.is_set():
                    return
                ticket = module.prepare(item.features)
                if not _put(ready, _Ready(item.batch, ticket), stop):
                    module.forget(ticket)
                    return
        _put(ready, _End(), stop)
    except BaseException as error:
        _put(ready, _Failed(error), stop)


def _with_features(
    batches: Iterable[Any], module: Preparable, lookahead: int, get_features: Callable[[Any], Any]
) -> Generator[_Ahead, None, None]:
    if lookahead:
        yield from _look_ahead(batches, module, lookahead, get_features)
    else:
        for batch in batches:
            yield _Ahead(batch, get_features(batch), None)


def _put(ready: "queue.Queue[_Ready | _Failed | _End]", item: _Ready | _Failed | _End, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False

"""The prefetch pipeline: rows of later batches are read while this batch computes."""

import queue
import threading
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
    features: Callable[[Batch], Any] | None = None,
) -> Generator[Batch, None, None]:
    """Iterate over ``batches`` while a thread reads ahead and brings the rows of up to ``depth`` later batches in.

    Closing the generator (``contextlib.closing``, or its end) ends the thread and releases what was not used.
    Results are the same bits for every depth: rows are brought in early, but read and updated in the order of
    the steps. Rows that do not fit beside those in use are brought in when their batch comes.

    Args:
        batches: consumed by the thread (by the caller's with depth=0); never more than ``depth + 1`` ahead.
        module: its ``forward`` must be given the very object that ``features`` returned.
        depth: batches brought in ahead; 0 is a plain loop without a thread.
        features: how to get a batch's jagged ids.

    Raises:
        ValueError: depth is negative. Whatever ``batches``, ``features`` or the reading of rows raised, when the
        batch that it happened to is asked for; batches before it are yielded first, and the store stays usable.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth={depth!r} must be an int, 0 or more")
    get_features = default_features if features is None else features
    if depth == 0:
        return _plain(batches)
    return _pipeline(batches, module, depth, get_features)


def _plain(batches: Iterable[Any]) -> Generator[Any, None, None]:
    yield from batches


def _pipeline(
    batches: Iterable[Any], module: Preparable, depth: int, get_features: Callable[[Any], Any]
) -> Generator[Any, None, None]:
    ready: queue.Queue[_Ready | _Failed | _End] = queue.Queue(depth)
    stop = threading.Event()
    worker = threading.Thread(
        target=_fill, args=(batches, module, get_features, ready, stop), name="tierstore-prefetch", daemon=True
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
    get_features: Callable[[Any], Any],
    ready: "queue.Queue[_Ready | _Failed | _End]",
    stop: threading.Event,
) -> None:
    """Body of the thread: read a batch, bring its rows in, hand it over; end with an error or the end."""
    try:
        for batch in batches:
            if stop.is_set():
                return
            ticket = module.prepare(get_features(batch))
            if not _put(ready, _Ready(batch, ticket), stop):
                module.forget(ticket)
                return
        _put(ready, _End(), stop)
    except BaseException as error:
        _put(ready, _Failed(error), stop)


def _put(ready: "queue.Queue[_Ready | _Failed | _End]", item: _Ready | _Failed | _End, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False

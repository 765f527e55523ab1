"""The prefetch pipeline: rows of later batches are read while this batch computes."""

import contextlib
import copy
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar

from torch import Tensor

from ..system.dropped import ClosedWhenDropped, settle
from ..system.processes import disown_in_forks, require_own
from ..system.signals import Flag, shielded
from .choice import AUTO_DEPTH, Choice
from .preparable import Modules

Batch = TypeVar("Batch")
_Item = tuple[()] | tuple[Any, Any] | BaseException
"""A batch and the source's position, nothing at the end, or what went wrong."""
_NO_MORE: Final = object()
_POLL_SECONDS: Final = 0.1
_JOIN_SECONDS: Final = 30.0
_READ_SECONDS: Final = 0.005
"""What takes longer to be read is read while other batches are used."""
_LEFT: Final[dict[int, Flag]] = {}
"""Set once nobody reads a source, by its ``id``, that a pipeline was reading from when it was closed."""


def default_features(batch: Any) -> Any:
    """A batch's ids: the batch itself if it is a tensor or has ``offsets()``, else its ``sparse`` or
    ``sparse_features``."""
    if isinstance(batch, Tensor) or callable(getattr(batch, "offsets", None)):
        return batch
    for name in ("sparse", "sparse_features"):
        if hasattr(batch, name):
            return getattr(batch, name)
    raise TypeError(
        f"cannot tell where a {type(batch).__name__} keeps its ids; pass features=, a function from batch to ids"
    )


class _End(contextlib.ExitStack):
    """What ends a pass, as the end of a generator may be run by the collector. ``thread``: that reads for it."""

    thread: threading.Thread | None = None


class Prefetched(ClosedWhenDropped, Generator[Batch, None, None]):
    """What ``prefetch`` gives: a generator of batches that also knows where the source was."""

    def __init__(self, begin: Callable[[_End], Generator[tuple[Batch, Any], None, None]]) -> None:
        self._end = _End()
        self._items: Any = begin(self._end)
        self._position: Any = None

    def send(self, value: None) -> Batch:
        return self._go_on(self._items.send, value)

    def throw(self, *error: Any) -> Batch:
        return self._go_on(self._items.throw, *error)

    def _go_on(self, step: Callable[..., tuple[Batch, Any]], *arguments: Any) -> Batch:
        if self._end.thread is threading.current_thread():
            raise RuntimeError("batches= or features= asked the pass that reads from them for a batch, and would wait")
        try:
            batch, self._position = step(*arguments)
        except BaseException:
            if self._items.gi_frame is None:  # it has ended; else another thread is in it
                self._end.close()
            raise
        return batch

    def close(self) -> None:
        self._items.close()
        self._end.close()

    def state_dict(self) -> Any:
        """A copy of ``batches.state_dict()`` as it was right after the last batch that this gave: resume there. The
        source itself is up to ``depth`` batches further.

        Raises:
            TypeError: ``batches`` has no ``state_dict``, or nothing was given yet. Others: what that raised.
        """
        if self._position is None:
            raise TypeError(
                "there is no position: batches= must have a state_dict(), as torchdata's StatefulDataLoader, and have "
                "given a batch. A generator over a loader has none; give the loader itself, or the position with each "
                "batch"
            )
        if isinstance(self._position, Exception):
            raise self._position
        return copy.deepcopy(self._position)


def _position_of(batches: Any) -> Any:
    """Where a source is; the error, if it cannot say; None if it never does."""
    if not hasattr(batches, "state_dict"):
        return None
    try:
        return copy.deepcopy(batches.state_dict())
    except Exception as error:  # which may be of no interest
        return error


def prefetch(
    batches: Iterable[Batch],
    module: Any,
    *,
    depth: int | Literal["auto"] = "auto",
    features: Callable[[Batch], Any] | None = None,
) -> Prefetched[Batch]:
    """Iterate over ``batches`` while a thread reads ahead and brings the rows of up to ``depth`` later batches in.

    Closing the generator (``contextlib.closing``, or its end) releases what was not used and ends the thread; where
    that waits for ``batches``, it ends once they yield or end, and nobody waits for it but the next pass over the same
    object. ``state_dict()`` of what is returned is the position of the batch given last, where ``batches`` has one.
    Results are the same bits for every depth: rows are fetched early, but read and updated in the order of
    the steps. A batch whose rows would not stay until it is used, for want of free space besides those in use, is not
    fetched ahead: a store that has no room for two batches reads as a plain loop does.

    Args:
        batches: consumed by the thread (by the caller's with depth=0); never more than ``depth`` ahead.
            Batches that are read ahead must not share memory: a reader that reuses a buffer has to copy it.
        module: a module over tables, a model with such modules, or a list of either. Its ``forward`` must be given the
            very object that ``features`` returned.
        depth: batches fetched ahead; 0 is a plain loop without a thread. "auto": a thread reads 2 batches ahead;
            where steps are faster so it brings their rows in, elsewhere it reads between steps what is read within 5
            ms. Both ways are tried, ever more rarely, until all rows are in memory to stay. Where ranks must agree: 2.
        features: how to get from a batch what the module's ``forward`` is given: its argument, or a tuple of them. Of
            several modules, a dict of that by their names in the model, a list in the order of ``model.modules()``, or
            one object that all are given. Default: the batch, if it is a tensor or jagged, else its ``sparse`` or
            ``sparse_features``.

    Raises:
        ValueError: depth is negative. TypeError: there is no module over tables. Whatever ``batches``,
            ``features`` or the reading of rows raised, when the batch that it happened to is asked for; batches before
            it are yielded first, and the store stays usable.
    """
    get_features, one = default_features if features is None else features, Modules.of(module)
    choice = Choice() if depth == "auto" and not one.is_collective else None
    depth = AUTO_DEPTH if depth == "auto" else depth
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth={depth!r} must be an int, 0 or more")
    if depth == 0:
        return Prefetched(partial(_plain, batches, one))
    return Prefetched(partial(_pipeline, batches, one, depth, get_features, choice))


def _plain(batches: Iterable[Any], module: Modules, end: _End) -> Generator[Any, None, None]:
    settle(_JOIN_SECONDS)
    reader = _Reader(batches, module, lambda _: None)
    end.callback(reader.end)
    while (item := reader.next()) is not None:
        yield item.batch, item.position


def _wait_for(batches: Iterable[Any]) -> None:
    """Wait until no earlier pass reads from it: two threads in one iterator would break it, as that of a loader with
    persistent workers."""
    if (left := _LEFT.get(id(batches))) is not None:
        left.wait()


class _Ahead(NamedTuple):
    batch: Any
    features: Any
    position: Any


class _Reader:
    """Reads batches in order. While it waits in the caller's code, in the source or in ``features``, another thread may
    close and release it. From then on it refers to nothing but the source, and gives no more batches."""

    def __init__(self, batches: Iterable[Any], module: Modules, get_features: Callable[[Any], Any]) -> None:
        self.module: Modules | None = module
        self.is_closed = False
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._get_features: Callable[[Any], Any] | None = get_features
        self._gate = threading.RLock()
        self._is_outside = False
        self._left: Flag | None = None  # set when it is no more outside
        self._process_id = os.getpid()
        disown_in_forks(self)

    def disown(self) -> None:
        """In a forked process, where the thread that may have the gate is not."""
        self._gate = threading.RLock()
        self.is_closed = True
        _LEFT.pop(id(self._batches), None)

    @property
    def is_own(self) -> bool:
        return self._process_id == os.getpid()

    def require_own(self) -> None:
        """ClosedError in a fork of the process that made it."""
        require_own(self._process_id, "the pipeline", "open the store here, and call tierstore.prefetch here")

    def next(self) -> _Ahead | None:
        """The next batch, or None at the end, or once this was closed. ClosedError in a fork."""
        self.require_own()
        with self._gate:
            if self.is_closed:
                return None
            self._is_outside = True
        try:
            if self._iterator is None:
                _wait_for(self._batches)
                module = self.module
                if self.is_closed or module is None:
                    return None
                self._iterator = module.begin(self._batches)
                del module
            batch = next(self._iterator, _NO_MORE)
            if batch is _NO_MORE:
                return None
            assert self._get_features is not None
            item = _Ahead(batch, self._get_features(batch), _position_of(self._batches))
        except StopIteration as error:  # not of the source's ``__next__``, and would end the pass
            raise RuntimeError("features= or iter(batches) raised StopIteration, as next() may") from error
        finally:
            with self._gate:
                self._is_outside = False
                if self._left is not None:
                    self._left.set()
                    if _LEFT.get(id(self._batches)) is self._left:
                        del _LEFT[id(self._batches)]
        return None if self.is_closed else item

    def close(self) -> bool:
        """Let it read nothing more. Returns whether it is in the caller's code, which may take forever."""
        with self._gate:
            self.is_closed = True
            if self._is_outside and self._left is None:
                self._left = _LEFT[id(self._batches)] = Flag()
            return self._is_outside

    def end(self) -> None:
        """Close and release it, where no thread is at work in it."""
        self.close()
        self.release()

    def release(self) -> None:
        """Forget the caches; for the thread that closed it, unless another is at work in it outside the caller's
        code."""
        self.module = self._get_features = None


def _pop_all(items: deque[Any], work: Callable[[Any], None], limit: int = sys.maxsize) -> None:
    """Do it with each item, first to last; another thread may do the same, and each item is met once."""
    for _ in range(limit):
        if not _pop(items, work):
            return


@shielded
def _pop(items: deque[Any], work: Callable[[Any], None]) -> bool:
    try:
        item = items.popleft()
    except IndexError:
        return False
    work(item)
    return True


def _pipeline(
    batches: Iterable[Any], module: Modules, depth: int, get_features: Callable[[Any], Any], choice: Choice | None,
    end: _End,
) -> Generator[Any, None, None]:  # fmt: skip
    settle(_JOIN_SECONDS)  # what an earlier pass holds that was dropped
    worker = _Worker(_Reader(batches, module.ahead(), get_features), depth)
    end.callback(worker.stop)
    worker.is_ahead = choice is None or not module.has_all_rows()
    end.thread = worker.start()
    while item := worker.take():
        if isinstance(item, BaseException):
            raise item
        yield item
        if choice is not None:
            choice.note_step()
            worker.is_ahead = choice.is_ahead and not module.has_all_rows()
        worker.forget(1)


class _Worker:
    """Reads batches and brings their rows in, in a thread. While that waits for the source, no variable of its frames
    refers to a batch, a ticket or the store; while it waits for a place, it does not refer to the worker either: who
    drops a pipeline drops all of it.

    Attributes:
        is_ahead: if not, batches are read, but no rows are fetched; and who asks for one lets those that there is
            room for be read first, once none is left, as the two would keep each other waiting for the interpreter.
    """

    def __init__(self, reader: _Reader, depth: int) -> None:
        self.is_ahead = True
        self._reader = reader
        self._ready: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        # One for each batch that may yet be fetched; a dead reference once nobody refers to this.
        self._places: queue.SimpleQueue[weakref.ref[_Worker] | None] = queue.SimpleQueue()
        for _ in range(depth + 1):  # one is in use
            self._places.put(None)
        self._tickets: deque[Any] = deque()  # of batches that were read and not forgotten, in order
        self._next: tuple[tuple[Any, Any], Any] | None = None  # what is to be given when there is room, and its ticket
        self._borrowed = 0  # places that were taken while it waited
        self._vacant = 0  # places that batches have left, and the thread does not know of
        self._is_in = True  # the last batch that was handed over
        # Of a sharded module: where the thread is in the source when this is stopped, the other ranks learn it later.
        self._collective = reader.module if reader.module is not None and reader.module.is_collective else None
        self._has_ended = False
        self._rests = Flag()  # the thread did what it had to
        known = weakref.ref(self, self._places.put)
        self._thread = threading.Thread(
            target=_work, args=(known, self._places), name="tierstore-prefetch", daemon=True
        )

    def start(self) -> threading.Thread:
        """Begin; the thread."""
        self._thread.start()
        return self._thread

    def step(self) -> bool:
        """With a place: go on with the next batch; False at the end."""
        try:
            if self._go_on():
                return True
            self._ready.put(())
        except BaseException as error:
            self._ready.put(error)
        finally:
            if self._places.empty():
                self._rests.set()
        self._end()
        return False

    def _end(self) -> None:
        self._has_ended = True
        self._rests.set()
        module, self._collective = self._reader.module or self._collective, None
        try:
            if module is not None:
                module.end()
        finally:
            if self._reader.is_closed:
                self._release()

    def _go_on(self) -> bool:
        """Read a batch, unless one waits for room, and if there is room bring its rows in and hand it over."""
        if self._next is None:
            item = self._reader.next()
            module = self._reader.module
            if item is None or module is None:
                return False
            if not self.is_ahead:
                self._tickets.append(None)
                self._is_in = False
                self._ready.put((item.batch, item.position))
                return not self._reader.is_closed
            self._next = (item.batch, item.position), module.prepare(item.features)
            self._tickets.append(self._next[1])
        else:
            module = self._reader.module
            self._borrowed += 1  # in the end one that a batch has left
        if self._must_wait(module):
            return True
        (given, ticket), self._next = self._next, None
        for _ in range(self._borrowed):
            self._places.put(None)
        self._borrowed = 0
        if self._reader.is_closed or module is None:
            return False
        self._is_in = module.bring_in(ticket)
        self._ready.put(given)
        return not self._reader.is_closed

    def _must_wait(self, module: Modules | None) -> bool:
        """Whether the rows would not stay, and the batch is not the next one that is asked for, or closed.

        While a batch that is not in is in use, there is room that it needs itself.
        """
        if len(self._tickets) <= 1 or self._reader.is_closed or module is None:
            return False
        assert self._next is not None
        return not (self._is_in and module.has_room(self._next[1]))

    def take(self) -> _Item:
        """The next batch, or how it ended; waits for it. ClosedError in a forked process."""
        self._reader.require_own()
        if not self.is_ahead:
            self._rests.wait(_READ_SECONDS)
        while True:
            try:
                item = self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not self._thread.is_alive() and self._ready.empty():
                    raise RuntimeError("the prefetch thread died without a word") from None
            else:
                return item

    def forget(self, limit: int = sys.maxsize) -> None:
        """Release what the next batches in order, not yet forgotten, still pin; others may take their places."""
        module = self._reader.module
        if module is not None:
            _pop_all(self._tickets, lambda ticket: None if ticket is None else module.forget(ticket), limit)
        self._vacant += 1
        if self.is_ahead or self._ready.empty():
            if not self._has_ended:
                self._rests.clear()
            for _ in range(self._vacant):
                self._places.put(None)
            self._vacant = 0

    def stop(self) -> None:
        """End the thread and release what was not used. A thread in the caller's code is not waited for: it has nothing
        to release, and ends when that code returns. Nor has a forked process anything to end."""
        if not self._reader.is_own:
            return
        is_outside = self._reader.close()
        self._places.put(None)
        if not is_outside and self._thread.ident not in (None, threading.get_ident()):
            self._thread.join(_JOIN_SECONDS)
            if not (self._has_ended or self._thread.is_alive()):
                self._end()
        if is_outside or not self._thread.is_alive():
            self._release()

    def _release(self) -> None:
        self.forget()
        self._next = None
        self._reader.release()


def _work(known: "weakref.ref[_Worker]", places: "queue.SimpleQueue[weakref.ref[_Worker] | None]") -> None:
    goes_on = True
    while goes_on:
        places.get()
        worker = known()
        goes_on = worker is not None and worker.step()
        del worker

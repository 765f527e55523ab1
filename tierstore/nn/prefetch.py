"""The prefetch pipeline: rows of later batches are read while this batch computes."""

import contextlib
import copy
import os
import queue
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Final, Literal, NamedTuple, TypeVar

from torch import Tensor

from ..system.processes import disown_in_forks, require_own
from ..system.signals import ClosedWhenDropped, Flag, settle, shielded
from .module import plain_names

Batch = TypeVar("Batch")
_Item = tuple[()] | tuple[Any, Any] | BaseException  # a batch and its position, nothing at the end, or an error
_NO_MORE: Final = object()
_OF_A_FORK: Final = ("the pipeline", "open the store here, and call tierstore.prefetch here")
_NAME: Final = "tierstore-prefetch"
_POLL_SECONDS: Final = 0.1
_JOIN_SECONDS: Final = 30.0
_READ_SECONDS: Final = 0.005  # what takes longer to be read is read while other batches are used
_LEFT: Final[dict[int, Flag]] = {}  # by a source's ``id``; set once a pipeline that was closed reads it no more
_AUTO_DEPTH: Final = 2
_GROUP: Final = _AUTO_DEPTH + 1  # batches that are read together between steps
_RUN_STEPS: Final = 6 * _GROUP
_MOST_RUNS: Final = 64
_CLEARLY: Final = 0.98


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


class Modules:
    """Modules over tables, or what ``TieredModule.ahead`` of each gives for a pass, driven as one. A ticket is the list
    of theirs. ``is_collective``: other ranks must bring their rows in at the same time."""

    def __init__(self, modules: Sequence[Any], names: Sequence[str]) -> None:
        self._modules, self._names = modules, names
        self.is_collective = any(module.is_collective for module in modules)

    @cached_property
    def _tables(self) -> list[Any]:
        return [table for module in self._modules for table in module._tables]

    @classmethod
    def of(cls, module: Any) -> "Modules":
        """Those of a model, of several modules, or the one that is given. TypeError: there is none."""

        def is_over_tables(module: Any) -> bool:
            return hasattr(module, "prepare") and hasattr(module, "is_collective")

        if is_over_tables(module):
            return cls([module], [""])
        found: dict[Any, str] = {}
        for model in [module] if hasattr(module, "modules") else list(module):
            for name, plain in plain_names(model).items():
                if is_over_tables(each := model.get_submodule(name)):
                    found.setdefault(each, plain)
        if not found:
            raise TypeError(
                f"a {type(module).__name__} has no module over tables, as TieredEmbeddingBag, to prefetch for"
            )
        return cls(list(found), list(found.values()))

    def ahead(self) -> "Modules":
        return Modules([each.ahead() if each.is_collective else each for each in self._modules], self._names)

    def has_all_rows(self) -> bool:
        """Whether all rows of all tables are in memory to stay: there is nothing to bring in ahead."""
        return all(table.in_pool(lambda pool: pool.tier.are_all_in) for table in self._tables)

    def begin(self, batches: Any) -> Iterator[Any]:
        """``iter(batches)``, which the thread that calls ``prepare`` reads from."""
        begin = next((getattr(each, "begin", iter) for each in self._modules if each.is_collective), iter)
        found: Iterator[Any] = begin(batches)
        return found

    def end(self) -> None:
        """Tell other ranks that the pass brings no more in; called once, by the thread that calls ``prepare``."""
        for module in self._modules:
            if module.is_collective:
                module.end()

    def prepare(self, features: Any) -> list[Any]:
        """``features``: a list with what each module is given, a dict of that by name, or one object for all."""
        names, own, tickets = self._names, features, list[Any]()
        if isinstance(features, dict):
            if sorted(features) != sorted(names):
                raise ValueError(f"features= gave a dict of {list(features)}, but the modules are {names}")
            own = [features[name] for name in names]
        elif not isinstance(features, list) or len(names) == 1:
            own = [features] * len(names)
        if len(own) != len(names):
            raise ValueError(f"features= gave a list of {len(own)}, but there are {len(names)} modules: {names}")
        try:
            for module, each in zip(self._modules, own, strict=True):
                tickets.append(module.prepare(each))
        except BaseException:
            self.forget(tickets)
            raise
        return tickets

    def bring_in(self, ticket: list[Any]) -> bool:
        are_in = [module.bring_in(own) for module, own in zip(self._modules, ticket, strict=True)]
        return all(are_in)

    def forget(self, ticket: list[Any]) -> None:
        for module, own in zip(self._modules, ticket, strict=False):
            module.forget(own)


class _End(contextlib.ExitStack):
    """What ends a pass, as the end of a generator may be run by the collector. ``thread``: that reads for it."""

    thread: threading.Thread | None = None


class Prefetched(ClosedWhenDropped, Generator[Batch, None, None]):
    """What ``prefetch`` gives: a generator of batches that also knows where the source was."""

    def __init__(self, batches: Any, begin: Callable[[_End], Generator[tuple[Batch, Any], None, None]]) -> None:
        self._batches = batches
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

    def __len__(self) -> int:
        """How many batches the whole source has. TypeError: it does not say."""
        return len(self._batches)

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        if self._items.gi_running:  # CPython 3.11 looks into the frame before it says so, and may end the process
            raise ValueError("generator already executing")
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


def prefetch(
    batches: Iterable[Batch], module: Any, *, depth: int | Literal["auto"] = "auto",
    features: Callable[[Batch], Any] | None = None,
) -> Prefetched[Batch]:  # fmt: skip
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
            ms. Both ways are tried, ever more rarely, until all rows are in memory to stay. If they are from the start,
            a list or tuple of batches is a plain loop. Where ranks must agree: 2.
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
    tuner = DepthTuner() if depth == "auto" and not one.is_collective else None
    depth = _AUTO_DEPTH if depth == "auto" else depth
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth={depth!r} must be an int, 0 or more")
    if depth == 0:
        return Prefetched(batches, partial(_plain, batches, one))
    return Prefetched(batches, partial(_pipeline, batches, one, depth, get_features, tuner))


def _plain(batches: Iterable[Any], module: Modules, end: _End) -> Generator[Any, None, None]:
    settle(_JOIN_SECONDS)
    reader = _Worker(batches, module, lambda _: None, depth=0)
    end.callback(reader.stop)
    while (item := reader.read()) is not None:
        yield item.batch, item.position


def _pipeline(
    batches: Iterable[Any], module: Modules, depth: int, get_features: Callable[[Any], Any], tuner: "DepthTuner | None",
    end: _End,
) -> Generator[Any, None, None]:  # fmt: skip
    are_in = tuner is not None and module.has_all_rows()  # then there is nothing to bring in ahead
    if are_in and isinstance(batches, list | tuple):
        yield from _plain(batches, module, end)
        return
    settle(_JOIN_SECONDS)  # what an earlier pass holds that was dropped
    worker = _Worker(batches, module.ahead(), get_features, depth)
    end.callback(worker.stop)
    worker.is_ahead = not are_in
    tuner = None if are_in else tuner
    end.thread = worker.start()
    while item := worker.take():
        if isinstance(item, BaseException):
            raise item
        yield item
        if tuner is not None:
            tuner.note_step()
            tuner = None if module.has_all_rows() else tuner
            worker.is_ahead = tuner is not None and tuner.is_ahead
        worker.forget(1)


class DepthTuner:
    """Whether to bring rows in ahead for the next step, ``is_ahead``, by the times of steps: runs of them the faster
    way, and at times one the other way, four times as rarely each time it proves slower again."""

    def __init__(self) -> None:
        self.is_ahead = True
        self._seconds: dict[bool, float] = {}
        self._run: list[float] = []
        self._unsettled = _RUN_STEPS  # steps after a change: batches that were fetched ahead are used up, or made
        self._runs_left = self._every = 1
        self._is_trial = False
        self._began = time.perf_counter()

    def note_step(self) -> None:
        now, began = time.perf_counter(), self._began
        self._began = now
        if self._unsettled:
            self._unsettled -= 1
            return
        self._run.append(now - began)
        if len(self._run) == _RUN_STEPS:
            groups = sorted(sum(self._run[first : first + _GROUP]) for first in range(0, _RUN_STEPS, _GROUP))
            self._run.clear()
            self._end_run(statistics.mean(groups[:-1]))

    def _end_run(self, seconds: float) -> None:
        way, other = self.is_ahead, not self.is_ahead
        self._seconds[way] = (self._seconds.get(way, seconds) + seconds) / 2
        self._runs_left -= 1
        if self._is_trial:
            is_better = self._seconds[way] < _CLEARLY * self._seconds[other]
            self._every = 1 if is_better else min(4 * self._every, _MOST_RUNS)
            self._runs_left, self._is_trial = self._every, False
            self.is_ahead = way if is_better else other
        elif not self._runs_left:
            self._is_trial, self.is_ahead = True, other
        self._unsettled = 0 if way is self.is_ahead else _AUTO_DEPTH + 2


class _Read(NamedTuple):
    batch: Any
    features: Any
    position: Any


def _position_of(batches: Any) -> Any:
    """Where a source is; the error, if it cannot say; None if it never does."""
    try:
        return copy.deepcopy(batches.state_dict()) if hasattr(batches, "state_dict") else None
    except Exception as error:  # which may be of no interest
        return error


class _Worker:
    """Reads batches in order and brings their rows in, in a thread. While that waits in the caller's code, in the
    source or in ``features``, no variable of its frames refers to a batch, a ticket or the store, and another thread
    may stop it. While it waits for a place, it refers to this object neither: who drops a pipeline drops all of it.

    Unless it ``is_ahead``, batches are read, but no rows are fetched. ``take`` then waits until the thread has read as
    many as there are places for: at work in turns, the two would wait for each other's interpreter lock.
    """

    def __init__(self, batches: Iterable[Any], module: Modules, get_features: Callable[[Any], Any], depth: int) -> None:
        self.is_ahead = True
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._module: Modules | None = module  # None, as the next, once nothing is to be read any more
        self._get_features: Callable[[Any], Any] | None = get_features
        self._gate = threading.RLock()
        self._is_outside = False  # in the caller's code
        self._left: Flag | None = None  # set when it is no more outside
        self._is_closed = False
        self._ready = queue.SimpleQueue[_Item]()
        # One for each batch that may yet be fetched; a dead reference once nobody refers to this.
        self._places = queue.SimpleQueue[weakref.ref[_Worker] | None]()
        self._add_places(depth + 1)  # one is in use
        self._tickets: deque[Any] = deque()  # of batches that were read and not forgotten, in order
        self._next: tuple[tuple[Any, Any], Any] | None = None  # what is to be given when there is room, and its ticket
        self._borrowed = self._vacant = 0  # places taken while it waited; left by batches, unknown to the thread
        self._is_in = True  # the last batch that was handed over
        # Of a sharded module: where the thread is in the source when this is stopped, the other ranks learn it later.
        self._collective = module if module.is_collective else None
        self._has_ended = False
        self._rests = Flag()  # the thread did what it had to
        self._thread: threading.Thread | None = None
        self._process_id = os.getpid()
        disown_in_forks(self)

    def start(self) -> threading.Thread:
        """Not before: a thread that never runs is dropped by code in Python."""
        known = weakref.ref(self, self._places.put)
        self._thread = threading.Thread(target=_work, args=[known, self._places], name=_NAME, daemon=True)
        self._thread.start()
        return self._thread

    def disown(self) -> None:
        """In a forked process, where the thread that may have the gate is not."""
        self._gate = threading.RLock()
        self._is_closed = True
        _LEFT.pop(id(self._batches), None)

    def read(self) -> _Read | None:
        """The next batch, or None at the end, or once this was stopped. ClosedError in a fork."""
        require_own(self._process_id, *_OF_A_FORK)
        with self._gate:
            if self._is_closed:
                return None
            self._is_outside = True
        try:
            if self._iterator is None:
                if (left := _LEFT.get(id(self._batches))) is not None:
                    left.wait()  # two threads in one iterator would break it, as a loader's with persistent workers
                module = self._module
                if self._is_closed or module is None:
                    return None
                self._iterator = module.begin(self._batches)
                del module
            batch = next(self._iterator, _NO_MORE)
            if batch is _NO_MORE:
                return None
            assert self._get_features is not None
            item = _Read(batch, self._get_features(batch), _position_of(self._batches))
        except StopIteration as error:  # not of the source's ``__next__``, and would end the pass
            raise RuntimeError("features= or iter(batches) raised StopIteration, as next() may") from error
        finally:
            with self._gate:
                self._is_outside = False
                if self._left is not None:
                    self._left.set()
                    if _LEFT.get(id(self._batches)) is self._left:
                        del _LEFT[id(self._batches)]
        return None if self._is_closed else item

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
        module, self._collective = self._module or self._collective, None
        try:
            if module is not None:
                module.end()
        finally:
            if self._is_closed:
                self._release()

    def _go_on(self) -> bool:
        if self._next is None:
            item = self.read()
            module = self._module
            if item is None or module is None:
                return False
            if not self.is_ahead:
                self._tickets.append(None)
                self._is_in = False
                self._ready.put((item.batch, item.position))
                return not self._is_closed
            self._next = (item.batch, item.position), module.prepare(item.features)
            self._tickets.append(self._next[1])
        else:
            module = self._module
            self._borrowed += 1  # in the end one that a batch has left
        is_next = len(self._tickets) <= 1  # that is asked for
        # While a batch that is not in is in use, there is free space that it needs itself.
        if not (is_next or self._is_closed or (self._is_in and all(each.has_room() for each in self._next[1]))):
            return True
        (given, ticket), self._next = self._next, None
        self._borrowed = self._add_places(self._borrowed)
        if self._is_closed or module is None:
            return False
        self._is_in = module.bring_in(ticket)
        self._ready.put(given)
        return not self._is_closed

    def take(self) -> _Item:
        """The next batch, or how it ended; waits for it. ClosedError in a forked process."""
        require_own(self._process_id, *_OF_A_FORK)
        if not self.is_ahead:
            self._rests.wait(_READ_SECONDS)
        while True:
            try:
                item = self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if not (self._thread and self._thread.is_alive()) and self._ready.empty():
                    raise RuntimeError("the prefetch thread died without a word") from None
            else:
                return item

    def forget(self, limit: int = sys.maxsize) -> None:
        """Release what the next batches in order, not yet forgotten, still pin; others may take their places."""
        module = self._module
        while module is not None and limit and self._forget_next(module):
            limit -= 1
        self._vacant += 1
        if self.is_ahead or self._ready.empty():
            if not self._has_ended:
                self._rests.clear()
            self._vacant = self._add_places(self._vacant)

    def _add_places(self, count: int) -> int:
        for _ in range(count):
            self._places.put(None)
        return 0

    @shielded
    def _forget_next(self, module: Modules) -> bool:
        """False if there is none. Another thread may do the same; each ticket is met once."""
        try:
            ticket = self._tickets.popleft()
        except IndexError:
            return False
        if ticket is not None:
            module.forget(ticket)
        return True

    def stop(self) -> None:
        """End the thread and release what was not used. A thread in the caller's code is not waited for: it has nothing
        to release, and ends when that code returns. Nor has a forked process anything to end."""
        if self._process_id != os.getpid():
            return
        with self._gate:
            self._is_closed, is_outside = True, self._is_outside
            if is_outside and self._left is None:
                self._left = _LEFT[id(self._batches)] = Flag()
        self._places.put(None)
        thread = self._thread
        if not is_outside and thread is not None and thread.ident not in (None, threading.get_ident()):
            thread.join(_JOIN_SECONDS)
            if not (self._has_ended or thread.is_alive()):
                self._end()
        if is_outside or thread is None or not thread.is_alive():
            self._release()

    def _release(self) -> None:
        self.forget()
        self._next = self._module = self._get_features = None


def _work(known: "weakref.ref[_Worker]", places: "queue.SimpleQueue[weakref.ref[_Worker] | None]") -> None:
    goes_on = True
    while goes_on:
        places.get()
        worker = known()
        goes_on = worker is not None and worker.step()
        del worker

"""A store's models, at one version of the store at a time.

One thread, the *executor*, runs every batch of every model and, between two batches, has the store show a newer
version. So no batch sees two versions, and no request is split over batches: an answer is of one version, the one
it names. While the executor has nothing to do, the event loop itself looks up a few rows that are in memory. A second
thread looks for newer commits and reads what changed, while batches run.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ..errors import StoreNotFoundError, StoreReplacedError, TierstoreError
from ..io.files import take_from_lower_layer
from ..pool.stats import Stats, TierStats
from ..settings.sections import nearest
from ..store import Store, open_store
from ..store.manifest import Manifest
from ..store.refresh import Newer
from ..store.version import event_time_of
from ..system.checks import excerpt
from ..train.checkpoint import saved_config
from ..updates.update_file import origin_of
from .base import LONG_IDS, Model, Outputs, Pause
from .batching import Batcher, OneThread, between
from .config import ServeConfig
from .hot_rows import RowCounts, hot_rows, hot_rows_path, load_hot_rows, rows_of_trace, save_hot_rows, warm_up
from .logs import log_request
from .messages import InferRequest, InferResponse, InferTensor, ModelMetadata, ServeError, Status
from .metrics import Metrics, State
from .models import Models, load_program, rehearse
from .watch import Watch, read_labelled

_LOG: Final = logging.getLogger("tierstore.serve")
_T = TypeVar("_T")
_RETRY_SECONDS: Final = 1.0
"""From one failure to move to a newer version to the next try."""
_KEEP_HOT_SECONDS: Final = 60.0
_WATCH_SECONDS: Final = 0.1
_FAILED: Final = "the server failed; its log says why"
_NOTHING: Final = Stats(TierStats(), TierStats(), TierStats())


class _Served(NamedTuple):
    model: Model
    batcher: Batcher


class _Ran(NamedTuple):
    outputs: Outputs
    version: str


class StoreEngine:
    """The models of one store, what metrics show of it, and what an operator may ask. Its coroutines are for one event
    loop. ``turn`` is held while a batch runs. ``prefix`` begins the models' names."""

    def __init__(self, config: ServeConfig, metrics: Metrics, turn: threading.Lock, prefix: str = "") -> None:
        self._config = config
        self._metrics = metrics
        self._prefix = prefix
        self._turn = turn
        self._executor = OneThread("tierstore-serve")
        self._looker = ThreadPoolExecutor(1, "tierstore-follow")
        self._store: Store | None = None
        self._models: Models | None = None  # the executor's, like what they are of
        self._served: dict[str, _Served] = {}  # the event loop's
        self.version, self.commit_id = 0, ""  # a number may be that of another commit, too
        self.newest_version = 0
        self._stale_since: float | None = None
        self._event_time: float | None = None
        self._event_served_at = 0.0  # when a version with that event time was shown first
        self._moving = asyncio.Lock()
        self._is_ready = False
        self.watched: Watch | None = None
        self.is_draining = False  # for good, once the server stops
        self._has_failed = False
        self._is_parsing: Final = asyncio.Lock()
        self.row_counts: Final = RowCounts()

    # Starting and stopping

    async def start(self) -> None:
        """Open the store, if there is one, bring its hot rows in, and be ready. Errors as of ``tierstore.open``."""
        try:
            await _in(self._executor, self._open)
        except StoreNotFoundError:
            if not self._config.sources:
                raise
            _LOG.info("there is no store at %s yet: waiting for the first update", self._config.store)
            return
        self._serve_models()
        self._is_ready = not self.is_draining

    def _open(self) -> None:
        config = self._config
        if config.sources:
            if not Manifest.read(Path(config.store).absolute()).has_rows:
                raise StoreNotFoundError(f"{config.store} was begun, and nothing applied yet")
            take_from_lower_layer(Path(config.store))
        store = open_store(
            config.store, mode="r", ddr=config.ddr, policy=config.policy, threads=config.num_threads, dtype=config.dtype
        )
        try:
            if not store.version:
                raise StoreNotFoundError(f"{store.directory} has no commit yet; train first, or commit once")
            program = None
            if config.model:
                program = load_program(Path(config.model), max_samples=config.max_batch_samples, dense=config.dense)
            note, prefix = self._metrics.out_of_range, self._prefix
            dropped = (lambda name, count: note(prefix + name, count)) if config.out_of_range == "zero" else None
            models = Models(store, dropped=dropped, program=program, dense=config.dense)
            self.watched = self._watch(store)
            self._warm_up(store)
            rehearse(models.by_name.values())
            if config.follow_seconds:
                store.rehearse_newer()
            if config.record:
                store.record(config.record, rate=config.record_rate)
        except BaseException:
            store.close()
            raise
        self._store, self._models = store, models
        self._note_shown(store)
        _LOG.info("serving version %d of %s: %d models", self.version, store.directory, len(models.by_name))

    def _note_shown(self, store: Store) -> None:
        extra = store.extra
        origin, event_time = origin_of(extra), event_time_of(extra)
        if event_time != self._event_time:
            self._event_time, self._event_served_at = event_time, time.time()
        self.version = self.newest_version = store.version if origin is None else origin.version
        known = store.commit_id(store.version) if origin is None else origin.commit_id + origin.urgent
        self.commit_id = known or f"version {self.version}"

    def _watch(self, store: Store) -> Watch | None:
        config = self._config
        if not config.watch:
            return None
        run = saved_config(store.extra, str(store.directory))
        if run is None:
            raise ValueError(
                f"watch={config.watch!r}: {store.directory} holds no DLRM of tierstore train; leave it out"
            )
        rows = read_labelled(run, config.watch, max_rows=config.watch_rows, batch_rows=config.max_batch_samples)
        return Watch(self.score, rows, bound=config.watch_loss, store=config.store, commit_id=lambda: self.commit_id)

    def _warm_up(self, store: Store) -> None:
        if self._config.warm_up == "none":
            return
        started = time.perf_counter()
        is_auto = self._config.warm_up == "auto"
        path = hot_rows_path(store.directory) if is_auto else Path(self._config.warm_up)
        rows = load_hot_rows(path, store) if is_auto else rows_of_trace(path)
        count = warm_up(store, rows, lambda: self.is_draining)
        _LOG.info("%d rows are in memory after %.1f s of warm-up", count, time.perf_counter() - started)

    def _serve_models(self) -> None:
        """A batcher for each model; who waits for one that is gone is sent to the one in its place."""
        assert self._models is not None
        before, models = self._served, {self._prefix + name: each for name, each in self._models.by_name.items()}
        self._metrics.know(models)
        kept = {name: each for name, each in before.items() if models.get(name) is each.model}
        self._served = {name: kept.get(name) or self._serve(name, model) for name, model in models.items()}
        for name in before.keys() - kept.keys():
            before[name].batcher.close()

    def _serve(self, name: str, model: Model) -> _Served:
        def is_there() -> bool:  # else the loop has yet to hear of it
            return self._models is not None and self._models.by_name.get(model.metadata.name) is model

        def at_once(query: Any) -> _Ran | None:
            outputs = model.answer_at_once(query) if is_there() else None
            return None if outputs is None else _Ran(outputs, str(self.version))

        def run(queries: Sequence[Any], pause: Pause | None) -> list[_Ran | ServeError]:
            if not is_there():
                raise ServeError(Status.UNAVAILABLE, f"model {name!r} has changed with the version; ask again")
            version = str(self.version)
            with self._turn:
                answers = model.run(queries, None if pause is None else between(self._turn, pause))
            return [each if isinstance(each, ServeError) else _Ran(each, version) for each in answers]

        batcher = Batcher(
            name, run, self._executor, self._config, at_once=at_once, observer=self._metrics.batched,
            others=lambda: [each.batcher for each in self._served.values()],
        )  # fmt: skip
        return _Served(model, batcher)

    async def begin_to_stop(self) -> None:
        """Take no more requests; those that came are answered."""
        self.is_draining, self._is_ready = True, False

    async def stop(self) -> None:
        """Answer what came, within ``grace_seconds``, and close the store; its hot rows are kept for next time."""
        await self.begin_to_stop()
        async with self._moving:
            await asyncio.gather(*(each.batcher.drain(self._config.grace_seconds) for each in self._served.values()))
            store, self._store = self._store, None
            await _in(self._looker, int)  # it may be reading the store
            await _in(self._executor, self._close, store)
        self._looker.shutdown()
        self._executor.shutdown()

    def _close(self, store: Store | None) -> None:
        self._models = None
        if store is None:
            return
        try:
            if self._config.warm_up == "auto":
                self._save_hot_rows(store)
            recorder = store.recorder
            if recorder is not None:
                recorder.stop()
                _LOG.info("recorded %s", recorder.describe())
        finally:
            store.close()

    def _save_hot_rows(self, store: Store) -> None:
        save_hot_rows(hot_rows_path(store.directory), hot_rows(store))

    async def keep_hot_rows(self, seconds: float = _KEEP_HOT_SECONDS) -> None:
        """Save the hot rows now and then, for after a crash, until cancelled."""
        while self._config.warm_up == "auto":
            await asyncio.sleep(seconds)
            store = self._store
            if store is None:
                continue
            try:
                await _in(self._looker, self._save_hot_rows, store)
            except Exception:  # they are advice: a server does without
                _LOG.exception("the hot rows are not kept for the next start")

    # Engine

    @property
    def is_live(self) -> bool:
        """Whether batches can still run. Only a server that stops closes the batchers of the models that it serves."""
        if self.is_draining:
            return True
        return not self._has_failed and all(served.batcher.is_open for served in self._served.values())

    @property
    def is_ready(self) -> bool:
        return self._is_ready and self.is_live

    def note_ended(self, task: "asyncio.Task[None]") -> None:
        """If a task of it ends with an error, the engine cannot go on by itself."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._has_failed = True
            _LOG.critical("%s ended: this server cannot go on by itself", task.get_name(), exc_info=error)

    def models(self) -> tuple[ModelMetadata, ...]:
        return tuple(self._metadata(served) for served in self._served.values())

    def model(self, name: str, version: str = "") -> ModelMetadata:
        return self._metadata(self._find(name, version))

    def _metadata(self, served: _Served) -> ModelMetadata:
        metadata = served.model.metadata
        return replace(metadata, name=self._prefix + metadata.name, versions=(str(self.version),))

    def _find(self, name: str, version: str) -> _Served:
        served = self._served.get(name)
        if served is None and not self._served and not self._is_ready:
            raise ServeError(Status.UNAVAILABLE, "the server is not ready: it has no models yet; try again")
        if served is None:
            raise ServeError(Status.NOT_FOUND, f"there is no model {excerpt(name)}; {nearest(name, self._served)}")
        if version not in ("", str(self.version)):
            raise ServeError(Status.NOT_FOUND, f"version {excerpt(version)} is not served; {self.version} is")
        return served

    async def infer(self, request: InferRequest) -> InferResponse:
        started = time.monotonic()
        try:
            response = await self._infer(request, started)
        except asyncio.CancelledError:
            log_request(request, "CANCELLED", time.monotonic() - started)
            raise
        except Exception as error:
            failure = error if isinstance(error, ServeError) else ServeError(Status.INTERNAL, _FAILED)
            if failure is not error:
                _LOG.exception("a request to model %s failed", excerpt(request.model), extra={"request_id": request.id})
            seconds = time.monotonic() - started
            self._metrics.answered(request.model, request.protocol, failure.status, seconds)
            log_request(request, failure.status.grpc, seconds, version=str(self.version), error=failure)
            if failure is error:
                raise
            raise failure from error
        seconds = time.monotonic() - started
        self._metrics.answered(request.model, request.protocol, None, seconds)
        log_request(request, "OK", seconds, version=response.version)
        return response

    async def _infer(self, request: InferRequest, started: float) -> InferResponse:
        if not self._is_ready:
            raise ServeError(Status.UNAVAILABLE, "the server is not ready; try again, or another one")
        default = started + self._config.request_seconds
        deadline = default if request.deadline is None else request.deadline
        ran = await self._run(request, deadline, is_counted=bool(self._config.sources))  # else none asks for counts
        if request.version not in ("", ran.version):
            raise ServeError(
                Status.NOT_FOUND, f"version {excerpt(request.version)} is not served any more; {ran.version} is"
            )
        outputs = ran.outputs
        for name in request.outputs:
            if name not in outputs:
                raise ServeError(Status.INVALID, f"there is no output {excerpt(name)}; {nearest(name, outputs)}")
        if request.outputs:
            outputs = {name: outputs[name] for name in request.outputs}
        return InferResponse(model=request.model, version=ran.version, id=request.id, outputs=outputs)

    async def score(self, inputs: Mapping[str, InferTensor]) -> tuple[Any, int]:
        """As of ``watch.Score``; not counted among clients' requests."""
        request = InferRequest(model=f"{self._prefix}ranking", inputs=inputs)
        ran = await self._run(request, time.monotonic() + self._config.request_seconds)
        return ran.outputs["probabilities"].data, int(ran.version)

    async def watch_loss(self) -> None:
        """Measure the loss of each version once it is served, until cancelled."""
        while self._config.watch:
            await asyncio.sleep(_WATCH_SECONDS)
            watched = self.watched
            if watched is None or not self._is_ready or (watched.last and watched.last.commit_id == self.commit_id):
                continue
            try:
                await watched.measure()
            except Exception as error:  # it is told, and a server goes on without
                _LOG.warning("the watched loss of version %d is not measured: %s", self.version, error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _run(self, request: InferRequest, deadline: float, *, is_counted: bool = False) -> _Ran:
        while True:
            served = self._find(request.model, request.version)
            if sum(tensor.data.size for tensor in request.inputs.values()) > LONG_IDS:
                async with self._is_parsing:  # one at a time: ids become int64, which nobody counts
                    query = await asyncio.to_thread(served.model.parse, request.inputs)
            else:
                query = served.model.parse(request.inputs)
            try:
                ran: _Ran = await served.batcher.submit(query, deadline, request.client)
                if is_counted:
                    jagged: Any = getattr(query, "jagged", query)
                    self.row_counts.note(served.model.tables, jagged.lengths, jagged.values, jagged.outside)
                return ran
            except ServeError as error:
                # Unless another model has taken this one's place, of which it has to be asked again.
                if error.status is not Status.UNAVAILABLE or self._served.get(request.model) is served:
                    raise

    # Versions

    async def follow(self) -> None:
        """Move to each newer commit as it comes, until cancelled."""
        said = ""
        while self._config.follow_seconds:
            await asyncio.sleep(self._config.follow_seconds)
            if self._store is None:  # who makes a replica's first version says when it is whole
                continue
            try:
                await self.refresh()
                said = ""
            except Exception as error:
                if str(error) != said:  # and not each second the same
                    said = str(error)
                    trace = None if isinstance(error, TierstoreError | ValueError | OSError) else error
                    until = " until this server is started again" if isinstance(error, StoreReplacedError) else ""
                    message = "version %d goes on to be served%s; to move on failed: %s"
                    _LOG.error(message, self.version, until, said, exc_info=trace)
                await asyncio.sleep(_RETRY_SECONDS)

    async def refresh(self) -> int:
        """Move to the newest commit now; returns the version then served."""
        async with self._moving:
            try:
                return await self._move()
            except Exception:
                self._metrics.update_failed()
                self._stale_since = self._stale_since or time.monotonic()
                raise

    async def _move(self) -> int:
        if self.is_draining:
            return self.version
        if self._store is None:
            await self.start()
            return self.version
        started = time.monotonic()
        found = await _in(self._looker, self._store.find_newer)
        if found is None:
            self._stale_since = None
            return self.version
        origin = origin_of(found.version.extra)  # of a replica, clients see the source's numbers
        self.newest_version = found.version.number if origin is None else origin.version
        self._stale_since = started
        await _in(self._executor, self._show, found)
        self._serve_models()
        self._stale_since = None
        self._metrics.updated(time.monotonic() - started)
        return self.version

    def _show(self, newer: Newer) -> None:
        """Move the store and the models, in the executor; ``version`` is what the store shows, also after an error."""
        store, models = self._store, self._models
        try:
            assert store is not None
            assert models is not None
            try:
                models.show(newer)
            finally:
                self._note_shown(store)
        finally:
            newer.close()

    # What is reported of it

    def state(self) -> State:
        """Tiers, versions and models as they are now, for metrics."""
        store, stale_since, event_time = self._store, self._stale_since, self._event_time
        tiers = _NOTHING
        with contextlib.suppress(TierstoreError):  # closed meanwhile
            tiers = tiers if store is None else store.stats()
        return State(
            live=self.is_live,
            ready=self.is_ready,
            version=self.version,
            newest_version=self.newest_version,
            staleness_seconds=0.0 if stale_since is None else time.monotonic() - stale_since,
            tiers=tiers,
            queued_samples={name: served.batcher.num_waiting_samples for name, served in self._served.items()},
            watch=None if self.watched is None else self.watched.last,
            event_time_seconds=event_time,
            event_to_served_seconds=None if event_time is None else self._event_served_at - event_time,
        )

    def extra(self) -> Mapping[str, Any]:
        """``extra`` of the version that is served; empty if there is none yet."""
        store = self._store
        return {} if store is None else store.extra


async def _in(executor: Executor, work: Callable[..., _T], *arguments: Any) -> _T:
    return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)

"""All that a server serves, at one version of its store at a time.

One thread, the *executor*, runs every batch of every model and, between two batches, has the store show a newer
version. So no batch sees two versions, and no request is split over batches: an answer is of one version, the one
it names. A second thread looks for newer commits and reads what changed, while batches run.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from ..errors import StoreNotFoundError, TierstoreError
from ..excerpt import excerpt
from ..manifest import MANIFEST_NAME
from ..newer import Newer
from ..opening import open_store
from ..stats import Stats, TierStats
from ..store import Store
from ..updates.origin import origin_of
from .base import Model
from .batching import Batcher, BatchingConfig, BatchResult
from .config import ServeConfig
from .hot_rows import hot_rows, hot_rows_path, load_hot_rows, rows_of_trace, save_hot_rows, warm_up
from .logs import log_refused, log_request
from .messages import InferRequest, InferResponse, ModelMetadata, ServeError, Status
from .metrics import Metrics
from .models import Models, make_models
from .names import nearest
from .source import PooledStats, TableInfo

__all__ = ["StoreEngine"]

_LOG: Final = logging.getLogger("tierstore.serve")
_T = TypeVar("_T")


class StoreEngine:
    """The engine, what monitoring looks at, and what an operator may ask. Its coroutines are for one event loop.

    Args:
        config: see there.
        metrics: told of what happens.
    """

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(1, "tierstore-serve")
        self._looker = ThreadPoolExecutor(1, "tierstore-follow")
        self._batching = BatchingConfig(
            max_batch_samples=config.max_batch_samples,
            max_delay_us=config.max_delay_us,
            max_queue_samples=config.max_queue_samples,
            max_queue_requests=config.max_queue_requests,
        )
        self._store: Store | None = None
        self._models = Models({}, None)
        self._batchers: dict[str, Batcher] = {}
        self._version = 0
        self._newest = 0
        self._stale_since: float | None = None
        self._moving = asyncio.Lock()
        self._before = Stats(TierStats(), TierStats(), TierStats())
        self._roll_back: Callable[[], Awaitable[int]] | None = None
        self._is_ready = False
        self._is_draining = False
        self.is_live = True

    # Starting and stopping

    async def start(self) -> None:
        """Open the store, if there is one, bring its hot rows in, and be ready.

        Raises:
            StoreNotFoundError: there is no store, and it is no replica that waits for its first update.
            TierstoreError, ValueError: as ``tierstore.open``.
        """
        try:
            await self._in(self._executor, self._open)
        except StoreNotFoundError:
            if not self._config.updates:
                raise
            _LOG.info("there is no store at %s yet: waiting for the first update", self._config.store)
            return
        self._make_batchers()
        self._is_ready = not self._is_draining

    async def _in(self, executor: ThreadPoolExecutor, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)

    def _open(self) -> None:
        config = self._config
        if config.updates and not (Path(config.store) / MANIFEST_NAME).exists():
            raise StoreNotFoundError(f"no store at {config.store}")
        store = open_store(
            config.store,
            mode="r",
            ddr=config.ddr,
            policy=config.policy,
            threads=config.threads or None,
            dtype=config.dtype,
        )
        try:
            if not store.version:
                raise StoreNotFoundError(f"{store.directory} has no commit yet; train first, or commit once")
            self._models = self._make_models(store)
            self._warm_up(store)
        except BaseException:
            store.close()
            raise
        self._store = store
        self._version = self._newest = _shown_version(store.version, store.extra)
        _LOG.info("serving version %d of %s: %s", self._version, store.directory, ", ".join(self._models.by_name))

    def _make_models(self, store: Store) -> Models:
        config = self._config
        return make_models(store, out_of_range=config.out_of_range, count=self._metrics.out_of_range)

    def _warm_up(self, store: Store) -> None:
        if self._config.warm_up == "none":
            return
        started = time.perf_counter()
        is_auto = self._config.warm_up == "auto"
        rows = load_hot_rows(hot_rows_path(store.directory)) if is_auto else rows_of_trace(Path(self._config.warm_up))
        count = warm_up(store, rows, lambda: self._is_draining)
        _LOG.info("%d rows are in memory after %.1f s of warm-up", count, time.perf_counter() - started)

    def _make_batchers(self) -> None:
        """Batchers for the models of now; who waits for others is told to ask again."""
        for batcher in self._batchers.values():
            batcher.close()
        self._metrics.know(self._models.by_name)
        self._batchers = {
            name: Batcher(name, self._runner(model), self._executor, self._batching, observer=self._metrics)
            for name, model in self._models.by_name.items()
        }

    def _runner(self, model: Model) -> Callable[[Sequence[Any]], BatchResult]:
        return lambda queries: BatchResult(str(self._version), model.run(queries))

    async def stop(self) -> None:
        """Answer what came, within ``grace_seconds``, then close the store; its hot rows are kept for next time."""
        self._is_draining, self._is_ready = True, False
        batchers = self._batchers.values()
        await asyncio.gather(*(batcher.drain(self._config.grace_seconds) for batcher in batchers))
        await self._in(self._executor, self._close)
        self._looker.shutdown()
        self._executor.shutdown()

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is None:
            return
        self._before = store.stats()
        if self._config.warm_up == "auto":
            save_hot_rows(hot_rows_path(store.directory), hot_rows(store))
        store.close()

    # Engine

    @property
    def is_ready(self) -> bool:
        """See ``Engine``."""
        return self._is_ready

    def models(self) -> tuple[ModelMetadata, ...]:
        """See ``Engine``."""
        return tuple(model.metadata(str(self._version)) for model in self._models.by_name.values())

    def model(self, name: str, version: str = "") -> ModelMetadata:
        """See ``Engine``."""
        return self._find(name, version).metadata(str(self._version))

    def _find(self, name: str, version: str) -> Model:
        model = self._models.by_name.get(name)
        if model is None:
            raise ServeError(
                Status.NOT_FOUND, f"there is no model {excerpt(name)}; {nearest(name, self._models.by_name)}"
            )
        if version not in ("", str(self._version)):
            raise ServeError(Status.NOT_FOUND, f"version {excerpt(version)} is not served; {self._version} is")
        return model

    async def infer(self, request: InferRequest) -> InferResponse:
        """See ``Engine``."""
        started = time.monotonic()
        status: Status | None = None
        try:
            return await self._infer(request, started)
        except ServeError as error:
            status = error.status
            if request.protocol != "grpc":  # whose front logs its requests itself
                log_request(request, status.grpc, time.monotonic() - started, version=str(self._version), error=error)
            raise
        except Exception as error:
            status = Status.INTERNAL
            _LOG.exception("a request to model %s failed", excerpt(request.model))
            raise ServeError(status, "the server failed; its log says why") from error
        finally:
            self._metrics.answered(request.model, request.protocol, status, time.monotonic() - started)

    async def _infer(self, request: InferRequest, started: float) -> InferResponse:
        if not self._is_ready:
            raise ServeError(Status.UNAVAILABLE, "the server is not ready; try again, or another one")
        model = self._find(request.model, request.version)
        query = model.parse(request.inputs)
        default = started + self._config.request_seconds
        deadline = default if request.deadline is None else request.deadline
        ran = await self._batchers[request.model].submit(query, deadline)
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

    def note_refused(self, protocol: str, error: Exception) -> None:
        """See ``Engine``."""
        status = error.status if isinstance(error, ServeError) else None
        self._metrics.refused(protocol, status)
        if isinstance(error, ServeError) and protocol != "grpc":
            log_refused(protocol, error)

    # Versions

    async def follow(self) -> None:
        """Move to each newer commit as it comes, until cancelled."""
        while self._config.follow_seconds:
            await asyncio.sleep(self._config.follow_seconds)
            try:
                await self.refresh()
            except (TierstoreError, ValueError, OSError) as error:
                self._metrics.update_failed()
                _LOG.error("version %d goes on to be served; to move on failed: %s", self._version, error)
                await asyncio.sleep(1.0)

    async def refresh(self) -> int:
        """Move to the newest commit now; returns the version then served."""
        async with self._moving:
            if self._store is None:
                if not self._is_draining:
                    await self.start()
                return self._version
            found = await self._in(self._looker, self._look)
            if found is None:
                return self._version
            started = time.monotonic()
            self._newest = _shown_version(found.version.number, found.version.extra)
            self._stale_since = started
            remade = await self._in(self._executor, self._show, found)
            if remade:
                self._make_batchers()
            self._stale_since = None
            self._metrics.updated(self._version, time.monotonic() - started)
            return self._version

    def _look(self) -> Newer | None:
        store = self._store
        return None if store is None else store.find_newer()

    def _show(self, newer: Newer) -> bool:
        """Move the store, in the executor; whether there are other models then."""
        store = self._store
        if store is None:
            newer.close()
            return False
        tables, ranking = list(store.tables), self._models.ranking
        weights = newer.tensors() if ranking is not None else {}
        newer.show()
        if list(store.tables) == tables and (ranking is None or ranking.is_of(store.extra)):
            if ranking is not None:
                ranking.load(weights)
            remade = False
        else:
            self._models, remade = self._make_models(store), True
        self._version = _shown_version(store.version, store.extra)
        return remade

    async def rollback(self) -> int:
        """See ``Admin``."""
        if self._roll_back is None:
            raise ServeError(
                Status.INVALID,
                "this server follows its trainer: go back there, with tierstore rollback, and it follows",
            )
        return await self._roll_back()

    def set_rollback(self, roll_back: Callable[[], Awaitable[int]]) -> None:
        """How a replica's version is gone back to."""
        self._roll_back = roll_back

    async def drain(self) -> None:
        """See ``Admin``."""
        self._is_draining, self._is_ready = True, False

    # Source

    @property
    def version(self) -> int:
        """See ``Source``."""
        return self._version

    @property
    def newest_version(self) -> int:
        """See ``Source``."""
        return self._newest

    @property
    def staleness_seconds(self) -> float:
        """See ``Source``."""
        since = self._stale_since
        return 0.0 if since is None else time.monotonic() - since

    def stats(self) -> Stats:
        """See ``Source``."""
        store = self._store
        try:
            return self._before if store is None else store.stats()
        except TierstoreError:  # closed meanwhile
            return self._before

    def pooled(self) -> PooledStats | None:
        """See ``Source``."""
        return None

    def tables(self) -> Sequence[TableInfo]:
        """See ``Source``."""
        store = self._store
        return [
            TableInfo(name, table.config.num_embeddings, table.config.embedding_dim, table.layout.dtype)
            for name, table in (() if store is None else store.tables.items())
        ]

    def queued_samples(self) -> Mapping[str, int]:
        """See ``Source``."""
        return {name: batcher.num_waiting_samples for name, batcher in self._batchers.items()}

    @property
    def extra(self) -> Mapping[str, Any]:
        """``extra`` of the version that is served; empty if there is none yet."""
        store = self._store
        return {} if store is None else store.extra


def _shown_version(number: int, extra: Mapping[str, Any]) -> int:
    """What clients are told: of a replica, the number that the version has at its source."""
    origin = origin_of(extra)
    return number if origin is None else origin.version

"""The stores of a server, by name: what it serves, and which of that is loaded.

Each store is an engine of its own, with its own thread, queues and part of the memory. Their batches take turns.
"""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..pool.stats import total
from ..settings.sections import nearest
from ..store.directory import open_files
from ..system.checks import excerpt
from ..system.sizes import is_share_of_tables, parse_size
from .bearer_token import Token
from .config import ServeConfig
from .engine import StoreEngine
from .logs import log_refused
from .messages import InferRequest, InferResponse, ModelMetadata, ServeError, Status
from .metrics import Metrics, State


def configs_of(config: ServeConfig) -> dict[str, ServeConfig]:
    """The settings of each store by its name. Stores without ``ddr`` of their own share the server's: a quarter evenly,
    so that a small one has what it needs, the rest by the bytes of their tables' weights. Errors as of ``open_files``.
    """
    configs = config.by_store()
    sharing = [each.called for each in config.stores if not each.ddr]
    if len(sharing) < 2 or is_share_of_tables(config.ddr):
        return configs
    sizes = {name: max(1, _table_bytes(Path(configs[name].store))) for name in sharing}
    budget, whole = parse_size(config.ddr, name="ddr"), sum(sizes.values())
    even, rest = budget // 4 // len(sizes), budget - budget // 4
    return configs | {name: replace(configs[name], ddr=even + rest * size // whole) for name, size in sizes.items()}


def _table_bytes(directory: Path) -> int:
    opened = open_files(directory, readonly=True)
    try:
        return sum(layout.weight_bytes * num_rows for layout, num_rows in opened.manifest.shapes.values())
    finally:
        opened.cold.close()


class Repository:
    """What REST and gRPC ask, over the engines of the stores; for the event loop. Live: it can recover by itself.
    Ready: it takes requests. Errors as of ``configs_of``.

    Attributes:
        store_names: of several stores, with one of which and a dot each model's name begins; of one store none.
        admin_token: what calls to ``change`` must show; None: there are none.
    """

    def __init__(self, config: ServeConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        configs = configs_of(config)
        self.store_names = tuple(configs) if len(configs) > 1 else ()
        prefix = "{}." if self.store_names else ""
        turn = threading.Lock()
        self.engines: Final = {
            name: StoreEngine(each, metrics, turn, prefix.format(name)) for name, each in configs.items()
        }
        self.only: Final = next(iter(self.engines.values()))  # or the first
        self.admin_token = Token(config.admin_token or "") if config.model_control == "explicit" else None
        self._changes: set[asyncio.Task[None]] = set()

    # Starting and stopping

    async def start(self) -> None:
        """As of each engine, one after the other."""
        for each in self.engines.values():
            await each.start()

    async def begin_to_stop(self) -> None:
        for each in self.engines.values():
            await each.begin_to_stop()

    async def stop(self) -> None:
        ended = await asyncio.gather(*(each.stop() for each in self.engines.values()), return_exceptions=True)
        for error in filter(None, ended):
            raise error

    # Engine

    @property
    def is_live(self) -> bool:
        return all(each.is_live for each in self.engines.values())

    @property
    def is_ready(self) -> bool:
        return all(each.is_ready or (each.absent and not each.is_draining) for each in self.engines.values())

    def models(self) -> tuple[ModelMetadata, ...]:
        return tuple(model for each in self.engines.values() for model in each.models())

    def index(self) -> list[dict[str, str]]:
        """All models as Triton lists them."""
        return [entry for each in self.engines.values() for entry in each.index()]

    def _of(self, model: str) -> StoreEngine:
        """The engine that has the model, or knows that there is none."""
        return self.engines.get(model.partition(".")[0], self.only)

    def model(self, name: str, version: str = "") -> ModelMetadata:
        """ServeError NOT_FOUND, with the nearest name or the version that is served."""
        return self._of(name).model(name, version)

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Of a model, or by its name of one of several stores; ``model``'s ServeError, if it has one."""
        engine = self.engines.get(name) or self._of(name)
        if name not in self.engines:
            engine.model(name, version)
        return engine.is_ready

    def statistics(self, name: str) -> dict[str, Any]:
        return self._metrics.statistics(name)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer, or ServeError and nothing else; to cancel the task takes the request back."""
        return await self._of(request.model).infer(request)

    def note_refused(self, protocol: str, error: ServeError, request_id: str = "") -> None:
        """Count a request ("http" or "grpc") that was refused before it could be asked here."""
        self._metrics.refused(protocol, error.status)
        log_refused(protocol, error, request_id)

    async def change(self, what: str, store: str) -> None:
        """ "unload" a store: answer what came and free its memory; or "load" it, or its newest commit if it is there.
        It goes on if the client leaves. ServeError NOT_FOUND, or UNAVAILABLE: it cannot be opened."""
        engine = self.engines.get(store)
        if engine is None:
            hint = nearest(store, self.engines)
            raise ServeError(Status.NOT_FOUND, f"there is no store {excerpt(store)}, which come and go whole; {hint}")
        task = asyncio.create_task(engine.load() if what == "load" else engine.unload())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    # What an operator may ask, and what is reported

    async def refresh(self) -> int | dict[str, int]:
        """The version then served; of several stores, by name."""
        versions = await asyncio.gather(*(each.refresh() for each in self.engines.values()))
        return dict(zip(self.engines, versions, strict=True)) if self.store_names else versions[0]

    def state(self) -> State:
        """Of several stores: the sums, and the version that is furthest behind."""
        states = {name: each.state() for name, each in self.engines.items()}
        if not self.store_names:
            return self.only.state()
        behind = max(states.values(), key=lambda each: each.staleness_seconds)
        return behind._replace(
            live=self.is_live,
            ready=self.is_ready,
            tiers=total([each.tiers for each in states.values()]),
            queued_samples={name: count for each in states.values() for name, count in each.queued_samples.items()},
            stores=states,
            watch=None,
        )

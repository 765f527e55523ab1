"""The stores of a server, by name, and what REST and gRPC do alike around a request.

Each store is an engine of its own, with its own thread, queues and part of the memory. Their batches take turns. A
``Front`` says who may ask, what is refused, and how much is held of answers.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..pool.stats import total
from ..store.directory import open_files
from ..system import __version__
from ..system.sizes import is_share_of_tables, parse_size
from .config import ServeConfig
from .credentials import Token
from .engine import StoreEngine
from .limits import LARGE_RESPONSE_BYTES, Budget, Hold, Limits
from .logs import log_refused
from .messages import InferRequest, InferResponse, ModelMetadata, ServeError, Status, TensorSpec
from .metrics import Metrics, State

DATA_TYPES: Final = {"TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_STRING": 13}
"""By the names in JSON, the numbers over gRPC."""
SERVER: Final = {
    "name": "tierstore",
    "version": __version__,
    "extensions": ["binary_tensor_data", "model_configuration"],
}
"""The server's metadata."""


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
        return all(each.is_ready for each in self.engines.values())

    def index(self) -> list[dict[str, str]]:
        """All models as Triton lists them."""
        return [
            {"name": model.name, "version": model.versions[-1], "state": "READY" if each.is_ready else "UNAVAILABLE"}
            for each in self.engines.values()
            for model in each.models()
        ]

    def _of(self, model: str) -> StoreEngine:
        """The engine that has the model, or knows that there is none."""
        return self.engines.get(model.partition(".")[0], self.only)

    def model(self, name: str, version: str = "") -> ModelMetadata:
        """ServeError NOT_FOUND, with the nearest name or the version that is served."""
        return self._of(name).model(name, version)

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """As of ``model``, with its ServeError."""
        self.model(name, version)
        return self._of(name).is_ready

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer, or ServeError and nothing else; to cancel the task takes the request back."""
        return await self._of(request.model).infer(request)

    def note_refused(self, protocol: str, error: ServeError, request_id: str = "") -> None:
        """Count a request ("http" or "grpc") that was refused before it could be asked here."""
        self._metrics.refused(protocol, error.status)
        log_refused(protocol, error, request_id)

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


class _NotingRefusals:
    """A context; a class, as it is entered several times a request and a generator's takes microseconds."""

    def __init__(self, engine: Repository, protocol: str, request_id: str) -> None:
        self._told = engine, protocol, request_id

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ServeError):
            engine, protocol, request_id = self._told
            engine.note_refused(protocol, error, request_id)


class Front:
    """One protocol's side of the engine: "http" or "grpc". Requests must show the token, but for those about health.
    ValueError: a token that cannot be sent."""

    def __init__(self, engine: Repository, protocol: str, limits: Limits, token: str | None) -> None:
        self.engine: Final = engine
        self.limits: Final = limits
        self.requests: Final = Budget(limits.bodies_bytes, "the requests under way hold {} bytes")
        names = engine.store_names
        self._least = limits.bodies_bytes // (limits.calls if protocol == "grpc" else limits.connections)
        part = max(limits.bodies_bytes // max(1, len(names)), limits.body_bytes + self._least)
        full = "store {!r} has its part of the requests under way, {{}} bytes"
        self._parts = {name: Budget(part, full.format(name)) for name in names}
        self.unsent: Final = Budget(limits.responses_bytes, "clients have yet to accept {} bytes")
        self._nothing_unsent = self.unsent.hold()
        self._protocol = protocol
        self._token = None if token is None else Token(token)

    @property
    def wants_token(self) -> bool:
        return self._token is not None

    def noting_refusals(self, request_id: str = "") -> "_NotingRefusals":
        return _NotingRefusals(self.engine, self._protocol, request_id)

    def require_token(self, shown: Sequence[str | bytes], way_out: str) -> None:
        """ServeError UNAUTHENTICATED unless these values of a request's "authorization" show the token."""
        if self._token is not None and not self._token.is_shown(shown):
            with self.noting_refusals():
                raise ServeError(Status.UNAUTHENTICATED, way_out)

    def hold_request(self, model: str) -> Hold:
        """A request's part of what may be under way. Of several stores each has its own, where any request counts as
        ``_least`` more: so the queue of one leaves calls and connections to the others."""
        part = self._parts.get(model.partition(".")[0])
        return self.requests.hold() if part is None else part.hold(self._least)

    def require_few(self, num_elements: int, form: str, way_out: str) -> None:
        """ServeError TOO_LARGE for a response that has more numbers than are encoded one by one."""
        if num_elements > self.limits.elements:
            raise ServeError(
                Status.TOO_LARGE,
                f"the response has {num_elements} numbers, and {self.limits.elements} are sent as {form}; {way_out}, "
                "or for less at once",
            )

    def hold_unsent(self, size: int) -> Hold:
        """A large response's part of what clients may leave unaccepted."""
        return self.unsent.hold(size) if size > LARGE_RESPONSE_BYTES else self._nothing_unsent

    def config(self, name: str, version: str) -> dict[str, Any]:
        """A model as Triton describes it; ServeError NOT_FOUND. ``max_batch_size`` is 0: the shapes have their batch
        dimension."""

        def described(spec: TensorSpec) -> dict[str, Any]:
            kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
            return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape)}

        model = self.engine.model(name, version)
        return {
            "name": model.name,
            "platform": model.platform,
            "backend": model.platform,
            "max_batch_size": 0,
            "input": [described(spec) for spec in model.inputs],
            "output": [described(spec) for spec in model.outputs],
            "parameters": {name: {"string_value": str(value)} for name, value in model.parameters.items()},
        }

"""The server's two contracts: what a model is to the batcher, and what the engine is to REST and gRPC."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from ..store import Table
from .bearer_token import Token
from .messages import InferRequest, InferResponse, InferTensor, ModelMetadata, ServeError

Outputs = dict[str, InferTensor]
Pause = Callable[[], None]
"""Lets short queries run between two parts of a long one. Raises ServeError if nobody waits for the long one."""
LONG_IDS: Final = 32_768
"""A query of more ids is run by itself, in parts: a millisecond of rows in memory, some 50 of rows on SSD."""


class Query(Protocol):
    """A request's inputs, checked, as its model wants them."""

    @property
    def num_samples(self) -> int: ...

    @property
    def num_ids(self) -> int: ...


class Model:
    """One model. ``parse`` may run in any thread, the others in one at a time, and not while the store changes."""

    metadata: ModelMetadata
    """Without versions: the engine knows which is served."""

    tables: Sequence[Table]
    """Of each feature whose ids its queries hold, in their order."""

    def parse(self, inputs: Mapping[str, InferTensor]) -> Any:
        """Check a request's inputs; ServeError INVALID names the input."""
        raise NotImplementedError

    def answer_at_once(self, query: Any) -> Outputs | None:  # noqa: ARG002 - most take longer
        """What ``run`` gives of this query alone, if that takes some 0.1 ms and reads nothing from SSD; else None."""
        return None

    def run(self, queries: Sequence[Any], pause: Pause | None = None) -> Sequence[Outputs | ServeError]:
        """The outputs of each query, as if it were alone, or its error; with ``pause`` rows are looked up in parts."""
        raise NotImplementedError


class Engine(Protocol):
    """All that is served, at one version at a time; for the event loop. Live: it can recover by itself. Ready: it
    takes requests."""

    @property
    def is_live(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def admin_token(self) -> Token | None:
        """What calls to ``change`` must show; None: there are none."""

    @property
    def store_names(self) -> Collection[str]:
        """Of several stores: each model's name begins with one and a dot. None of one store."""

    def models(self) -> tuple[ModelMetadata, ...]: ...

    def index(self) -> list[dict[str, str]]:
        """All models as Triton lists them."""

    def model(self, name: str, version: str = "") -> ModelMetadata:
        """ServeError NOT_FOUND, with the nearest name or the version that is served."""

    def require(self, name: str, version: str = "") -> None:
        """``model``'s ServeError, if it has one."""

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Of a model, or by its name of one of several stores; ``model``'s ServeError, if it has one."""

    async def change(self, what: str, store: str) -> None:
        """ "unload" a store: answer what came and free its memory; or "load" it, or its newest commit if it is there.
        ServeError NOT_FOUND, or UNAVAILABLE: it cannot be opened."""

    def statistics(self, name: str) -> dict[str, Any]:
        """Of a model since the server started, as Triton has them."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer, or ServeError and nothing else; to cancel the task takes the request back."""

    def note_refused(self, protocol: str, error: ServeError, request_id: str = "") -> None:
        """Count a request ("http" or "grpc") that was refused before it could be asked here."""

"""The server's two contracts: what a model is to the batcher, and what the engine is to REST and gRPC."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from .messages import InferRequest, InferResponse, InferTensor, ModelMetadata, ModelStatistics, ServeError

Outputs = dict[str, InferTensor]
Pause = Callable[[], None]
"""Lets short queries run between two parts of a long one. Raises ServeError if nobody waits for the long one."""
LONG_IDS: Final = 32_768
"""A query of more ids is run by itself, in parts: a millisecond of rows in memory, some 50 of rows on SSD."""


class Query(Protocol):
    """A request's inputs, checked, as its model wants them; ``num_samples``, at least 1, is what they count for."""

    @property
    def num_samples(self) -> int: ...

    @property
    def num_ids(self) -> int: ...


class Model(Protocol):
    """One model. ``parse`` may run in any thread, the others in one at a time, and not while the store changes."""

    metadata: ModelMetadata
    """Without versions: it is for the engine to say which is served."""

    def parse(self, inputs: Mapping[str, InferTensor]) -> Query:
        """Check a request's inputs.

        Raises:
            ServeError: INVALID; names the input and what is wrong with it.
        """

    def answer_at_once(self, query: Any) -> Outputs | None:
        """What ``run`` gives of this query alone, if that takes some 0.1 ms and reads nothing from SSD; else None."""

    def run(self, queries: Sequence[Any], pause: Pause | None = None) -> Sequence[Outputs | ServeError]:
        """The outputs of each query, or why it has none; all are computed as one batch, and each as if it were alone in
        it. With ``pause`` rows are looked up in parts, and it is called between them."""


class Engine(Protocol):
    """Everything that is served, at one version of the store at a time. Its methods are for the event loop. It is live
    while it can recover by itself, and ready while it takes requests: warmed up, and not draining."""

    @property
    def is_live(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    def models(self) -> tuple[ModelMetadata, ...]:
        """All of them, by name."""

    def model(self, name: str, version: str = "") -> ModelMetadata:
        """ServeError NOT_FOUND, with the nearest name or the version that is served."""

    def require(self, name: str, version: str = "") -> None:
        """The ServeError of ``model``, if it has one."""

    def statistics(self, name: str) -> ModelStatistics:
        """Of a model that there is."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer; to cancel the task takes the request back.

        Raises:
            ServeError: for all that can go wrong; nothing else.
        """

    def note_refused(self, protocol: str, error: ServeError, request_id: str = "") -> None:
        """Count a request ("http" or "grpc") that was refused before it could be asked here."""

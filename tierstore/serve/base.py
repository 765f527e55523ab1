"""What a model is to the batcher."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..store import Table
from .messages import InferTensor, ModelMetadata, ServeError

Outputs = dict[str, InferTensor]
Pause = Callable[[], None]
"""Lets short queries run between two parts of a long one. Raises ServeError if nobody waits for the long one."""
LONG_IDS: Final = 32_768
"""A query of more ids is run by itself, in parts: a millisecond of rows in memory, some 50 of rows on SSD."""


class Model:
    """One model. ``parse`` may run in any thread, the others in one at a time, and not while the store changes."""

    metadata: ModelMetadata
    """Without versions: the engine knows which is served."""

    tables: Sequence[Table]
    """Of each feature whose ids its queries hold, in their order."""

    def parse(self, inputs: Mapping[str, InferTensor]) -> Any:
        """A request's inputs, checked, as the model wants them, and with ``num_samples`` and ``num_ids``; ServeError
        INVALID names the input."""
        raise NotImplementedError

    def answer_at_once(self, query: Any) -> Outputs | None:  # noqa: ARG002 - most take longer
        """What ``run`` gives of this query alone, if that takes some 0.1 ms and reads nothing from SSD; else None."""
        return None

    def run(self, queries: Sequence[Any], pause: Pause | None = None) -> Sequence[Outputs | ServeError]:
        """The outputs of each query, as if it were alone, or its error; with ``pause`` rows are looked up in parts."""
        raise NotImplementedError

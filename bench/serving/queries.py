"""Requests, made before the load that sends them: a ranking model's queries, lookups of rows, by each protocol."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tierstore.serve.client import encode_request
from tierstore.serve.grpc.messages import message_class
from tierstore.serve.tensors import JSON_LENGTH_HEADER

__all__ = ["DATATYPES", "QUERY_SIZES", "Query", "Ranking", "Rows", "Zipf", "encoded_grpc", "encoded_rest"]

_HEAD_RANKS: Final = 1 << 16
_SCATTER: Final = 2_654_435_761
"""A prime above any number of rows here, so that multiplying by it modulo that number permutes the rows."""
QUERY_SIZES: Final = (100,) * 2 + (200,) * 12 + (300,) * 2 + (400, 500, 600, 700)
"""Samples of a query, each a twentieth of all: the distribution of MLPerf Inference's DLRM."""
_NUM_DENSE: Final = 13
DATATYPES: Final = {"int32": "INT32", "int64": "INT64", "float32": "FP32"}


class Zipf:
    """Rows 0 to ``rows - 1`` of a table, the r-th most frequent with a weight of r to the power of ``-exponent``.

    The first ranks are drawn by their summed weights, the rest by the integral of the law, which there differs from
    the sum by less than one in a thousand million. Frequent rows are scattered over the table.

    Args:
        exponent: above 0, and not 1.
    """

    def __init__(self, rows: int, exponent: float) -> None:
        self._rows = rows
        self._power = 1 - exponent
        head = min(rows, _HEAD_RANKS)
        self._cumulated = np.cumsum(np.arange(1, head + 1, dtype=np.float64) ** -exponent)
        self._first = (head + 0.5) ** self._power
        tail = ((rows + 0.5) ** self._power - self._first) / self._power
        self._total = float(self._cumulated[-1]) + tail

    def draw(self, generator: np.random.Generator, count: int) -> Any:
        """int64 [count]."""
        places = generator.random(count) * self._total
        ranks = np.searchsorted(self._cumulated, places, side="right")
        beyond = ranks == len(self._cumulated)
        areas = places[beyond] - self._cumulated[-1]
        tail = (self._first + self._power * areas) ** (1 / self._power)
        ranks[beyond] = np.minimum((tail + 0.5).astype(np.int64) - 1, self._rows - 1)
        return ranks.astype(np.int64) * _SCATTER % self._rows


class Query(NamedTuple):
    """One request's model and inputs."""

    model: str
    inputs: Mapping[str, Any]


def _sizes(generator: np.random.Generator, count: int) -> Any:
    """Samples of each of ``count`` queries: every size as often as it is due, in random order. A longer list begins
    with the shorter one."""
    blocks = [generator.permutation(QUERY_SIZES) for _ in range(-(-count // len(QUERY_SIZES)))]
    return np.concatenate([np.empty(0, np.int64), *blocks])[:count]


class Ranking:
    """Queries of model "ranking", one id a feature."""

    def __init__(self, rows: Sequence[int], exponent: float) -> None:
        self._laws = [Zipf(each, exponent) for each in rows]

    def draw(
        self, generator: np.random.Generator, count: int, *, sizes_from: np.random.Generator | None = None
    ) -> list[Query]:
        """Of the sizes in ``QUERY_SIZES``; ids are drawn for each again.

        Args:
            sizes_from: draws the sizes alone, so that they can be drawn again.
        """
        sizes = _sizes(sizes_from or generator, count)
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        ids = np.stack([law.draw(generator, int(bounds[-1])) for law in self._laws])
        dense = generator.integers(0, 1000, (int(bounds[-1]), _NUM_DENSE)).astype(np.float32)
        return [
            Query(
                "ranking",
                {
                    "dense": dense[first:last],
                    "values": np.ascontiguousarray(ids[:, first:last]).reshape(-1),
                    "lengths": np.ones((len(self._laws), last - first), np.int32),
                },
            )
            for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]


class Rows:
    """Lookups of one table's rows: as many ids as a query of the ranking model with so many features has."""

    def __init__(self, table: str, rows: int, exponent: float, features: int) -> None:
        self._model, self._law, self._features = f"rows.{table}", Zipf(rows, exponent), features

    def draw(self, generator: np.random.Generator, count: int) -> list[Query]:
        """``Ranking.draw``."""
        sizes = _sizes(generator, count) * self._features
        parts = np.split(self._law.draw(generator, int(sizes.sum())), np.cumsum(sizes)[:-1])
        return [Query(self._model, {"ids": ids}) for ids in parts]


def encoded_rest(query: Query) -> bytes:
    """The whole HTTP request, tensors as binary data both ways."""
    body, headers = encode_request(query.inputs, {})
    head = (
        f"POST /v2/models/{query.model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: application/octet-stream\r\n{JSON_LENGTH_HEADER}: {headers[JSON_LENGTH_HEADER]}\r\n\r\n"
    )
    return head.encode() + body


def encoded_grpc(query: Query) -> bytes:
    """A ModelInferRequest, tensors as raw contents."""
    message = message_class("ModelInferRequest")(model_name=query.model)
    for name, array in query.inputs.items():
        message.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    found: bytes = message.SerializeToString()
    return found

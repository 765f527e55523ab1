"""Requests, made before the load that sends them: a ranking model's queries, lookups of rows, by each protocol."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tierstore.plan.traces import draw_zipf
from tierstore.serve.grpc.codec import MESSAGES
from tierstore.serve.messages import JSON_LENGTH_HEADER

QUERY_SIZES: Final = (100,) * 2 + (200,) * 12 + (300,) * 2 + (400, 500, 600, 700)
"""Samples of a query, each a twentieth of all: the distribution of MLPerf Inference's DLRM."""
_NUM_DENSE: Final = 13
DATATYPES: Final = {"int32": "INT32", "int64": "INT64", "float32": "FP32"}


def drawn(generator: np.random.Generator, rows: int, exponent: float, count: int) -> Any:
    """int64 [count] rows of a table by Zipf's law; which are the frequent ones is the same for every generator."""
    return draw_zipf(rows, exponent, count, seed=int(generator.integers(1 << 62)))


class Query(NamedTuple):
    """One request's model and inputs."""

    model: str
    inputs: Mapping[str, Any]


def _sizes(generator: np.random.Generator, count: int) -> Any:
    """Samples of each of ``count`` queries: every size as often as it is due, in random order. A longer list begins
    with the shorter one."""
    blocks = [generator.permutation(QUERY_SIZES) for _ in range(-(-count // len(QUERY_SIZES)))]
    return np.concatenate([np.empty(0, np.int64), *blocks])[:count]


class Ranking(NamedTuple):
    """Queries of model "ranking", one id a feature."""

    rows: Sequence[int]
    exponent: float

    def draw(
        self,
        generator: np.random.Generator,
        count: int,
        *,
        sizes_from: np.random.Generator | None = None,
        sizes: Sequence[int] = (),
    ) -> list[Query]:
        """Of the sizes in ``QUERY_SIZES``, or as given; ids are drawn for each again. ``sizes_from`` draws the sizes
        alone, so that they can be drawn again."""
        bounds = np.cumsum([0, *(sizes or _sizes(sizes_from or generator, count))])
        ids = np.stack([drawn(generator, rows, self.exponent, int(bounds[-1])) for rows in self.rows])
        dense = generator.integers(0, 1000, (int(bounds[-1]), _NUM_DENSE)).astype(np.float32)
        return [
            Query(
                "ranking",
                {
                    "dense": dense[first:last],
                    "values": np.ascontiguousarray(ids[:, first:last]).reshape(-1),
                    "lengths": np.ones((len(ids), last - first), np.int32),
                },
            )
            for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]


class Rows(NamedTuple):
    """Lookups of one table's rows: as many ids as a query of the ranking model with so many features has."""

    table: str
    rows: int
    exponent: float
    features: int

    def draw(self, generator: np.random.Generator, count: int) -> list[Query]:
        sizes = _sizes(generator, count) * self.features
        parts = np.split(drawn(generator, self.rows, self.exponent, int(sizes.sum())), np.cumsum(sizes)[:-1])
        return [Query(f"rows.{self.table}", {"ids": ids}) for ids in parts]


def rest_body(query: Query) -> tuple[bytes, dict[str, str]]:
    """The body and headers of an HTTP request, tensors as binary data both ways."""
    inputs = [
        {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": array.shape}
        | {"parameters": {"binary_data_size": array.nbytes}}
        for name, array in query.inputs.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Content-Type": "application/octet-stream", JSON_LENGTH_HEADER: str(len(head))}
    return b"".join([head, *(array.tobytes() for array in query.inputs.values())]), headers


def encoded_rest(query: Query) -> bytes:
    """The whole HTTP request."""
    body, headers = rest_body(query)
    lines = [f"POST /v2/models/{query.model}/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "\r\n"]).encode() + body


def encoded_grpc(query: Query) -> bytes:
    """A ModelInferRequest, tensors as raw contents."""
    message = MESSAGES["ModelInferRequest"](model_name=query.model)
    for name, array in query.inputs.items():
        message.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return bytes(message.SerializeToString())


ENCODED: Final = {"rest": encoded_rest, "grpc": encoded_grpc}
"""By protocol."""

"""A client of the server, on the standard library: tensors go and come in binary, over connections that are kept.

::

    with Client("http://localhost:8000") as client:
        probabilities = client.rank(dense, values, lengths)
        rows = client.rows([3, 5], table="item")

Any client of the Open Inference Protocol does as well; this one needs nothing but numpy and torch.
"""

import contextlib
import http.client
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote, urlsplit

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..system.checks import excerpt, require_token
from ..system.processes import disown_in_forks
from .messages import NUMBERS, InferTensor, ServeError, Status
from .tensors import JSON_LENGTH_HEADER, binary_data, objects, parse_binary_data, parse_head

Values: TypeAlias = "ArrayLike | torch.Tensor"
OptionalValues: TypeAlias = "ArrayLike | torch.Tensor | None"
Tensor: TypeAlias = "NDArray[Any] | torch.Tensor"

_NAMES: Final = {dtype: name for name, dtype in NUMBERS.items()}
_STATUSES: Final = {status.http: status for status in reversed(Status)} | {503: Status.UNAVAILABLE}
_MAX_ERROR_CHARS: Final = 2000


class Answer(NamedTuple):
    """A model's outputs by name, read-only, all of the store's ``version``."""

    outputs: dict[str, NDArray[Any]]
    version: str


class _Reply(NamedTuple):
    status: int
    header_length: str | None
    body: bytes


class Client:
    """Speaks to one server. For any number of threads: each call takes a connection for itself, and leaves it idle.
    A forked process makes connections of its own.

    Every method raises ``ServeError`` if the server refuses or fails (HTTP 503 is UNAVAILABLE, also where a queue is
    full), ``TimeoutError`` if no answer comes in time, and ``ConnectionError`` if there is no server or it does not
    speak the protocol; the last two name the address.

    Args:
        url: "http://host:port" or "https://host:port".
        token: for servers that want one.
        timeout: seconds for each step of an exchange, to connect, to send, to receive.
        store: of a server of several, the one that ``rank``, ``pooled`` and ``rows`` ask.

    Raises:
        ValueError: url, token or timeout is not of this form.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30.0, store: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"url={excerpt(url.rpartition('@')[2])}: expected http://host:port or https://host:port")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: expected seconds, more than 0")
        is_tls = parts.scheme == "https"
        self._connect: Final = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        self._host: Final = parts.hostname
        self._port: Final = parts.port or (443 if is_tls else 80)
        self._timeout: Final = timeout
        self._prefix: Final = f"{store}." if store else ""
        self._headers: Final = {} if token is None else {"Authorization": f"Bearer {require_token(token)}"}
        self._idle: Final[list[http.client.HTTPConnection]] = []
        disown_in_forks(self)

    @property
    def address(self) -> str:
        """Host and port, as "localhost:8000"."""
        return f"{self._host}:{self._port}"

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections; a later call opens a new one."""
        while self._idle:
            self._idle.pop().close()

    def disown(self) -> None:
        """In a forked process: answers on these connections are the parent's."""
        self.close()

    def ready(self) -> bool:
        """Whether the server takes requests; False also while it warms up or drains."""
        reply = self._exchange("GET", "/v2/health/ready")
        if reply.status in (200, 400, 503):
            return reply.status == 200
        raise _error(reply)

    def models(self) -> list[str]:
        """Names of all models."""
        return [each["name"] for each in self._json("POST", "/v2/repository/index")]

    def metadata(self, model: str, *, version: str = "") -> dict[str, Any]:
        """The protocol's metadata: name, versions, platform, inputs, outputs, parameters."""
        return dict(self._json("GET", _path(model, version)))

    def infer(
        self, model: str, inputs: Mapping[str, Tensor], *, version: str = "", timeout: float | None = None
    ) -> Answer:
        """Ask a model.

        Args:
            inputs: by name; on any device. No dtype is converted. Arrays of strings go as BYTES.
            version: of the store, or "" for whichever is served.
            timeout: seconds, instead of the client's. The server gets it too, and drops a request that is late.

        Raises:
            ValueError: a dtype that no model takes; names the input.
        """
        seconds = self._timeout if timeout is None else timeout
        if not seconds > 0:
            raise ValueError(f"timeout={timeout}: expected seconds, more than 0")
        body, headers = encode_request(inputs, {"timeout": max(1, int(seconds * 1e6))})
        reply = self._exchange("POST", _path(model, version) + "/infer", body, headers, seconds)
        if reply.status != 200:
            raise _error(reply)
        try:
            return decode_answer(reply.body, reply.header_length)
        except ValueError as error:
            raise ConnectionError(f"{self.address}: not an answer of the protocol: {excerpt(str(error))}") from error

    def rank(self, dense: Values, values: Values, lengths: Values) -> NDArray[np.float32]:
        """Probabilities, float32 [B], of B samples.

        Args:
            dense: float32 [B, C], the dense features.
            values: int64 [N], the categories of all bags: feature by feature, and in it sample by sample. Or strings,
                if some categories are none: then integers are written as such, "17".
            lengths: int32 [F, B], ids of each bag.

        Raises:
            TypeError: values or lengths are not integers, dense no numbers. ValueError: an integer does not fit.
        """
        return self._one(
            "ranking",
            "probabilities",
            dense=_array(dense, "dense", np.float32),
            values=_categories(values),
            lengths=_array(lengths, "lengths", np.int32),
        )

    def pooled(
        self, ids: Values, lengths: Values, weights: OptionalValues = None, *, table: str
    ) -> NDArray[np.float32]:
        """Pooled rows, float32 [B, dim], of B bags of a table.

        Args:
            ids: int64 [N], bag by bag.
            lengths: int32 [B], ids of each bag.
            weights: float32 [N], of the ids of a table that pools by sum; default: ones.

        Raises:
            TypeError: ids or lengths are not integers, or weights no numbers. ValueError: one does not fit.
        """
        bags = {"ids": _array(ids, "ids", np.int64), "lengths": _array(lengths, "lengths", np.int32)}
        if weights is not None:
            bags["weights"] = _array(weights, "weights", np.float32)
        return self._one(f"pooled.{table}", "embeddings", **bags)

    def rows(self, ids: Values, *, table: str) -> NDArray[np.float32]:
        """Rows, float32 [N, dim], of a table, by ids, int64 [N]; errors as ``pooled``."""
        return self._one(f"rows.{table}", "rows", ids=_array(ids, "ids", np.int64))

    def _one(self, model: str, output: str, **inputs: Tensor) -> NDArray[np.float32]:
        answer = self.infer(self._prefix + model, inputs)
        if output not in answer.outputs:
            raise ConnectionError(f"{self.address}: model {model!r} answered without {output!r}")
        return answer.outputs[output]

    def _json(self, method: str, path: str) -> Any:
        reply = self._exchange(method, path)
        if reply.status != 200:
            raise _error(reply)
        try:
            return json.loads(reply.body)
        except ValueError as error:
            raise ConnectionError(f"{self.address}: {path} did not answer in JSON") from error

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> _Reply:
        """One request and its answer. A connection that the server closed while it was idle is replaced, once."""
        seconds = self._timeout if seconds is None else seconds
        request = method, path, body, {**self._headers, **(headers or {})}
        try:
            with contextlib.suppress(IndexError):
                idle = self._idle.pop()
                try:
                    return self._speak(idle, request, seconds)
                except (ConnectionError, http.client.BadStatusLine):
                    self.close()  # requests only read, so that asking twice does no harm
            return self._speak(self._connect(self._host, self._port), request, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{self.address}: no answer within {seconds} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"{self.address}: {str(error) or type(error).__name__}") from error

    def _speak(self, connection: http.client.HTTPConnection, request: tuple[Any, ...], seconds: float) -> _Reply:
        try:
            connection.timeout = seconds
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            connection.request(*request)
            response = connection.getresponse()
            reply = _Reply(response.status, response.headers.get(JSON_LENGTH_HEADER), response.read())
        except BaseException:
            # What is left of the answer must not be taken for the next one.
            connection.close()
            raise
        self._idle.append(connection)
        return reply


def _array(values: Values, name: str, dtype: type[np.integer[Any] | np.float32]) -> NDArray[Any]:
    """Integers as integers of that dtype, none changed, or any real numbers as float32; else TypeError or
    ValueError."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    else:
        array = np.asarray(values)
        if not array.size and not isinstance(values, np.ndarray):
            return array.astype(dtype)  # numpy takes an empty list for floats
    if issubclass(dtype, np.floating):
        if array.dtype.kind not in "iufb":
            raise TypeError(f"{name} must be real numbers, not {array.dtype}")
        return array.astype(dtype, copy=False)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers that fit {dtype.__name__}, not {array.dtype}")
    cast = array.astype(dtype, copy=False)
    if not np.array_equal(cast, array):
        raise ValueError(f"{name} must fit {dtype.__name__}; {array[cast != array][0]} does not")
    return cast


def _categories(values: Values) -> NDArray[Any]:
    if isinstance(values, torch.Tensor) or not _are_texts(array := np.asarray(values)):
        return _array(values, "values", np.int64)
    return array


def _are_texts(array: NDArray[Any]) -> bool:
    kind = array.dtype.kind
    return kind in "US" or (kind == "O" and all(isinstance(each, str | bytes) for each in array.reshape(-1).tolist()))


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _error(reply: _Reply) -> ServeError:
    try:
        message = json.loads(reply.body)["error"]
    except (ValueError, KeyError, TypeError):
        message = reply.body.decode(errors="replace")
    other = Status.INVALID if reply.status < 500 else Status.INTERNAL
    return ServeError(_STATUSES.get(reply.status, other), f"{str(message)[:_MAX_ERROR_CHARS]} (HTTP {reply.status})")


def _as_wire(name: str, tensor: Tensor) -> InferTensor:
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16:  # numpy has none
        raise ValueError(f"input {name!r}: dtype bfloat16 is none of {', '.join(map(str, _NAMES))}, str")
    array = tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
    if _are_texts(array):
        texts = [each.encode() if isinstance(each, str) else each for each in array.reshape(-1).tolist()]
        return InferTensor("BYTES", objects(texts).reshape(array.shape))
    array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
    if array.dtype not in _NAMES:
        raise ValueError(f"input {name!r}: dtype {array.dtype} is none of {', '.join(map(str, _NAMES))}, str")
    return InferTensor(_NAMES[array.dtype], array)


def encode_request(inputs: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """A request's body and headers; ValueError names an input of a dtype that no model takes."""
    wires = {name: _as_wire(name, tensor) for name, tensor in inputs.items()}
    parts = [binary_data(wire) for wire in wires.values()]
    described = [
        {
            "name": name,
            "datatype": wire.datatype,
            "shape": wire.data.shape,
            "parameters": {"binary_data_size": len(data)},
        }
        for (name, wire), data in zip(wires.items(), parts, strict=True)
    ]
    request = {"inputs": described, "parameters": {"binary_data_output": True, **parameters}}
    header = json.dumps(request).encode()
    headers = {JSON_LENGTH_HEADER: str(len(header)), "Content-Type": "application/octet-stream"}
    return b"".join([header, *parts]), headers


def decode_answer(body: bytes, header_length: str | None) -> Answer:
    """What a body says. ValueError, whatever is wrong with it."""
    try:
        length = len(body) if header_length is None else int(header_length)
        if not 0 <= length <= len(body):
            raise ValueError(f"{JSON_LENGTH_HEADER} is {length} of {len(body)} bytes")
        header = json.loads(body[:length])
        outputs = {}
        for each in header["outputs"]:
            head = parse_head(each["name"], each["datatype"], each["shape"], kind="output")
            end = length + each["parameters"]["binary_data_size"]
            outputs[head.name] = parse_binary_data(head, memoryview(body)[length:end]).data
            length = end
        if length != len(body):
            raise ValueError(f"outputs of {length} bytes in a body of {len(body)}")
        return Answer(outputs, str(header.get("model_version", "")))
    except ServeError as error:
        raise ValueError(str(error)) from error
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error

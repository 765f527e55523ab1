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
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote, urlsplit

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..system.excerpt import excerpt
from .messages import DATATYPES, InferTensor, ServeError, Status
from .tensors import JSON_LENGTH_HEADER, binary_data, parse_binary_data, parse_head

__all__ = ["Answer", "Client", "Tensor", "Values", "decode_answer", "encode_request"]

Values: TypeAlias = "ArrayLike | torch.Tensor"
Tensor: TypeAlias = "NDArray[Any] | torch.Tensor"

_NAMES: Final = {dtype: name for name, dtype in DATATYPES.items() if name not in ("BF16", "BYTES")}
_STATUSES: Final = {status.http: status for status in reversed(Status)} | {503: Status.UNAVAILABLE}
_MAX_ERROR_CHARS: Final = 2000


class Answer(NamedTuple):
    """What a model answered.

    Attributes:
        outputs: by name, read-only; BF16 as uint16 bit patterns.
        version: of the store, that all outputs are of.
    """

    outputs: dict[str, NDArray[Any]]
    version: str


class _Reply(NamedTuple):
    status: int
    header_length: str | None
    body: bytes


class Client:
    """Speaks to one server. For any number of threads: each call takes a connection for itself, and leaves it idle.

    Every method raises ``ServeError`` if the server refuses or fails (HTTP 503 is UNAVAILABLE, also where a queue is
    full), ``TimeoutError`` if no answer comes in time, and ``ConnectionError`` if there is no server or it does not
    speak the protocol; the last two name the address.

    Args:
        url: "http://host:port" or "https://host:port".
        token: for servers that want one.
        timeout: seconds for each step of an exchange, to connect, to send, to receive.

    Raises:
        ValueError: url or timeout is not of this form.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"url={excerpt(url)}: expected http://host:port or https://host:port")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: expected seconds, more than 0")
        self._is_tls: Final = parts.scheme == "https"
        self._host: Final = parts.hostname
        self._port: Final = parts.port or (443 if self._is_tls else 80)
        self._timeout: Final = timeout
        self._headers: Final = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._idle: Final[list[http.client.HTTPConnection]] = []

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections; a later call opens a new one."""
        while self._idle:
            self._idle.pop().close()

    def ready(self) -> bool:
        """Whether the server takes requests; False also while it warms up or drains."""
        reply = self._exchange("GET", "/v2/health/ready", b"", {}, self._timeout)
        if reply.status in (200, 400, 503):
            return reply.status == 200
        raise _error(reply)

    def models(self) -> list[str]:
        """Names of all models."""
        listed = self._json("POST", "/v2/repository/index")
        return [each["name"] for each in listed]

    def metadata(self, model: str, *, version: str = "") -> dict[str, Any]:
        """The protocol's metadata: name, versions, platform, inputs, outputs, parameters."""
        found: dict[str, Any] = self._json("GET", _path(model, version))
        return found

    def infer(
        self, model: str, inputs: Mapping[str, Tensor], *, version: str = "", timeout: float | None = None
    ) -> Answer:
        """Ask a model.

        Args:
            inputs: by name; on any device. They go as they are: no dtype is converted.
            version: of the store, or "" for whichever is served.
            timeout: seconds, instead of the client's. The server is told, and drops a request that is late.

        Raises:
            ValueError: a dtype that the protocol does not have; names the input.
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
            values: int64 [N], the ids of all bags: feature by feature, and in it sample by sample.
            lengths: int32 [F, B], ids of each bag.

        Raises:
            TypeError: values or lengths are not integers, dense no numbers. ValueError: an integer does not fit.
        """
        inputs: dict[str, Tensor] = {
            "dense": _array(dense, "dense", np.float32),
            "values": _array(values, "values", np.int64),
            "lengths": _array(lengths, "lengths", np.int32),
        }
        return self._one("ranking", inputs, "probabilities")

    def pooled(self, ids: Values, lengths: Values, *, table: str) -> NDArray[np.float32]:
        """Pooled rows, float32 [B, dim], of B bags of a table.

        Args:
            ids: int64 [N], bag by bag.
            lengths: int32 [B], ids of each bag.

        Raises:
            TypeError: ids or lengths are not integers. ValueError: one does not fit.
        """
        inputs: dict[str, Tensor] = {
            "ids": _array(ids, "ids", np.int64),
            "lengths": _array(lengths, "lengths", np.int32),
        }
        return self._one(f"pooled.{table}", inputs, "embeddings")

    def rows(self, ids: Values, *, table: str) -> NDArray[np.float32]:
        """Rows, float32 [N, dim], of a table, by ids, int64 [N]; errors as ``pooled``."""
        return self._one(f"rows.{table}", {"ids": _array(ids, "ids", np.int64)}, "rows")

    def _one(self, model: str, inputs: Mapping[str, Tensor], output: str) -> NDArray[np.float32]:
        answer = self.infer(model, inputs)
        if output not in answer.outputs:
            raise ConnectionError(f"{self.address}: model {model!r} answered without {output!r}")
        return answer.outputs[output]

    def _json(self, method: str, path: str) -> Any:
        reply = self._exchange(method, path, b"", {}, self._timeout)
        if reply.status != 200:
            raise _error(reply)
        try:
            return json.loads(reply.body)
        except ValueError as error:
            raise ConnectionError(f"{self.address}: {path} did not answer in JSON") from error

    def _exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str], seconds: float) -> _Reply:
        """One request and its answer. A connection that the server closed while it was idle is replaced, once."""
        try:
            with contextlib.suppress(IndexError):
                idle = self._idle.pop()
                try:
                    return self._speak(idle, method, path, body, headers, seconds)
                except (ConnectionError, http.client.BadStatusLine):
                    self.close()  # whoever asks reads only, so that asking twice does no harm
            return self._speak(self._connection(seconds), method, path, body, headers, seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{self.address}: no answer within {seconds} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"{self.address}: {str(error) or type(error).__name__}") from error

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=seconds, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=seconds)

    def _speak(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        seconds: float,
    ) -> _Reply:
        try:
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            connection.request(method, path, body, {**self._headers, **headers})
            response = connection.getresponse()
            reply = _Reply(response.status, response.headers.get(JSON_LENGTH_HEADER), response.read())
        except BaseException:
            # What is left of the answer must not be taken for the next one.
            connection.close()
            raise
        self._idle.append(connection)
        return reply


def _array(values: Values, name: str, dtype: type[np.integer[Any] | np.float32]) -> NDArray[Any]:
    """An array of that dtype: integers of integers alone, none changed; float32 of any real numbers, rounded.

    Raises:
        TypeError: values are no such numbers. ValueError: an integer does not fit.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    else:
        array = np.asarray(values)
    if not array.size and not isinstance(values, (np.ndarray, torch.Tensor)):
        return array.astype(dtype)  # numpy takes an empty list for floats
    if issubclass(dtype, np.integer):
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers that fit {dtype.__name__}, not {array.dtype}")
        if array.size and not np.can_cast(array.dtype, dtype):
            for value in (int(array.min()), int(array.max())):
                if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                    raise ValueError(f"{name} must fit {dtype.__name__}; {value} does not")
    elif array.dtype.kind not in "iufb":
        raise TypeError(f"{name} must be real numbers, not {array.dtype}")
    return array.astype(dtype, copy=False)


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
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            return InferTensor("BF16", tensor.view(torch.int16).numpy())
        tensor = tensor.numpy()
    array = np.asarray(tensor)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in _NAMES:
        raise ValueError(f"input {name!r}: dtype {array.dtype} is none of {', '.join(map(str, _NAMES))}, bfloat16")
    return InferTensor(_NAMES[array.dtype], array)


def encode_request(inputs: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """A request's body and headers.

    Raises:
        ValueError: a dtype that the protocol does not have; names the input.
    """
    described: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    for name, tensor in inputs.items():
        datatype, array = wire = _as_wire(name, tensor)
        binary = {"binary_data_size": array.nbytes}
        described.append({"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": binary})
        parts.append(binary_data(wire))
    request = {"inputs": described, "parameters": {"binary_data_output": True, **parameters}}
    header = json.dumps(request).encode()
    headers = {JSON_LENGTH_HEADER: str(len(header)), "Content-Type": "application/octet-stream"}
    return b"".join([header, *parts]), headers


def decode_answer(body: bytes, header_length: str | None) -> Answer:
    """What a body says. ValueError, whatever is wrong with it."""
    try:
        return _decode(body, header_length)
    except ServeError as error:
        raise ValueError(str(error)) from error
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _decode(body: bytes, header_length: str | None) -> Answer:
    length = len(body) if header_length is None else int(header_length)
    if not 0 <= length <= len(body):
        raise ValueError(f"{JSON_LENGTH_HEADER} is {length} of {len(body)} bytes")
    header = json.loads(body[:length])
    outputs = {}
    for each in header["outputs"]:
        head = parse_head(each["name"], each["datatype"], each["shape"], kind="output")
        size_bytes = each.get("parameters", {}).get("binary_data_size")
        if size_bytes is None:
            array = np.array(each["data"], DATATYPES[head.datatype]).reshape(head.shape)
            array.flags.writeable = False
        else:
            array = parse_binary_data(head, memoryview(body)[length : length + size_bytes]).data
            length += size_bytes
        outputs[head.name] = array
    if length > len(body) or (header_length is not None and length < len(body)):
        raise ValueError(f"outputs of {length} bytes in a body of {len(body)}")
    return Answer(outputs, str(header.get("model_version", "")))

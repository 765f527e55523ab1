"""What REST and gRPC do alike around a request: who may ask, what is refused, and how much is held of answers."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..system import __version__
from ..system.checks import excerpt
from .bearer_token import Token
from .limits import LARGE_RESPONSE_BYTES, Budget, Hold, Limits
from .messages import ServeError, Status, TensorSpec
from .repository import Repository

DATA_TYPES: Final = {"TYPE_INT32": 8, "TYPE_INT64": 9, "TYPE_FP32": 11, "TYPE_STRING": 13}
"""By the names in JSON, the numbers over gRPC."""
_EXTENSIONS: Final = ("binary_tensor_data", "model_configuration", "statistics")
_REPOSITORY: Final = ("model_repository", "model_repository(unload_dependents)")


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
    """One protocol's side of the engine: "http" or "grpc". Requests must show the token, but for those about health;
    those that load and unload the admin token, without which there are none. ValueError: a token that cannot be
    sent."""

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

    def require_admin_token(self, shown: Sequence[str | bytes]) -> None:
        """ServeError INVALID, nothing is loaded and unloaded here, or UNAUTHENTICATED."""
        with self.noting_refusals():
            if self.engine.admin_token is None:
                way_out = "start it with --model-control explicit and --admin-token-file"
                raise ServeError(Status.INVALID, f"this server loads and unloads nothing; {way_out}")
            if not self.engine.admin_token.is_shown(shown):
                raise ServeError(Status.UNAUTHENTICATED, "give the admin token: Authorization: Bearer TOKEN")

    def hold_request(self, model: str) -> Hold:
        """A request's part of what may be under way. Of several stores each has its own, where any request counts as
        ``_least`` more: so the queue of one leaves calls and connections to the others."""
        part = self._parts.get(model.partition(".")[0])
        return self.requests.hold() if part is None else part.hold(self._least)

    async def change(self, what: str, store: str, parameters: Iterable[str]) -> None:
        """ "load" or "unload" a store; ServeError."""
        with self.noting_refusals():
            for name in set(parameters) - {"unload_dependents"}:
                way_out = "a store is loaded as the server was started with it"
                raise ServeError(Status.INVALID, f"parameter {excerpt(name)} is not taken; {way_out}")
            await self.engine.change(what, store)

    def about(self) -> dict[str, Any]:
        """The server's metadata."""
        extensions = [*_EXTENSIONS, *(() if self.engine.admin_token is None else _REPOSITORY)]
        return {"name": "tierstore", "version": __version__, "extensions": extensions}

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
        model = self.engine.model(name, version)
        return {
            "name": model.name,
            "platform": model.platform,
            "backend": model.platform,
            "max_batch_size": 0,
            "input": [_tensor(spec) for spec in model.inputs],
            "output": [_tensor(spec) for spec in model.outputs],
            "parameters": {name: {"string_value": str(value)} for name, value in model.parameters.items()},
        }

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Triton's statistics of one model, or of all; ServeError NOT_FOUND."""
        models = [self.engine.model(name, version)] if name else self.engine.models()
        told = {each.name: {"name": each.name, "version": each.versions[-1]} for each in models}
        return {"model_stats": [about | self.engine.statistics(name) for name, about in told.items()]}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    kind = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.shape)}

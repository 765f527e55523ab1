"""An engine without a store, to test what speaks to one."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tierstore.serve import messages
from tierstore.serve.messages import (
    DATATYPES,
    InferRequest,
    InferResponse,
    InferTensor,
    ModelMetadata,
    ServeError,
    Status,
    TensorSpec,
)
from tierstore.serve.repository import Repository

VERSION = "7"


class FakeEngine(Repository):
    """Models "echo" (each input comes back as an output of its name), "double" (x FP32 [-1, 3] as y, twice it), "slow"
    (waits until ``let_go``), "zeros" (so many as x INT64 [1] says, UINT8), "full", "late", "broken" (each fails in its
    way). It keeps the requests ``seen``, those ``cancelled`` while "slow" held them, and what was ``refused``."""

    is_live = is_ready = True
    store_names = ()

    def __init__(self) -> None:
        self.seen: list[InferRequest] = []
        self.refused: list[tuple[str, Exception]] = []
        self.cancelled: list[InferRequest] = []
        self.let_go = asyncio.Event()
        x, y = (TensorSpec(name, "FP32", (-1, 3)) for name in "xy")
        about: dict[str, Any] = {"versions": (VERSION,), "platform": "tierstore", "inputs": (x,), "outputs": (y,)}
        self._models = {
            name: ModelMetadata(name=name, parameters={"features": "a,b"}, **about)
            for name in ("broken", "double", "echo", "full", "late", "slow", "zeros")
        }

    def model(self, name: str, version: str = "") -> ModelMetadata:
        if name not in self._models:
            raise ServeError(Status.NOT_FOUND, f"no model {name!r}; did you mean 'echo'?")
        if version not in ("", VERSION):
            raise ServeError(Status.NOT_FOUND, f"version {version!r} is not served; {VERSION} is")
        return self._models[name]

    def index(self) -> list[dict[str, str]]:
        state = "READY" if self.is_ready else "UNAVAILABLE"
        return [{"name": name, "version": VERSION, "state": state} for name in self._models]

    def is_model_ready(self, name: str, version: str = "") -> bool:
        self.model(name, version)
        return self.is_ready

    async def infer(self, request: InferRequest) -> InferResponse:
        self.seen.append(request)
        self.model(request.model, request.version)
        for name, tensor in request.inputs.items():
            assert tensor.data.dtype == DATATYPES[tensor.datatype], name
        outputs = await self._outputs(request)
        return InferResponse(model=request.model, version=VERSION, id=request.id, outputs=outputs)

    async def _outputs(self, request: InferRequest) -> Mapping[str, InferTensor]:
        failures: dict[str, Any] = {
            "full": ServeError(Status.OVERLOADED, "the queue is full"),
            "late": ServeError(Status.DEADLINE, "the deadline passed in the queue"),
            "broken": ServeError(Status.INTERNAL, "the model failed"),
        }
        if request.model in failures:
            raise failures[request.model]
        if request.model == "slow":
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled.append(request)
                raise
        if request.model in ("echo", "slow"):
            return dict(request.inputs)
        if request.model == "zeros":
            return {"x": InferTensor("UINT8", np.zeros(int(request.inputs["x"].data[0]), np.uint8))}
        x = request.inputs.get("x")
        if x is None or x.datatype != "FP32" or x.data.ndim != 2:
            raise ServeError(Status.INVALID, "input 'x' must be FP32 [-1, 3]")
        return {"y": InferTensor("FP32", np.ascontiguousarray(x.data * 2))}

    def note_refused(self, protocol: str, error: Exception, request_id: str = "") -> None:
        self.refused.append((protocol, error))


class Held:
    """Stands between two pieces of an answer that is encoded, and waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began = threading.Event()
        self.may_go_on = threading.Event()
        monkeypatch.setattr(messages, "pause", self)

    async def __call__(self) -> None:
        self.began.set()
        while not self.may_go_on.is_set():
            await asyncio.sleep(0.005)

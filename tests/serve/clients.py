"""What tests ask servers over REST: httpx carries what Triton's client writes and reads."""

from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

LENGTH = "Inference-Header-Content-Length"


class Answer(NamedTuple):
    outputs: dict[str, np.ndarray]
    version: str


class Client(httpx.Client):
    """For any thread. What is refused raises InferenceServerException."""

    def __init__(self, url: str, *, token: str = "") -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        super().__init__(base_url=url, headers=headers, timeout=60, trust_env=False)

    def ready(self) -> bool:
        return self.get("/v2/health/ready").status_code == 200

    def infer(self, model: str, inputs: dict[str, Any]) -> Answer:
        arrays = {name: np.asarray(each) for name, each in inputs.items()}
        given = [
            InferInput(name, list(each.shape), np_to_triton_dtype(each.dtype)).set_data_from_numpy(each)
            for name, each in arrays.items()
        ]
        body, length = InferenceServerClient.generate_request_body(given)
        reply = self.post(f"/v2/models/{model}/infer", content=body, headers={LENGTH: str(length)})
        if reply.is_error:
            raise InferenceServerException(reply.json()["error"], status=str(reply.status_code))
        found = InferenceServerClient.parse_response_body(reply.content, header_length=int(reply.headers[LENGTH]))
        told = found.get_response()
        return Answer({each["name"]: found.as_numpy(each["name"]) for each in told["outputs"]}, told["model_version"])

    def rank(self, dense: Any, values: Any, lengths: Any) -> np.ndarray:
        return self.infer("ranking", {"dense": dense, "values": values, "lengths": lengths}).outputs["probabilities"]

    def rows(self, ids: Any, *, table: str) -> np.ndarray:
        return self.infer(f"rows.{table}", {"ids": as_int64(ids)}).outputs["rows"]

    def pooled(self, ids: Any, lengths: Any, *, table: str) -> np.ndarray:
        bags = {"ids": as_int64(ids), "lengths": np.asarray(lengths, np.int32)}
        return self.infer(f"pooled.{table}", bags).outputs["embeddings"]


def as_int64(ids: Any) -> np.ndarray:
    return ids.numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids, np.int64)

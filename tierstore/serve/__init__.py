"""The inference server: models over a store, spoken to by the Open Inference Protocol, REST and gRPC."""

from .messages import InferRequest, InferResponse, InferTensor, ModelMetadata, ServeError, Status, TensorSpec

__all__ = ["InferRequest", "InferResponse", "InferTensor", "ModelMetadata", "ServeError", "Status", "TensorSpec"]

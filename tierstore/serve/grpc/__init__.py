"""The protocol over gRPC: messages in a descriptor pool of their own, the service, its limits."""

from .limits import GrpcLimits
from .server import GrpcServer

__all__ = ["GrpcLimits", "GrpcServer"]

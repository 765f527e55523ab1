"""The protocol over gRPC: messages in a descriptor pool of their own, and the service."""

from .server import GrpcServer

__all__ = ["GrpcServer"]

"""The protocol over gRPC: the bytes of its messages, and the service."""

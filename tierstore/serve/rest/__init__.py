"""The protocol over REST: an ASGI application, and the server that runs it within limits."""

from .app import RestApp
from .server import HttpServer

__all__ = ["HttpServer", "RestApp"]

"""The protocol over HTTP: the application, its bodies in JSON and binary, and the bounded server below."""

from .app import RestApp
from .limits import HttpLimits
from .require_token import RequireToken
from .server import HttpServer, TlsFiles, listen

__all__ = ["HttpLimits", "HttpServer", "RequireToken", "RestApp", "TlsFiles", "listen"]

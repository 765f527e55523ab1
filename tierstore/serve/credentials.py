"""The server's certificate and key, which may be renewed while it serves; the token of its clients and that of its
operators.
"""

import asyncio
import hmac
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..system.checks import require_token

_LOG: Final = logging.getLogger("tierstore.serve")
_WATCH_SECONDS: Final = 5.0
"""Between two looks at the files."""


class Tls:
    """What all ports show, from PEM files. New connections get what ``renew`` has found. ValueError: they cannot be
    used."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate: Final = certificate.absolute()
        self.key: Final = key.absolute()
        self._pem = self._read()
        self.context: Final = self._loaded()

    def _read(self) -> tuple[bytes, bytes]:
        try:
            return self.certificate.read_bytes(), self.key.read_bytes()
        except OSError as error:
            raise self._unusable(error) from error

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.certificate, self.key, password=self._no_phrase)
        except OSError as error:  # ssl.SSLError is one
            raise self._unusable(error) from error

    def _no_phrase(self) -> bytes:
        """Instead of a question on the terminal."""
        raise self._unusable("the key has a pass phrase, for which nobody can be asked; store it without")

    def _unusable(self, why: object) -> ValueError:
        return ValueError(f"no certificate {self.certificate} with key {self.key}, both in PEM: {why}")

    def renew(self) -> None:
        """Read the files again, if they have changed. What cannot be used is logged, and changes nothing."""
        try:
            pem = self._read()
            if pem == self._pem:
                return
            self._loaded()  # a certificate that has come without its key, yet
            self._load(self.context)
        except ValueError as error:
            _LOG.error("the certificate is not renewed: %s", error)
        else:
            self._pem = pem
            _LOG.info("the certificate is renewed from %s", self.certificate)

    async def watch(self) -> None:
        """Renew now and then, until cancelled."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            await asyncio.to_thread(self.renew)

    def credentials(self) -> Any:
        """For gRPC, which asks at each handshake."""
        import grpc  # which a publisher of files does without

        shown: Any = None

        def fetch() -> Any:
            nonlocal shown
            if shown is self._pem:
                return None
            shown = certificate, key = self._pem
            return grpc.ssl_server_certificate_configuration([(key, certificate)])

        return grpc.dynamic_ssl_server_credentials(fetch(), fetch)


def read_token(path: str, *, name: str = "token_file") -> str:
    """What a token file holds, without white space around it; ValueError if it cannot be read or holds no token."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}={path!r} cannot be read: {error}") from None
    return require_token(text, f"{name}={path!r}: the token")


class Token:
    """A token of printable ASCII without spaces, else ValueError. It is compared in constant time."""

    def __init__(self, text: str) -> None:
        self._token = require_token(text, "the token").encode()

    def is_shown(self, authorization: Sequence[str | bytes]) -> bool:
        """Whether a request's Authorization headers are one "Bearer TOKEN"."""
        if len(authorization) != 1:
            return False
        given = authorization[0]
        scheme, _, shown = (given.encode(errors="replace") if isinstance(given, str) else given).partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(shown.strip(b" "), self._token)

"""The tokens: one that clients show, and one that operators show on the admin port."""

import base64
import binascii
import hmac
from collections.abc import Sequence
from pathlib import Path

from ..system.checks import require_token


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

    def is_shown(self, authorization: Sequence[str | bytes], *, or_as_password: bool = False) -> bool:
        """Whether a request's Authorization headers are one "Bearer TOKEN"; or "Basic ...", with the token as the
        password."""
        if len(authorization) != 1:
            return False
        given = authorization[0]
        scheme, _, shown = (given.encode(errors="replace") if isinstance(given, str) else given).partition(b" ")
        if scheme.lower() == b"bearer":
            return hmac.compare_digest(shown.strip(b" "), self._token)
        return or_as_password and scheme.lower() == b"basic" and hmac.compare_digest(_password(shown), self._token)


def _password(credentials: bytes) -> bytes:
    """Of "user:password" in base64; empty if it is not of that form."""
    try:
        return base64.b64decode(credentials.strip(b" "), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""

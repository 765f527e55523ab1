"""The tokens: one that clients show, and one that operators show on the admin port."""

import base64
import binascii
import hmac
from collections.abc import Sequence
from pathlib import Path


def read_token(path: str, *, name: str = "token_file") -> str:
    """What a token file holds, without white space around it; ValueError if it cannot be read or is empty."""
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}={path!r} cannot be read: {error}") from None
    if not text:
        raise ValueError(f"{name}={path!r} is empty")
    return text


class Token:
    """Knows it when it sees it. A comparison takes the same time wherever the shown token differs.

    Args:
        text: printable ASCII without spaces, else ValueError.
    """

    def __init__(self, text: str) -> None:
        if not (text and text.isascii() and text.isprintable() and " " not in text):
            raise ValueError("the token must be printable ASCII without spaces, and not empty")
        self._token = text.encode()

    def is_shown(self, authorization: Sequence[str | bytes], *, or_as_password: bool = False) -> bool:
        """Whether the values of a request's header Authorization are one, of the form "Bearer TOKEN".

        Args:
            or_as_password: take "Basic ..." too, with the token as the password of any user.
        """
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

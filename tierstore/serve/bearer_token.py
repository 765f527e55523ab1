"""The tokens: one that clients show, and one that operators show on the admin port."""

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

    def is_shown(self, authorization: Sequence[str | bytes]) -> bool:
        """Whether a request's Authorization headers are one "Bearer TOKEN"."""
        if len(authorization) != 1:
            return False
        given = authorization[0]
        scheme, _, shown = (given.encode(errors="replace") if isinstance(given, str) else given).partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(shown.strip(b" "), self._token)

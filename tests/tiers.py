"""Wrappers around a cold tier: latency and faults are put in front of it, not into it."""

from collections.abc import Callable
from typing import Any

from tierstore.io.base import ColdTier


class TroubledTier:
    """Passes everything on, after whatever ``before_read`` or ``before_write`` does: sleep, wait, raise."""

    def __init__(self, tier: ColdTier) -> None:
        self._tier = tier
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def read(self, *arguments: Any) -> None:
        self.before_read()
        self._tier.read(*arguments)

    def write(self, *arguments: Any, epoch: int) -> None:
        self.before_write()
        self._tier.write(*arguments, epoch=epoch)

"""The rows of all tables of one layout: a cache over the cold tier, leases, locks, write-back."""

from .pins import HELD_SHARE, PIN_POLL_SECONDS, PIN_WAIT_SECONDS
from .pool import Pool

__all__ = ["HELD_SHARE", "PIN_POLL_SECONDS", "PIN_WAIT_SECONDS", "Pool"]

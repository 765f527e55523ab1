"""A store's versions on other machines: what changed is sent as one file and applied as one version."""

from .apply import Applied, apply_update, roll_back_replica
from .publish import Update, write_update
from .update_file import Origin, origin_of

__all__ = ["Applied", "Origin", "Update", "apply_update", "origin_of", "roll_back_replica", "write_update"]

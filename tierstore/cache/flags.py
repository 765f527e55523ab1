"""What the flags of a slot say; one value in every cache."""

from typing import Final

RESIDENT: Final = 1
LOADING: Final = 2
DIRTY: Final = 4
FROZEN: Final = 8
CHANGED: Final = 16
"""Bits of a slot's flags; a free slot has none. CHANGED: marked dirty since its row was last taken to be written."""
FLAGS: Final = {"resident": RESIDENT, "loading": LOADING, "dirty": DIRTY, "frozen": FROZEN, "changed": CHANGED}
UNCLEAN: Final = DIRTY | FROZEN

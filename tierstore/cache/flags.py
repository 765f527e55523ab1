"""What the flags of a slot say; one value in every cache."""

from typing import Final

RESIDENT: Final = 1
LOADING: Final = 2
DIRTY: Final = 4
FROZEN: Final = 8
"""Bits of a slot's flags; a free slot has none."""
FLAGS: Final = {"resident": RESIDENT, "loading": LOADING, "dirty": DIRTY, "frozen": FROZEN}
UNCLEAN: Final = DIRTY | FROZEN

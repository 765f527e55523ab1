"""Answers in which every number is handled by itself, as JSON and typed contents want: written in pieces, between which
others are served."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from numpy.typing import NDArray

__all__ = ["PIECE_ELEMENTS", "pause", "pieces_of"]

PIECE_ELEMENTS: Final = 1 << 13
"""Encoded at a time: a third of a millisecond."""


async def pause() -> None:
    """Let the loop do what is due."""
    await asyncio.sleep(0)


async def pieces_of(flat: NDArray[Any]) -> AsyncIterator[NDArray[Any]]:
    """An array [n] in pieces, with a pause between two; none of an empty one."""
    for first in range(0, len(flat), PIECE_ELEMENTS):
        if first:
            await pause()
        yield flat[first : first + PIECE_ELEMENTS]

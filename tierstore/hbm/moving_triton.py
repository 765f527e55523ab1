"""The kernel that moves rows between the device and page-locked memory of the host; see ``rows_twin.move_rows``.

The host's rows lie one after another, so a warp's accesses of the bus are contiguous. The device's lie anywhere.
"""

# Triton takes an annotation for a type of its own.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def move_words(arena, buffer, slot, row, inside, WORDS: tl.constexpr, WIDTH: tl.constexpr, UP: tl.constexpr):
    """One part, weights or state, of some rows."""
    word = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (word < WORDS)
    on_device = arena + slot[:, None] * WORDS + word
    on_host = buffer + row[:, None] * WORDS + word
    if UP:
        tl.store(on_device, tl.load(on_host, mask=mask), mask=mask)
    else:
        tl.store(on_host, tl.load(on_device, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def move_tile(
    weights, state, host_weights, host_state, slots, count, WEIGHT_WORDS: tl.constexpr, STATE_WORDS: tl.constexpr,
    WEIGHT_WIDTH: tl.constexpr, STATE_WIDTH: tl.constexpr, UP: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    row = row.to(tl.int64)
    move_words(weights, host_weights, slot, row, inside, WEIGHT_WORDS, WEIGHT_WIDTH, UP)
    if STATE_WORDS:
        move_words(state, host_state, slot, row, inside, STATE_WORDS, STATE_WIDTH, UP)

"""Seeded random changes to bytes, for runs without a coverage-guided fuzzer."""

from collections.abc import Iterator, Sequence
from random import Random

INTERESTING = (
    *(0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)
MAX_BYTES = 1 << 16


def mutations(seeds: Sequence[bytes], words: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    random = Random(seed)
    for _ in range(count):
        data = bytearray(random.choice(seeds))
        for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
            _change(data, seeds, words, random)
        yield bytes(data[:MAX_BYTES])


def _change(data: bytearray, seeds: Sequence[bytes], words: Sequence[bytes], random: Random) -> None:
    place = random.randrange(len(data) + 1)
    kind = random.randrange(8)
    if kind == 0 and data:
        data[place % len(data)] ^= 1 << random.randrange(8)
    elif kind == 1 and data:
        data[place % len(data)] = random.randrange(256)
    elif kind == 2:
        width = random.choice((1, 2, 4, 8))
        value = random.choice(INTERESTING) % 2 ** (8 * width)
        data[place : place + width] = value.to_bytes(width, random.choice(("little", "big")))
    elif kind == 3:
        del data[place : place + random.randrange(1, 64)]
    elif kind == 4:
        data[place:place] = data[place : place + random.randrange(1, 64)] * random.choice((1, 2, 200))
    elif kind == 5 and words:
        data[place:place] = random.choice(words) * random.choice((1, 1, 1, 500))
    elif kind == 6:
        other = random.choice(seeds)
        start = random.randrange(len(other) + 1)
        data[place:] = other[start : start + 4096]
    else:
        data[place : place + random.choice((0, 1))] = str(random.choice(INTERESTING)).encode()

"""Hits of W-TinyLFU, S3-FIFO and SIEVE, with exact counts and ghosts.

Sources: G. Einziger et al., TinyLFU (ACM TOS 2017), with the constants of Caffeine; J. Yang et al., FIFO queues are all
you need for cache eviction (SOSP 2023); Y. Zhang et al., SIEVE is simpler than LRU (NSDI 2024).
"""

from collections import Counter, OrderedDict, deque

__all__ = ["PEERS"]


def _wtinylfu_hits(rows: list[int], capacity: int) -> int:
    """A window of a hundredth, the rest a segmented LRU of a fifth and four fifths; counts up to 15, halved every ten
    accesses a slot."""
    misses, counted, window_max, counts = 0, 0, max(1, capacity // 100), Counter[int]()
    window, probation, protected = OrderedDict[int, None](), OrderedDict[int, None](), OrderedDict[int, None]()
    for row in rows:
        if counts[row] < 15:
            counts[row] += 1
            counted += 1
        if counted >= 10 * capacity:
            counts, counted = Counter({key: count // 2 for key, count in counts.items()}), counted // 2
        if row in window:
            window.move_to_end(row)
        elif row in probation or row in protected:
            probation.pop(row, None)
            protected[row] = None
            protected.move_to_end(row)
            if len(protected) > (capacity - window_max) * 8 // 10:
                probation[protected.popitem(last=False)[0]] = None
        else:
            misses += 1
            window[row] = None
            if len(window) > window_max:
                candidate = window.popitem(last=False)[0]
                probation[candidate] = None
                if len(probation) + len(protected) > capacity - window_max:
                    victim = next(iter(probation))
                    del probation[victim if counts[victim] < counts[candidate] else candidate]
    return len(rows) - misses


def _s3fifo_hits(rows: list[int], capacity: int) -> int:
    """A small queue of a tenth, a main queue, and ghosts of as many rows as the main queue holds."""
    hits, small_max = 0, max(1, capacity // 10)
    small, main, ghosts, uses = deque[int](), deque[int](), OrderedDict[int, None](), dict[int, int]()
    for row in rows:
        if row in uses:
            hits += 1
            uses[row] = min(uses[row] + 1, 3)
            continue
        while len(uses) == capacity:
            queue = small if len(small) >= small_max or not main else main
            oldest = queue.popleft()
            if uses[oldest] > (queue is small):
                main.append(oldest)
                uses[oldest] = 0 if queue is small else uses[oldest] - 1
                continue
            del uses[oldest]
            if queue is small:
                ghosts[oldest] = None
                if len(ghosts) > max(1, capacity - small_max):
                    ghosts.popitem(last=False)
        (main if row in ghosts else small).append(row)
        ghosts.pop(row, None)
        uses[row] = 0
    return hits


def _sieve_hits(rows: list[int], capacity: int) -> int:
    """One queue; a hand goes from the oldest row to the newest and evicts the first that was not used since it came."""
    hits, passed, ahead, is_used = 0, deque[int](), deque[int](), dict[int, bool]()
    for row in rows:
        if row in is_used:
            hits += 1
        else:
            while len(is_used) == capacity:
                if not ahead:
                    passed, ahead = ahead, passed
                oldest = ahead.popleft()
                if is_used.pop(oldest):
                    is_used[oldest] = False
                    passed.append(oldest)
            ahead.append(row)
        is_used[row] = row in is_used
    return hits


PEERS = {"W-TinyLFU": _wtinylfu_hits, "S3-FIFO": _s3fifo_hits, "SIEVE": _sieve_hits}

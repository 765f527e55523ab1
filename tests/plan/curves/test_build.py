"""Curves of all accesses, and of tables; from accesses that are a sample already; and on real lookups."""

import numpy as np
import pytest

from tierstore.cache import DdrCache
from tierstore.plan import Accesses, MissRatioCurve
from tierstore.plan.curves import POLICIES, by_table, curve
from tierstore.plan.json_file import plain

SHIFT = 40


def accesses_of_keys(keys: np.ndarray, rate: float = 1.0) -> Accesses:
    tables = ("a", "b", "c")
    return Accesses(keys.astype(np.int64), np.arange(len(keys) + 1), tables, rate)


def random_accesses(seed: int, num: int = 4000) -> Accesses:
    """Two of three tables, the second with few rows."""
    rng = np.random.default_rng(seed)
    second = rng.random(num) < 0.3
    return accesses_of_keys(np.where(second, 2 << SHIFT | rng.integers(0, 20, num), rng.zipf(1.2, num) % 1000))


def same(one: MissRatioCurve, other: MissRatioCurve) -> bool:
    return plain(one) == plain(other)


@pytest.mark.parametrize("policy", ["lru", "lfu", "tinylfu"])
def test_a_curve_is_what_the_stores_cache_does(policy: str) -> None:
    accesses = random_accesses(1)
    made = curve(accesses, policy)
    assert made.policy == policy
    assert made.num_accesses == len(accesses.keys)
    assert made.num_rows == len(np.unique(accesses.keys))
    assert made.sampling_rate == 1
    assert made.sizes[0] == 1
    assert made.sizes[-1] == made.num_rows
    for size in made.sizes[:: max(1, len(made.sizes) // 20)].tolist():
        cache = DdrCache(size, weight_words=0, state_words=0, policy=policy)
        assert made.hit_rate(size) == pytest.approx(cache.access(accesses.keys).mean(), abs=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("skip", [1, 1700, 3999])
def test_skipped_batches_fill_the_cache_and_do_not_count(policy: str, skip: int) -> None:
    accesses, sizes = random_accesses(3), [1, 10, 100, 500]
    before = accesses._replace(keys=accesses.keys[:skip], starts=accesses.starts[: skip + 1])
    first, whole, rest = (
        each.miss_ratios * each.num_accesses
        for each in (
            curve(before, policy, sizes=sizes),
            curve(accesses, policy, sizes=sizes),
            curve(accesses, policy, sizes=sizes, skip=skip),
        )
    )
    np.testing.assert_allclose(first + rest, whole, rtol=1e-12)
    counted = accesses._replace(sampling_rate=0.5, all_lookups=(5000, 0, 3000))
    assert curve(counted, policy, sizes=sizes, skip=1000).num_accesses == 6000


def test_accesses_that_are_a_sample_give_the_curve_of_all() -> None:
    rng = np.random.default_rng(7)
    half = accesses_of_keys(rng.integers(0, 400, 20_000), 0.5)
    made, whole = curve(half, "lru", sizes=[2, 200, 400, 800]), curve(half._replace(sampling_rate=1.0), "lru")
    assert (made.num_accesses, made.num_rows, made.sampling_rate) == (40_000, 800, 0.5)
    # 0.25 rows more than half of the size: half a row for the newest, of which half is in its share.
    between = [0.75 * whole.miss_ratio(size) + 0.25 * whole.miss_ratio(size + 1) for size in (1, 100, 200)]
    np.testing.assert_allclose(made.miss_ratios, [*between, 400 / 20_000], rtol=1e-12)
    assert made.warning.endswith("record every row")
    assert not whole.warning


def test_lookups_of_all_rows_say_what_misses_are_a_share_of() -> None:
    """The sampled rows have more accesses than their share, then fewer; the misses stay theirs."""
    half = random_accesses(11)._replace(sampling_rate=0.5)
    sizes = [1, 40, 400, 2000]
    for policy in POLICIES:
        plain = curve(half, policy, sizes=sizes)
        for counts in ((4500, 0, 2500), (6000, 0, 4000)):
            counted = half._replace(all_lookups=counts)
            made = curve(counted, policy, sizes=sizes)
            assert made.num_accesses == sum(counts)
            expected = np.minimum(plain.miss_ratios * 8000 / sum(counts), 1)
            np.testing.assert_allclose(made.miss_ratios, expected, rtol=1e-12)


def test_what_cannot_be_is_said() -> None:
    accesses, none = random_accesses(9), accesses_of_keys(np.empty(0))
    with pytest.raises(ValueError, match="there is no access"):
        curve(none, "lru")
    for call in (curve, by_table):
        with pytest.raises(ValueError, match=r"policy='lrv': did you mean 'lru'\?"):
            call(accesses, "lrv")
    for sizes in ([0, 3], [-1], [], [1.5]):
        with pytest.raises(ValueError, match=r"sizes=\[.*whole numbers of rows"):
            curve(accesses, "lru", sizes=sizes)
    with pytest.raises(ValueError, match=r"skip=4000"):
        curve(accesses, "lru", skip=4000)

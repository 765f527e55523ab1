"""Accesses by a histogram of uses, against what is counted in them."""

from pathlib import Path

import numpy as np
import pytest

from bench.data import find_criteo
from tierstore.plan.traces import ReuseProfile, draw_reuse, read_reuse_profiles, reuse_histogram
from tierstore.plan.traces.histogram import HISTOGRAM_LOWS, ReuseBin
from tierstore.plan.traces.reuse import fitted_uses

YEARS = (2021, 2022)
SMALL = ReuseProfile(
    "small",
    100,
    10_000,
    2950,
    (
        ReuseBin(0, 1, 0.339, 0.1),
        ReuseBin(1, 4, 0.508, 0.4),
        ReuseBin(4, 16, 0.15, 0.4),
        ReuseBin(16, None, 0.003, 0.1),
    ),
)
TEXT = """one.pt
Locality stats after processing 2 batches of size 50
Avg # of indices: 1000
Avg # of unique cols: 400
Avg col size: 2.5
Histogram of col sizes:
(0, 1]: 0.500
(1, 2]: 0.300
(2+: 0.200
[0, 1, 2]
['0.000', '0.500', '0.800', '1.000']
Ratio of index distribution at different column sizes:
(0, 1]: 0.200
(1, 2]: 0.240
(2+: 0.560
[0, 1, 2]
"""


def published(year: int) -> list[ReuseProfile]:
    data = find_criteo()
    path = None if data is None else data.parent / "profiles" / f"meta_dlrm_datasets_{year}_locality_stats.txt"
    if path is None or not path.is_file():
        pytest.skip("no published histograms")
    return read_reuse_profiles(path)


def shares(uses: np.ndarray, profile: ReuseProfile) -> list[tuple[float, float]]:
    """(of rows, of accesses) by bin."""
    found = []
    for low, high, _, _ in profile.bins:
        own = uses[(uses > low) & (uses <= (high or uses.max()))]
        found.append((len(own) / len(uses), own.sum() / uses.sum()))
    return found


@pytest.mark.parametrize("year", YEARS)
def test_every_published_histogram_is_kept_within_two_points(year: int) -> None:
    profiles = published(year)
    assert len(profiles) == {2021: 17, 2022: 16}[year]
    for profile in profiles:
        accesses = draw_reuse(profile, scale=1_200_000 / profile.accesses, seed=1)
        uses = np.bincount(accesses.keys)
        assert uses.min() > 0
        for (rows, own), each in zip(shares(uses, profile), profile.bins, strict=True):
            assert abs(rows - each.rows) < 0.02
            assert abs(own - each.accesses) < 0.02
        assert abs(len(accesses.keys) / 1_200_000 - 1) < 0.02
        assert abs(len(uses) / (1_200_000 / profile.accesses * profile.rows) - 1) < 0.05


def test_a_published_block_is_read_whole() -> None:
    first = published(2021)[0]
    assert (first.name, first.samples, first.accesses, first.rows) == (
        "fbgemm_t856_bs65536.pt", 65_536, 887_017_990, 128_435_723,
    )  # fmt: skip
    assert len(first.bins) == 17
    assert first.bins[2] == (2, 4, 0.139, 0.068)
    assert first.bins[-1] == (32_768, None, 0.0, 0.019)


@pytest.mark.parametrize("scale", [0.1, 1, 7.5])
def test_uses_are_within_their_bins(scale: float) -> None:
    uses = fitted_uses(SMALL, scale)
    for (rows, own), each in zip(shares(uses, SMALL), SMALL.bins, strict=True):
        assert abs(rows - each.rows) < 0.02
        assert abs(own - each.accesses) < 0.02
    assert abs(uses.sum() - scale * SMALL.accesses) <= 0.03 * scale * SMALL.accesses
    assert abs(len(uses) - scale * SMALL.rows) <= 0.03 * scale * SMALL.rows


def test_rows_give_way_to_accesses() -> None:
    """Shares of rows that are rounded to 404 and 248 rows cannot have these accesses: those used once are as many as
    their accesses, and 248 rows that are used twice have more than 495."""
    bins = ReuseBin(0, 1, 0.62, 0.45), ReuseBin(1, 4, 0.38, 0.55)
    uses = fitted_uses(ReuseProfile("tight", 1, 900, 652, bins), 1)
    assert np.count_nonzero(uses == 1) == 405
    assert (np.count_nonzero(uses > 1), uses[uses > 1].sum(), uses.max()) == (247, 495, 3)


def test_accesses_are_in_no_order() -> None:
    accesses = draw_reuse(SMALL, scale=1, seed=1)
    keys = accesses.keys
    assert sorted(np.unique(keys, return_counts=True)[1].tolist()) == sorted(fitted_uses(SMALL, 1).tolist())
    assert keys.min() == 0
    assert keys.max() == len(np.unique(keys)) - 1
    # The mean place of all accesses of the rows that are used most is the middle.
    busy = np.flatnonzero(np.bincount(keys) > 16)
    places = np.flatnonzero(np.isin(keys, busy))
    assert abs(places.mean() / len(keys) - 0.5) < 4 * 12**-0.5 / len(places) ** 0.5
    assert np.array_equal(keys, draw_reuse(SMALL, scale=1, seed=1).keys)
    assert not np.array_equal(keys, draw_reuse(SMALL, scale=1, seed=2).keys)


def test_a_batch_is_a_sample_unless_told() -> None:
    assert np.diff(draw_reuse(SMALL, scale=1, seed=1).starts)[:-1].tolist() == [100] * (
        draw_reuse(SMALL, scale=1, seed=1).num_batches - 1
    )
    assert draw_reuse(SMALL, scale=1, seed=1, batch_accesses=4000).num_batches == 3


@pytest.mark.parametrize("clustering", [0.5, 0.9, 0.99])
def test_clustered_accesses_of_a_row_are_near(clustering: float) -> None:
    """Round a clock whose hour is the whole trace, each row's accesses lie within their part of it."""
    keys = draw_reuse(SMALL, scale=1, seed=3, clustering=clustering).keys
    loose = draw_reuse(SMALL, scale=1, seed=3).keys
    assert np.array_equal(np.bincount(keys), np.bincount(loose))
    widest = farthest = 0.0
    for row in np.flatnonzero(np.bincount(keys) > 3):
        places = np.flatnonzero(keys == row) / len(keys)
        gaps = np.diff(np.append(places, places[0] + 1))
        widest = max(widest, 1 - gaps.max())
        farthest = max(farthest, places[-1] - places[0])
    # Some row's part of the clock goes over twelve.
    assert farthest > clustering
    # Places are not times: where rows are dense, a part of the time has more than its part of the accesses.
    assert 0.5 * (1 - clustering) < widest < 1.5 * (1 - clustering) + 0.02


def test_reading_blocks(tmp_path: Path) -> None:
    path = tmp_path / "stats.txt"
    path.write_text(TEXT + "\n" + TEXT.replace("one.pt", "two.pt"))
    one, two = read_reuse_profiles(path)
    assert one == ReuseProfile(
        "one.pt",
        100,
        1000,
        400,
        (ReuseBin(0, 1, 0.5, 0.2), ReuseBin(1, 2, 0.3, 0.24), ReuseBin(2, None, 0.2, 0.56)),
    )
    assert two == one._replace(name="two.pt")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (TEXT, "", "has 0 bytes"),
        (TEXT, "some text", "the block 'some text' lacks its size"),
        ("Avg # of indices: 1000\n", "", "lacks its size, its counts"),
        ("Avg # of indices: 1000", "Avg # of indices: many", "invalid literal"),
        ("Avg # of indices: 1000", "Avg # of indices: 10", "counts that cannot be"),
        ("Histogram of col sizes:\n", "", "one of its two histograms"),
        ("(1, 2]: 0.240\n", "", "different bins"),
        ("(0, 1]", "(3, 1]", r"the bin \(3, 1\] of 'one.pt' is empty"),
    ],
)
def test_files_that_have_no_histogram(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = tmp_path / "stats.txt"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ValueError, match=reason) as raised:
        read_reuse_profiles(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"scale": 0.0}, "scale=0.0: expected above 0, and at most"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"scale": 1e9}, "scale="),
        ({"scale": 0.002}, "rows that are used more than .* take a larger scale"),
        ({"clustering": 1.0}, "clustering=1.0: expected a number from 0, and below 1"),
        ({"batch_accesses": 0}, "batch_accesses=0"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        draw_reuse(SMALL, **({"scale": 1.0, "seed": 0} | arguments))


def test_histograms() -> None:
    uses = [1, 1, 2, 3, 4, 5, 32_768, 32_769]
    found = {each.low: each for each in reuse_histogram(np.array(uses))}
    assert tuple(found) == HISTOGRAM_LOWS
    assert found[0][2:] == (2 / 8, 2 / sum(uses))
    assert found[2][2:] == (2 / 8, 7 / sum(uses))
    assert found[16_384] == (16_384, 32_768, 1 / 8, 32_768 / sum(uses))
    assert found[32_768] == (32_768, None, 1 / 8, 32_769 / sum(uses))
    assert sum(each.rows for each in found.values()) == 1
    assert not any(each.rows or each.accesses for each in reuse_histogram(np.empty(0, np.int64)))
